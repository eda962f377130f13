"""Tables about targets: what they demand, and what they make of a file."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.markup import escape
from rich.table import Table

from onnxcalib.checks.check import Finding
from onnxcalib.targets import Severity, Target
from onnxcalib.targets.reading import rules
from onnxcalib.targets.target import widths


def target_table(targets: Iterable[Target]) -> Table:
    """One row a target."""
    table = Table("target", "activations", "weights", "bias", "placement", "storage", "opset", "for", box=None)
    for target in targets:
        rows = dict(constraints(target))
        table.add_row(
            target.name,
            f"{rows['activations.type']} {widths(target.activation_bits)}",
            f"{rows['weights.type']} {widths(target.weight_bits)}",
            rows["bias.type"],
            rows["graph.placement"],
            rows["weights.storage"],
            rows["graph.opset"],
            escape(target.summary.split(":")[0]),
        )
    return table


def constraints_table(target: Target) -> Table:
    """Every constraint with its source."""
    table = Table("constraint", "value", "source", box=None)
    for key, value in constraints(target):
        section = key.split(".")[0]
        table.add_row(key, escape(value), escape(target.sources.get(key, target.sources.get(section, ""))))
    return table


def verdicts_table(target: Target) -> Table:
    """What the target makes of things that files may hold."""
    table = Table("rule", "severity", "finds", "reason", "source", box=None)
    finds = {name: rule["finds"] for name, rule in rules().items()}
    for name, verdict in sorted(target.check.items()):
        if verdict.severity is not Severity.FINE:
            table.add_row(name, verdict.severity, finds[name], escape(verdict.reason), escape(verdict.source))
    return table


def findings_table(findings: Sequence[Finding]) -> Table:
    """One row a finding."""
    table = Table("node", "op", "severity", "rule", "what", "reason", "source", box=None)
    for it in findings:
        texts = (it.node or "(the file)", it.op, it.severity, it.rule, it.what, it.reason, it.source)
        table.add_row(*(escape(text) for text in texts))
    return table


def constraints(target: Target) -> list[tuple[str, str]]:
    """The constraints in words, by key of the target's file."""
    activation = "s8, u8 where nothing is negative" if target.unsigned_if_positive else _type(target.signed_activations)
    channels = "per channel" if target.per_channel else "per tensor"
    if target.per_channel and len(target.per_channel_ops) < 4:
        channels += f" ({', '.join(target.per_channel_ops)})"
    return [
        ("activations.type", f"{activation}, {_symmetry(target.symmetric_activations)}, per tensor"),
        ("activations.bits", widths(target.activation_bits)),
        ("activations.narrow", target.narrow if len(target.activation_bits) > 1 else "none"),
        ("weights.type", f"{_type(target.signed_weights)}, {_symmetry(target.symmetric_weights)}, {channels}"),
        ("weights.bits", widths(target.weight_bits)),
        ("weights.storage", target.storage),
        ("weights.weight_only_bits", _weights_alone(target)),
        ("bias.type", target.bias),
        ("scales.power_of_two", _yes(target.power_of_two)),
        ("scales.rounding_safe", _yes(target.rounding_safe)),
        ("graph.format", target.format),
        ("graph.placement", target.placement),
        ("graph.float_compute", _yes(target.float_compute)),
        ("graph.fixed_shapes", _yes(target.fixed_shapes)),
        ("graph.opset", f"{target.oldest_opset} to {target.newest_opset}, {target.opset_limit} at most"),
        ("graph.newest_ir", str(target.newest_ir)),
    ]


def _weights_alone(target: Target) -> str:
    if not target.weight_only_bits:
        return "none"
    ops = ", ".join(target.weight_only_ops) if len(target.weight_only_ops) < 4 else "all layers"
    return f"{widths(target.weight_only_bits)} ({ops}; blocks {target.weight_only_blocks})"


def _type(signed: bool) -> str:
    return "s8" if signed else "u8"


def _symmetry(symmetric: bool) -> str:
    return "symmetric" if symmetric else "asymmetric"


def _yes(value: bool) -> str:
    return "yes" if value else "no"
