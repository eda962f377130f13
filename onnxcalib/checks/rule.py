"""A rule finds one thing in a graph; what a target makes of it stands in the target's file."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import onnx

from onnxcalib.checks.view import Quantizer, View
from onnxcalib.targets import Target

Hits = Iterable[tuple[onnx.NodeProto | None, str]]  # the node, None for the whole file, and what is special about it


@dataclass(frozen=True)
class Scene:
    """What a rule looks at."""

    model: onnx.ModelProto
    view: View
    target: Target

    def takes_alone(self, weight: Quantizer) -> bool:
        """Whether a weight is quantized alone, at a width that the target takes."""
        bits = {"s4": 4, "s8": 8}.get(weight.type or "")
        return weight.constant and self.view.weight_only and bits in self.target.weight_only_bits


Finder = Callable[[Scene], Hits]
Reading = Callable[[Scene], Iterable[tuple[onnx.NodeProto, Quantizer]]]  # quantizers with the nodes they are named by
Teller = Callable[[Quantizer], str]  # what is special about a quantizer; empty: nothing
FINDERS: dict[str, Finder] = {}


def rule(name: str) -> Callable[[Finder], Finder]:
    """Registers what finds the rule of that name."""

    def register(finder: Finder) -> Finder:
        assert name not in FINDERS
        FINDERS[name] = finder
        return finder

    return register


def rules_about(read: Reading, tellers: Mapping[str, Teller]) -> None:
    """Registers rules that look at one quantizer at a time."""

    def finder(tell: Teller) -> Finder:
        return lambda scene: ((node, what) for node, it in read(scene) if (what := tell(it)))

    for name, tell in tellers.items():
        rule(name)(finder(tell))


def of_type(wanted: str, words: str, names: Mapping[str, str]) -> Teller:
    """Tells of quantized values whose type goes by the wanted name; a type without a name is another."""
    return lambda it: f"{words} is {it.type}" if it.type and names.get(it.type, "other") == wanted else ""
