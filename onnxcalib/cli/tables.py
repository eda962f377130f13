"""Tables for the terminal."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from rich.table import Column, Table
from rich.text import Text

from onnxcalib.algorithms.activation_ranges import ChosenRanges
from onnxcalib.algorithms.batchnorm import Tuned
from onnxcalib.algorithms.reconstruction.end_to_end import NetworkTuned
from onnxcalib.algorithms.reconstruction.layerwise import Trained
from onnxcalib.algorithms.second_order import ChosenRounding
from onnxcalib.analysis.compare import LayerComparison
from onnxcalib.analysis.evaluate import Evaluation
from onnxcalib.cli.wording import as_typed
from onnxcalib.errors import listed
from onnxcalib.mixed_precision.allocate import Allocation, proof
from onnxcalib.mixed_precision.assignment import Assigned
from onnxcalib.mixed_precision.curve import Point
from onnxcalib.mixed_precision.table import SensitivityTable
from onnxcalib.model.equalize import equalization_in_words
from onnxcalib.model.layers import Layer, LayerList
from onnxcalib.model.left_float import sentences
from onnxcalib.pipeline.result import AccuracyBudget, Result
from onnxcalib.plan import QuantPlan, StoredConstant


def layer_table(layers: LayerList) -> Table:
    """The layer list, one row a layer."""
    table = _table(("layer", "op", "weight", "follows", "reads"), right=("params", "MACs"), title="Layers")
    for layer in layers.layers:
        weight = "x".join(map(str, layer.weight_shape))
        told = (layer.name, _kind(layer), weight, _followed_by(layer), layer.input)
        table.add_row(*told, f"{layer.parameters:,}", _macs(layer.macs))
    return table


def product_table(layers: LayerList) -> Table:
    """The products of attention: integer where the target runs them so."""
    table = _table(("product", "op", "makes", "reads"), right=("MACs",), title="Products of attention")
    for product in layers.products:
        table.add_row(product.name, product.op, product.role, " and ".join(product.inputs), _macs(product.macs))
    return table


def _macs(macs: int | None) -> str:
    return "?" if macs is None else f"{macs:,}"


def float_table(layers: LayerList) -> Table:
    """What stays float, and why."""
    table = _table(("node", "op", "why"), right=("params", "MACs"), title="Stays float")
    for node in layers.float_nodes:
        size = f"{node.parameters:,}" if node.parameters else ""
        table.add_row(node.name, node.op, node.reason, size, "" if node.macs is None else f"{node.macs:,}")
    return table


def constant_table(constants: Iterable[StoredConstant]) -> Table:
    """Constants beside layers that lie in the file as integers."""
    table = _table(("constant", "read by"), ("shape",), ("bits", "float bytes", "bytes"), title="Stored as integers")
    for it in constants:
        shape, sizes = "x".join(map(str, it.quantized.shape)), (f"{it.float_bytes:,}", f"{it.bytes:,}")
        table.add_row(it.name, it.op, shape, str(it.qparams.bits), *sizes)
    return table


def evaluation_table(rows: Sequence[Evaluation], metric: str | None = None) -> Table:
    """One row a model."""
    own = [metric] if metric is not None else []
    right = ("n", *own, "top-1 %", "agree %", "SQNR dB", "distillation", "bytes", "latency/ref", "ms")
    table = _table(("model",), right=right)
    for row in rows:
        quality = (_number(row.top1, 2), _number(row.agreement, 2), _number(row.sqnr_db, 1))
        speed = (_number(row.latency_ratio, 2), _number(row.latency_ms, 2))
        loss = _number(row.distillation_loss, 5)
        own = [_number(row.metric, 4)] if metric is not None else []
        table.add_row(row.model, str(row.samples), *own, *quality, loss, f"{row.bytes:,}", *speed)
    return table


def file_summary(plan: QuantPlan, float_bytes: int, written_bytes: int) -> str:
    """One line on what was written."""
    counts: dict[str, int] = {}
    for precision in plan.precisions.values():
        counts[str(precision)] = counts.get(str(precision), 0) + 1
    mix = ", ".join(f"{count} at {name}" for name, count in sorted(counts.items()))
    share = 100 * written_bytes / float_bytes
    static = [plan.ranges] if plan.shared or plan.inputs or not plan.dynamic else []
    dynamic = [f"dynamic ({len(plan.dynamic)} of {len(plan.dynamic) + len(plan.inputs)} that layers read)"]
    ranges = " and ".join([*static, *(dynamic if plan.dynamic else [])])
    done = f"{len(plan.precisions)} layers quantized ({mix}), ranges {ranges}" if mix else "constants alone stored"
    return f"{done}, target {plan.target}; {written_bytes:,} bytes, {share:.1f} % of the float file"


def stage_summary(result: Result) -> list[str]:
    """What the stages did, a line each."""
    lines = [f"loss: {result.judged_by}"] if result.output_kinds else []
    lines += [f"equalization: {words}" for words in equalization_in_words(result.model)]
    if result.left is not None:
        lines += sentences(result.left)
    lines += _ranges(result.ranges)
    lines += _constants(list(result.plan.constants.values()))
    if result.assigned is not None:
        lines.append(_assignment(result.assigned))
    if result.budget is not None:
        lines.append(_kept(result.budget))
    if result.rounding is not None:
        lines += _rounding(result.rounding)
    if result.tuned is not None:
        rounds = result.tuned.rounds
        kept = f", kept after {rounds} round{'s' * (rounds > 1)}" if rounds else ""
        lines.append(f"batch-norm tuning: {_fall(result.tuned)}{kept}")
    if result.trained is not None:
        lines.append(f"sequential {result.recipe.get('layer_optimizer')}: {_fall(result.trained)}")
        lines += [f"not trained: {skip_reason}" for skip_reason in result.trained.skip_reasons]
    for stage, tuned in (("end-to-end AdaQuant", result.end_to_end), ("bias tuning", result.biases)):
        if tuned is not None:
            skipped = tuned.skip_reason and f"no {stage}: {as_typed(tuned.skip_reason)}"
            lines.append(skipped or f"{stage}: {_fall(tuned)}")
    return lines


def _ranges(ranges: ChosenRanges | None) -> list[str]:
    """Which tensors are not static, and what that brought."""
    if ranges is None:
        return []
    if not ranges:
        return ["activation ranges: all static, no other choice would save much"]
    kinds = (("dynamic", ranges.dynamic), ("float", ranges.floats))
    told = "; ".join(f"{kind}: {listed(names)}" for kind, names in kinds if names)
    return [f"activation ranges: held-out softened loss {ranges.before:.6g} to {ranges.after:.6g}; {told}"]


def _constants(stored: Sequence[StoredConstant]) -> list[str]:
    """What is stored as integers beside layers."""
    if not stored:
        return []
    ops = ", ".join(sorted({it.op for it in stored}))
    before, after = sum(it.float_bytes for it in stored), sum(it.bytes for it in stored)
    return [f"constants stored as integers: {len(stored)} ({ops}), {before:,} bytes to {after:,}"]


def _rounding(rounding: ChosenRounding) -> list[str]:
    """Which rounding was taken, judged after tuning, and what it leaves out."""
    taken = "not kept" if rounding.strength is None else f"strength {rounding.strength:g}"
    skipped = [f"rounded to nearest: {reason}" for reason in rounding.skip_reasons]
    losses = f"held-out loss {rounding.before:.6g} to {rounding.after:.6g} after tuning"
    return [f"second-order rounding: {losses}, {taken}", *skipped]


def _assignment(assigned: Assigned) -> str:
    """What the integer program found, and how its estimate compares with the assembled model."""
    found, tries = assigned.allocation, "" if assigned.tries == 1 else f", {assigned.tries} tries"
    return (
        f"integer program: {proof(found.optimal, found.gap)}{tries}; "
        f"loss estimated {assigned.estimated_loss:.6g}, measured {assigned.measured_loss:.6g}"
    )


def _kept(budget: AccuracyBudget) -> str:
    """What was promised, what was measured, and how much chance there is in it."""
    drop, looks = budget.proof, "" if budget.looks == 1 else f", at the {budget.looks}. look"
    return (
        f"accuracy budget: {budget.metric} {drop.before:.4g} to {drop.after:.4g}, a drop of {drop.value:.4g} for the "
        f"{budget.most:g} allowed, on {drop.samples} samples held out{looks}; {len(budget.sizes)} sizes tried; "
        f"other samples lose more than {budget.most:g} with a chance of {100 * drop.chance_above(budget.most):.0f} %"
    )


def _fall(found: Tuned | Trained | NetworkTuned) -> str:
    is_kept = found.kept if isinstance(found, NetworkTuned) else found.after < found.before
    chance = ", within chance" if is_kept and found.after >= found.before else ""
    return f"held-out loss {found.before:.6g} to {found.after:.6g}{chance if is_kept else ', not kept'}"


def sensitivity_table(table: SensitivityTable) -> Table:
    """Loss increase of each layer at each precision."""
    choices = sorted({choice for row in table.layers for choice in row.losses} - {table.base})
    shown = _table(("layer",), right=map(str, choices), title=f"Increase of the {table.loss} loss")
    for row in table.layers:
        shown.add_row(row.layer, *(_number(row.losses.get(choice), 6) for choice in choices))
    return shown


def allocation_table(found: Allocation) -> Table:
    """The precision of each layer."""
    shown = _table(("layer",), ("precision",), title=f"Assignment by {found.method}")
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
    shown = _table((), ("ratio", "method", "size", "estimated loss", "measured loss"))
    for point in points:
        losses = (_number(loss, 6) for loss in (point.estimated_loss, point.measured_loss))
        shown.add_row(f"{point.ratio:.4f}", point.method, f"{point.size:.4f}", *losses)
    return shown


def comparison_table(rows: Sequence[LayerComparison]) -> Table:
    """Two files, a row a layer."""
    measured = any(row.sqnr_db is not None for row in rows)
    right = ("SQNR A, dB", "SQNR B, dB", "B - A, dB") if measured else ("SQNR of B against A, dB",)
    shown = _table(("layer",), ("bits A", "bits B"), right)
    for row in rows:
        shown.add_row(row.layer, *row.bits, *(_number(value, 1) for value in (*(row.sqnr_db or ()), row.difference_db)))
    return shown


def _table(fold: Iterable[str], left: Iterable[str] = (), right: Iterable[str] = (), title: str | None = None) -> Table:
    """A table without lines, of columns that fold, then others; its title may be wider than they are."""
    text = title and Text(title, style="table.title", no_wrap=True, overflow="ignore")
    columns = [Column(name, overflow="fold") for name in fold] + [Column(name) for name in left]
    columns += [Column(name, justify="right") for name in right]
    return Table(*columns, title=text, title_justify="left", box=None, pad_edge=False)


def _kind(layer: Layer) -> str:
    return "depthwise Conv" if layer.is_depthwise else f"Conv /{layer.groups}" if layer.groups > 1 else layer.op


def _followed_by(layer: Layer) -> str:
    parts = [*(["bias"] if layer.bias else []), *(["BN"] if layer.batch_norm else [])]
    return "+".join([*parts, *([layer.activation] if layer.activation else [])]) or "-"


def _number(value: float | None, digits: int) -> str:
    if value is None:
        return "-"
    return "inf" if math.isinf(value) else f"{value:.{digits}f}"
