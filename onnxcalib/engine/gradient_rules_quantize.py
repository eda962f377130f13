"""The quantizer op: how it is lowered to standard ops, and its straight-through gradient."""

from __future__ import annotations

from dataclasses import dataclass

import onnx

from onnxcalib.engine.gradient_step import Step
from onnxcalib.engine.gradient_writer import QUANTIZER, Facts, NoRuleError, Writer
from onnxcalib.model.differentiable import DOMAIN
from onnxcalib.model.graph import attributes


@dataclass(frozen=True)
class Lowered:
    """The inner tensors of a lowered quantizer, and its scale in the shape that broadcasts."""

    scaled: str
    rounded: str
    clipped: str
    scale: str
    axis: int | None
    rank: int


def lower(node: onnx.NodeProto, write: Writer) -> Lowered:
    """Writes a quantizer as Div, Round, Clip and Mul: its zero point moves the bounds instead of every value."""
    x, scale, zero = node.input
    settings = attributes(node)
    shape = write.facts.shape(x)
    axis, rank = settings.get("axis"), len(shape or ())
    if axis is not None:
        if shape is None:
            raise NoRuleError(f"the rank of '{x}' is unknown")
        axis %= rank
        scale, zero = (write.reshape(name, (-1, *(1,) * (rank - 1 - axis))) for name in (scale, zero))
    scaled = write.op("Div", x, scale)
    rounded = write.op("Round", scaled)
    low, high = (write.op("Sub", float(settings[bound]), zero) for bound in ("low", "high"))
    if axis is None:
        clipped = write.op("Clip", rounded, low, high)
    else:
        clipped = write.op("Min", write.op("Max", rounded, low), high)
    write.nodes.append(onnx.helper.make_node("Mul", [clipped, scale], node.output, name=node.name))
    return Lowered(scaled, rounded, clipped, scale, axis, rank)


def quantizer_gradient(step: Step, lowered: Lowered) -> None:
    """Straight through inside the range; scale and zero point also move what lies outside."""
    write = step.writer
    inside = write.mask("Equal", lowered.rounded, lowered.clipped)
    passed = write.op("Mul", step.dy, inside)
    if 0 in step.wanted:
        step.give(0, passed)
    if 1 in step.wanted:
        whole, part = _inner(step, lowered, lowered.clipped, step.dy), _inner(step, lowered, lowered.scaled, passed)
        step.give(1, write.op("Sub", whole, part))
    if 2 in step.wanted:
        outside = write.op("Sub", _total(step, lowered, passed), _total(step, lowered, step.dy))
        step.give(2, write.op("Mul", outside, step.input(1)))


def _inner(step: Step, lowered: Lowered, first: str, second: str) -> str:
    """The sum of the product, for the whole tensor or for each channel."""
    write = step.writer
    if lowered.axis is None:
        return write.sum_all(write.dots(first, second, rows=0 if lowered.rank > 1 else 1))
    if lowered.axis == 0:
        return write.reshape(write.dots(first, second), (-1,))
    return _total(step, lowered, write.op("Mul", first, second))


def _total(step: Step, lowered: Lowered, name: str) -> str:
    if lowered.axis is None:
        return step.writer.sum_all(name)
    others = [axis for axis in range(lowered.rank) if axis != lowered.axis]
    return step.writer.reduce_sum(name, others) if others else name


def lower_all(model: onnx.ModelProto, facts: Facts) -> tuple[onnx.ModelProto, dict[str, Lowered]]:
    """A copy without quantizer ops, and what each became, by the name of its output."""
    result = onnx.ModelProto()
    result.CopyFrom(model)
    write = Writer(result.graph, facts)
    made: dict[str, Lowered] = {}
    for node in model.graph.node:
        if node.op_type == QUANTIZER and node.domain == DOMAIN:
            made[node.output[0]] = lower(node, write)
        else:
            write.nodes.append(node)
    del result.graph.node[:]
    result.graph.node.extend(write.nodes)
    result.graph.initializer.extend(write.constants)
    kept = [entry for entry in model.opset_import if entry.domain != DOMAIN]
    del result.opset_import[:]
    result.opset_import.extend(kept)
    return result, made
