"""Tables about targets: what they demand, and what they make of a file."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.table import Table

from onnxcalib.checks.check import Finding
from onnxcalib.targets import Severity, Target
from onnxcalib.targets.reading import rules
from onnxcalib.targets.target import widths

# What a constraint says when it does not hold, and when it does.
TYPE, SYMMETRY, ANSWER = ("u8", "s8"), ("asymmetric", "symmetric"), ("no", "yes")


def target_table(targets: Iterable[Target]) -> Table:
    """One row a target."""
    table = Table("target", "activations", "weights", "bias", "placement", "storage", "opset", "for", box=None)
    for target in targets:
        rows = dict(constraints(target))
        grids = (f"{rows[f'{of}.type']} {rows[f'{of}.bits']}" for of in ("activations", "weights"))
        others = (rows[key] for key in ("bias.type", "graph.placement", "weights.storage", "graph.opset"))
        table.add_row(target.name, *grids, *others, target.summary.split(":")[0])
    return table


def constraints_table(target: Target) -> Table:
    """Every constraint with its source."""
    table = Table("constraint", "value", "source", box=None)
    for key, value in constraints(target):
        section = key.split(".")[0]
        table.add_row(key, value, target.sources.get(key, target.sources.get(section, "")))
    return table


def verdicts_table(target: Target) -> Table:
    """What the target makes of things that files may hold."""
    table = Table("rule", "severity", "finds", "reason", "source", box=None)
    finds = {name: rule["finds"] for name, rule in rules().items()}
    for name, verdict in sorted(target.check.items()):
        if verdict.severity is not Severity.FINE:
            table.add_row(name, verdict.severity, finds[name], verdict.reason, verdict.source)
    return table


def findings_table(findings: Sequence[Finding]) -> Table:
    """One row a finding."""
    table = Table("node", "op", "severity", "rule", "what", "reason", "source", box=None)
    for it in findings:
        texts = (it.node or "(the file)", it.op, it.severity, it.rule, it.what, it.reason, it.source)
        table.add_row(*texts)
    return table


def constraints(target: Target) -> list[tuple[str, str]]:
    """The constraints in words, by key of the target's file."""
    activation = "s8, u8 where nothing is negative" if target.unsigned_if_positive else TYPE[target.signed_activations]
    channels = "per channel" if target.per_channel else "per tensor"
    if target.per_channel and len(target.per_channel_ops) < 4:
        channels += f" ({', '.join(target.per_channel_ops)})"
    return [
        ("activations.type", f"{activation}, {SYMMETRY[target.symmetric_activations]}, per tensor"),
        ("activations.bits", widths(target.activation_bits)),
        ("activations.narrow", target.narrow if len(target.activation_bits) > 1 else "none"),
        ("weights.type", f"{TYPE[target.signed_weights]}, {SYMMETRY[target.symmetric_weights]}, {channels}"),
        ("weights.bits", widths(target.weight_bits)),
        ("weights.shifted_bits", widths(target.shifted_bits) if target.shifted_bits else "none"),
        ("weights.storage", target.storage),
        ("weights.weight_only_bits", _weights_alone(target)),
        ("weights.constants", target.constants),
        ("bias.type", target.bias),
        ("scales.power_of_two", ANSWER[target.power_of_two]),
        ("scales.rounding_safe", ANSWER[target.rounding_safe]),
        ("graph.format", target.format),
        ("graph.placement", target.placement),
        ("graph.float_compute", ANSWER[target.float_compute]),
        ("graph.fixed_shapes", ANSWER[target.fixed_shapes]),
        ("graph.opset", f"{target.oldest_opset} to {target.newest_opset}, {target.opset_limit} at most"),
        ("graph.newest_ir", str(target.newest_ir)),
    ]


def _weights_alone(target: Target) -> str:
    if not target.weight_only_bits:
        return "none"
    ops = ", ".join(target.weight_only_ops) if len(target.weight_only_ops) < 4 else "all layers"
    return f"{widths(target.weight_only_bits)} ({ops}; blocks {target.weight_only_blocks})"
