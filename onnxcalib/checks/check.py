"""Runs the rules over a file."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import onnx

# Rules register themselves.
from onnxcalib.checks import activation_rules, file_rules, layer_rules, quantizer_rules  # noqa: F401
from onnxcalib.checks.rule import FINDERS, Scene
from onnxcalib.checks.view import label, views_of
from onnxcalib.errors import understanding
from onnxcalib.model.constants import constants_to_initializers
from onnxcalib.model.integer_products import as_float_layers
from onnxcalib.model.io import copied, load
from onnxcalib.targets import Dynamic, Severity, Target

MATTERING = (Severity.REFUSED, Severity.FLOAT)
ORDER = list(Severity)


@dataclass(frozen=True)
class Finding:
    """One thing that the target refuses, keeps in float or runs slowly."""

    node: str  # empty: the whole file
    op: str
    rule: str
    severity: Severity
    what: str
    reason: str
    source: str


def check_file(path: str | Path, target: Target) -> list[Finding]:
    """What the target will make of a file, in the order of its nodes."""
    with understanding(str(path)):
        return check_model(load(Path(path)), target)


def check_model(model: onnx.ModelProto, target: Target) -> list[Finding]:
    """The same for a model in memory, which stays as it is."""
    copy = copied(model)
    constants_to_initializers(copy.graph)
    if target.dynamic is not Dynamic.NONE:
        as_float_layers(copy.graph, ("MatMulInteger",))
    found = list(_findings(copy, target))
    place = {label(node): number for number, node in enumerate(copy.graph.node)}
    return sorted(found, key=lambda it: (place.get(it.node, -1), ORDER.index(it.severity), it.rule))


def matters(findings: list[Finding]) -> bool:
    """Whether anything is refused or kept in float."""
    return any(it.severity in MATTERING for it in findings)


def _findings(model: onnx.ModelProto, target: Target) -> Iterator[Finding]:
    for view in views_of(model.graph):
        scene = Scene(model, view, target)
        for name, verdict in target.check.items():
            if verdict.severity is Severity.FINE:
                continue
            for node, what in FINDERS[name](scene):
                place = ("", "") if node is None else (label(node), node.op_type)
                yield Finding(*place, name, verdict.severity, what, verdict.reason, verdict.source)
