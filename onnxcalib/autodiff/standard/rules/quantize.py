"""The quantizer op: how it is lowered to standard ops, and its straight-through gradient."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx

from onnxcalib.autodiff.standard.step import Step
from onnxcalib.autodiff.writer import Facts, NoRuleError, Writer
from onnxcalib.model.graph import attributes
from onnxcalib.model.io import copied
from onnxcalib.model.loss_writer import DOMAIN, FAKE_QUANTIZE

# The attribute of a quantizer that clips its input first: from zero to this.
CEILING = "ceiling"


@dataclass(frozen=True)
class FakeQuantizer:
    """The grid of a quantizer node; its zero point is a whole number from low to high."""

    scale: str
    zero: str
    low: int
    high: int
    axis: int | None
    rank: int
    ceiling: float | None = None

    @classmethod
    def of(cls, node: onnx.NodeProto, facts: Facts) -> FakeQuantizer:
        """The grid on which a node puts its first input."""
        settings, shape = attributes(node), facts.shape(node.input[0])
        axis, rank = settings.get("axis"), len(shape or ())
        if axis is not None:
            if shape is None:
                raise NoRuleError(f"the rank of '{node.input[0]}' is unknown")
            axis %= rank
        return cls(node.input[1], node.input[2], settings["low"], settings["high"], axis, rank, settings.get(CEILING))

    @property
    def byte(self) -> type[np.uint8 | np.int8] | None:
        """The type of one byte that holds the quantized values, if one does."""
        types = (np.uint8, np.int8)
        return next((t for t in types if np.iinfo(t).min <= self.low and self.high <= np.iinfo(t).max), None)

    def broadcast(self, write: Writer, name: str) -> str:
        """The values of the channels in the shape that broadcasts."""
        return name if self.axis is None else write.reshape(name, (-1, *(1,) * (self.rank - 1 - self.axis)))


def lower(node: onnx.NodeProto, write: Writer) -> FakeQuantizer:
    """Writes a quantizer in standard ops, and gives its grid."""
    quantizer = FakeQuantizer.of(node, write.facts)
    if quantizer.byte is None:
        _lower_to_floats(node, write, quantizer)
    else:
        _lower_to_bytes(node, write, quantizer, quantizer.byte)
    return quantizer


def _lower_to_bytes(
    node: onnx.NodeProto, write: Writer, quantizer: FakeQuantizer, byte: type[np.uint8 | np.int8]
) -> None:
    """Codes of one byte: the passes over memory cost more than the arithmetic."""
    axis_attribute: dict[str, Any] = {} if quantizer.axis is None else {"axis": quantizer.axis}
    kind = onnx.helper.np_dtype_to_tensor_dtype(np.dtype(byte))
    zero = write.op("Cast", quantizer.zero, to=kind)
    quantized = write.op("QuantizeLinear", node.input[0], quantizer.scale, zero, **axis_attribute)
    if quantizer.ceiling is not None:
        quantized = write.op("Clip", quantized, zero, _highest_code(write, quantizer, quantizer.ceiling, kind))
    elif (quantizer.low, quantizer.high) != (np.iinfo(byte).min, np.iinfo(byte).max):
        quantized = write.op(
            "Clip", quantized, *(write.array(np.array(bound, byte)) for bound in (quantizer.low, quantizer.high))
        )
    made = onnx.helper.make_node(
        "DequantizeLinear", [quantized, quantizer.scale, zero], node.output, name=node.name, **axis_attribute
    )
    write.nodes.append(made)


def _highest_code(write: Writer, quantizer: FakeQuantizer, ceiling: float, kind: int) -> str:
    """The code of the ceiling, or the last one."""
    code = write.op("Add", write.op("Round", write.op("Div", ceiling, quantizer.scale)), quantizer.zero)
    return write.op("Cast", write.op("Clip", code, float(quantizer.low), float(quantizer.high)), to=kind)


def _lower_to_floats(node: onnx.NodeProto, write: Writer, quantizer: FakeQuantizer) -> None:
    """Div, Round, Clip and Mul: the zero point moves the bounds instead of every value."""
    scale, zero = (quantizer.broadcast(write, name) for name in (quantizer.scale, quantizer.zero))
    low, high = (write.op("Sub", float(bound), zero) for bound in (quantizer.low, quantizer.high))
    rounded = write.op("Round", write.op("Div", node.input[0], scale))
    clipped = write.op("Min", write.op("Max", rounded, low), high)
    write.nodes.append(onnx.helper.make_node("Mul", [clipped, scale], node.output, name=node.name))


def quantizer_gradient(step: Step, quantizer: FakeQuantizer) -> None:
    """Straight through inside the range; scale and zero point also move what lies outside."""
    write = step.writer
    passed = write.op("Mul", step.dy, _inside(step, quantizer))
    if 0 in step.needs_grad:
        step.grad_input(0, passed)
    if 1 in step.needs_grad:
        moved = write.op("Sub", _inner(step, quantizer, step.y, step.dy), _inner(step, quantizer, step.x, passed))
        if quantizer.ceiling is not None and quantizer.ceiling < math.inf:
            moved = write.op("Sub", moved, _at_ceiling(step, quantizer, quantizer.ceiling))
        step.grad_input(1, write.op("Div", moved, quantizer.scale))
    if 2 in step.needs_grad:
        outside = write.op("Sub", _total(step, quantizer, passed), _total(step, quantizer, step.dy))
        step.grad_input(2, write.op("Mul", outside, quantizer.scale))


def _end(write: Writer, quantizer: FakeQuantizer, place: float) -> str:
    """The value at a place on the grid."""
    return quantizer.broadcast(write, write.op("Mul", write.op("Sub", place, quantizer.zero), quantizer.scale))


def _inside(step: Step, quantizer: FakeQuantizer) -> str:
    """One for values that round to a code of the grid, half a step beyond the range at most, and are not clipped."""
    write = step.writer
    most = _end(write, quantizer, quantizer.high + 0.5)
    if quantizer.ceiling is None:
        least = _end(write, quantizer, quantizer.low - 0.5)
    else:
        least, most = write.number(0.0), write.op("Min", most, quantizer.ceiling)
    inside = write.op("And", write.op("Greater", step.x, least), write.op("Less", step.x, most))
    return write.op("Cast", inside, to=onnx.TensorProto.FLOAT)


def _at_ceiling(step: Step, quantizer: FakeQuantizer, ceiling: float) -> str:
    """The part of the values above a ceiling inside the grid: there the quantizer reads the ceiling."""
    write = step.writer

    def part() -> str:
        above = write.mask("GreaterOrEqual", step.x, ceiling)
        return write.op("Mul", _inner(step, quantizer, above, step.dy), ceiling)

    return write.only_if(write.op("Greater", _end(write, quantizer, quantizer.high + 0.5), ceiling), part)


def _inner(step: Step, quantizer: FakeQuantizer, first: str, second: str) -> str:
    """The sum of the product, for the whole tensor or for each channel."""
    write = step.writer
    if quantizer.axis is None:
        return write.sum_all(write.dots(first, second, rows=0 if quantizer.rank > 1 else 1))
    if quantizer.axis == 0:
        return write.reshape(write.dots(first, second), (-1,))
    return _total(step, quantizer, write.op("Mul", first, second))


def _total(step: Step, quantizer: FakeQuantizer, name: str) -> str:
    if quantizer.axis is None:
        return step.writer.sum_all(name)
    others = [axis for axis in range(quantizer.rank) if axis != quantizer.axis]
    return step.writer.reduce_sum(name, others) if others else name


def lower_all(model: onnx.ModelProto, facts: Facts) -> tuple[onnx.ModelProto, dict[str, FakeQuantizer]]:
    """A copy without quantizer ops, and the grid of each, by the name of its output."""
    result = copied(model)
    write = Writer(result.graph, facts)
    made: dict[str, FakeQuantizer] = {}
    for node in model.graph.node:
        if node.op_type == FAKE_QUANTIZE and node.domain == DOMAIN:
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
