"""Tables for the terminal."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from onnxcalib.algorithms.batchnorm import Tuned
from onnxcalib.algorithms.reconstruction.end_to_end import NetworkTuned
from onnxcalib.algorithms.reconstruction.layerwise import Trained
from onnxcalib.analysis.compare import LayerComparison
from onnxcalib.analysis.evaluate import Evaluation
from onnxcalib.mixed_precision.allocate import Allocation, proof
from onnxcalib.mixed_precision.assignment import Assigned
from onnxcalib.mixed_precision.curve import Point
from onnxcalib.mixed_precision.table import SensitivityTable
from onnxcalib.model.equalize import exponents_of
from onnxcalib.model.layers import Layer, LayerList
from onnxcalib.pipeline.result import Result
from onnxcalib.plan import QuantPlan


def layer_table(layers: LayerList) -> Table:
    """The layer list, one row a layer."""
    table = _table("Layers")
    for column in ("layer", "op", "weight", "follows", "reads"):
        table.add_column(column, overflow="fold")
    for column in ("params", "MACs"):
        table.add_column(column, justify="right")
    for layer in layers.layers:
        table.add_row(
            layer.name, _kind(layer), "x".join(map(str, layer.weight_shape)), _followed_by(layer), layer.input,
            f"{layer.parameters:,}", "?" if layer.macs is None else f"{layer.macs:,}",
        )  # fmt: skip
    return table


def float_table(layers: LayerList) -> Table:
    """What stays float, and why."""
    table = _table("Stays float")
    for column in ("node", "op", "why"):
        table.add_column(column, overflow="fold")
    for node in layers.float_nodes:
        table.add_row(node.name, node.op, node.reason)
    return table


def evaluation_table(rows: Sequence[Evaluation]) -> Table:
    """One row a model."""
    table = _table()
    table.add_column("model", overflow="fold")
    for column in ("n", "top-1 %", "agree %", "SQNR dB", "distillation", "bytes", "latency/ref", "ms"):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            row.model, str(row.samples), _number(row.top1, 2), _number(row.agreement, 2), _number(row.sqnr_db, 1),
            _number(row.distillation_loss, 5), f"{row.bytes:,}", _number(row.latency_ratio, 2),
            _number(row.latency_ms, 2),
        )  # fmt: skip
    return table


def file_summary(plan: QuantPlan, float_bytes: int, written_bytes: int) -> str:
    """One line on what was written."""
    counts: dict[str, int] = {}
    for precision in plan.precisions.values():
        counts[str(precision)] = counts.get(str(precision), 0) + 1
    mix = ", ".join(f"{count} at {name}" for name, count in sorted(counts.items()))
    share = 100 * written_bytes / float_bytes
    return (
        f"{len(plan.precisions)} layers quantized ({mix}), ranges {plan.ranges}, target {plan.target}; "
        f"{written_bytes:,} bytes, {share:.1f} % of the float file"
    )


def stage_summary(result: Result) -> list[str]:
    """What the stages did, a line each."""
    lines = []
    if scaled := exponents_of(result.model):
        lines.append(f"equal channels: {len(scaled)} layers before depthwise ones")
    if result.assigned is not None:
        lines += _assignment(result.assigned)
    if result.tuned is not None:
        kept = f", kept after {result.tuned.rounds} rounds" if result.tuned.rounds else ""
        lines.append(f"batch-norm tuning: {_fall(result.tuned)}{kept}")
    if result.trained is not None:
        lines.append(f"sequential {result.recipe.get('layer_optimizer')}: {_fall(result.trained)}")
        lines += [f"not trained: {skip_reason}" for skip_reason in result.trained.skip_reasons]
    for stage, tuned in (("end-to-end AdaQuant", result.end_to_end), ("bias tuning", result.biases)):
        if tuned is not None:
            lines.append(f"no {stage}: {tuned.skip_reason}" if tuned.skip_reason else f"{stage}: {_fall(tuned)}")
    return lines


def _assignment(assigned: Assigned) -> list[str]:
    """The program's optimum, and what measuring took in the end."""
    reranking, taken = assigned.reranking, assigned.allocation
    found = taken if reranking is None else reranking.optimum
    measured = assigned.measured_loss if reranking is None else reranking.optimum_measured
    estimated = assigned.estimated_loss - taken.estimated_loss + found.estimated_loss
    tries = "" if assigned.tries == 1 else f", {assigned.tries} tries"
    program = (
        f"integer program: {proof(found.optimal, found.gap)}{tries}; "
        f"loss estimated {estimated:.6g}, measured {measured:.6g}"
    )
    if reranking is None:
        return [program]
    others = ", ".join(f"{method} {loss:.6g}" for method, loss in reranking.losses.items() if method != taken.method)
    least = f"least of {reranking.models} assignments measured on mixup samples, {reranking.least:.6g}"
    beside = f" ({others})" if others else ""
    if taken == found:
        return [program, f"taken: the integer program's optimum, {least}{beside}"]
    own = f"estimated {assigned.estimated_loss:.6g}, measured {assigned.measured_loss:.6g}"
    return [program, f"taken: {taken.method}, {least}{beside}; {own}"]


def _fall(found: Tuned | Trained | NetworkTuned) -> str:
    kept = "" if found.after < found.before else ", not kept"
    return f"held-out softened loss {found.before:.6g} to {found.after:.6g}{kept}"


def sensitivity_table(table: SensitivityTable) -> Table:
    """Loss increase of each layer at each precision."""
    choices = sorted({choice for row in table.layers for choice in row.losses} - {table.base})
    shown = _table(f"Increase of the {table.loss} loss")
    shown.add_column("layer", overflow="fold")
    for choice in choices:
        shown.add_column(str(choice), justify="right")
    for row in table.layers:
        shown.add_row(row.layer, *(f"{row.losses[choice]:.6f}" if choice in row.losses else "-" for choice in choices))
    return shown


def allocation_table(found: Allocation) -> Table:
    """The precision of each layer."""
    shown = _table(f"Assignment by {found.method}")
    shown.add_column("layer", overflow="fold")
    shown.add_column("precision")
    for name, precision in found.choices.items():
        shown.add_row(name, str(precision))
    return shown


def allocation_line(table: SensitivityTable, found: Allocation) -> str:
    """Totals of an assignment."""
    parts = []
    for name, value in found.costs.items():
        whole = table.float_costs.get(name)
        parts.append(f"{name} {value:,.0f}" + (f" ({value / whole:.4f} of float)" if whole else ""))
    status = proof(found.optimal, found.gap)
    return f"estimated loss {table.base_loss + found.estimated_loss:.6g}; {', '.join(parts)}; {status}"


def curve_table(points: Sequence[Point]) -> Table:
    """The compression-loss curve."""
    shown = _table()
    for column in ("ratio", "method", "size", "estimated loss", "measured loss"):
        shown.add_column(column)
    for point in points:
        shown.add_row(
            f"{point.ratio:.4f}", point.method, f"{point.size:.4f}", f"{point.estimated_loss:.6f}",
            _number(point.measured_loss, 6),
        )  # fmt: skip
    return shown


def comparison_table(rows: Sequence[LayerComparison]) -> Table:
    """Two files, a row a layer."""
    shown = _table()
    shown.add_column("layer", overflow="fold")
    for column in ("bits A", "bits B"):
        shown.add_column(column)
    measured = any(row.sqnr_db is not None for row in rows)
    for column in ("SQNR A, dB", "SQNR B, dB", "B - A, dB") if measured else ("SQNR of B against A, dB",):
        shown.add_column(column, justify="right")
    for row in rows:
        shown.add_row(row.layer, *row.bits, *(_number(value, 1) for value in (*(row.sqnr_db or ()), row.difference_db)))
    return shown


def _table(title: str | None = None) -> Table:
    """A table without lines, whose title may be wider than its columns."""
    text = title and Text(title, style="table.title", no_wrap=True, overflow="ignore")
    return Table(title=text, title_justify="left", box=None, pad_edge=False)


def _kind(layer: Layer) -> str:
    return "depthwise Conv" if layer.is_depthwise else f"Conv /{layer.groups}" if layer.groups > 1 else layer.op


def _followed_by(layer: Layer) -> str:
    parts = [*(["bias"] if layer.bias else []), *(["BN"] if layer.batch_norm else [])]
    return "+".join([*parts, *([layer.activation] if layer.activation else [])]) or "-"


def _number(value: float | None, digits: int) -> str:
    if value is None:
        return "-"
    return "inf" if math.isinf(value) else f"{value:.{digits}f}"
