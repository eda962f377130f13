"""A rule finds one thing in a graph; what a target makes of it stands in the target's file."""

from __future__ import annotations

from collections.abc import Callable, Iterable
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
FINDERS: dict[str, Finder] = {}


def rule(name: str) -> Callable[[Finder], Finder]:
    """Registers what finds the rule of that name."""

    def register(finder: Finder) -> Finder:
        assert name not in FINDERS
        FINDERS[name] = finder
        return finder

    return register
