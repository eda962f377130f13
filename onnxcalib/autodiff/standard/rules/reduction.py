"""Gradient rules of reductions, of pooling, and of the normalizations built on them."""

from __future__ import annotations

import math

import numpy as np
import onnx

from onnxcalib.autodiff.standard.rules.conv import Windows, spread
from onnxcalib.autodiff.standard.step import Rule, Step
from onnxcalib.autodiff.writer import NoRuleError


def _reduced(step: Step, name: str) -> str:
    """A tensor of the output's shape with the reduced axes back, of size one."""
    axes = step.input(1)
    if step.attribute("keepdims", 1):
        return name
    if axes:
        return step.writer.op("Unsqueeze", name, axes)
    listed = step.attribute("axes", None)
    # Without axes everything is reduced: rank 0 broadcasts as it is.
    return name if listed is None else step.writer.op("Unsqueeze", name, step.writer.integers(listed))


def _is_identity(step: Step) -> bool:
    axes = step.writer.facts.value(step.input(1)) if step.input(1) else np.zeros(0)
    bare = axes is not None and axes.size == 0 and step.attribute("axes", None) is None
    return bare and step.attribute("noop_with_empty_axes", 0) == 1


def _reduce_sum(step: Step) -> None:
    step.only(0)
    if _is_identity(step):
        step.grad_input(0, step.dy)
    else:
        step.grad_input(0, _reduced(step, step.dy), small=True)


def _reduce_mean(step: Step) -> None:
    step.only(0)
    if _is_identity(step):
        step.grad_input(0, step.dy)
    else:
        step.grad_input(0, _reduced(step, step.writer.op("Div", step.dy, _count(step))), small=True)


def _reduce_sum_square(step: Step) -> None:
    step.only(0)
    doubled = step.writer.op("Mul", step.dy, 2.0)
    step.grad_input(0, step.writer.op("Mul", doubled if _is_identity(step) else _reduced(step, doubled), step.x))


def _count(step: Step) -> str:
    """How many values went into one output value."""
    write = step.writer
    before, after = _size(step, step.x), _size(step, step.y)
    if before is not None and after is not None and before[1] == after[1]:
        return write.number(before[0] / max(after[0], 1))
    count = write.op("Div", write.op("Size", step.x), write.op("Size", step.y))
    return write.op("Cast", count, to=onnx.TensorProto.FLOAT)


def _size(step: Step, name: str) -> tuple[int, list[str]] | None:
    """The product of the fixed sizes and the names of the free ones, None where one has no name."""
    shape = step.shape(name)
    if shape is None or None in shape:
        return None
    free = sorted(dim for dim in shape if isinstance(dim, str))
    return math.prod(dim for dim in shape if isinstance(dim, int)), free


def _reduce_extreme(step: Step) -> None:
    step.only(0)
    if _is_identity(step):
        step.grad_input(0, step.dy)
    else:
        _give_to_equals(step, _reduced(step, step.y), _reduced(step, step.dy))


def _global_max_pool(step: Step) -> None:
    _give_to_equals(step, step.y, step.dy)


def _give_to_equals(step: Step, extreme: str, gradient: str) -> None:
    """To the values that equal the extreme, in equal parts."""
    write = step.writer
    mask = write.mask("Equal", step.x, extreme)
    ties = write.op("ReduceSum", mask, *_axes_input(step), keepdims=1)
    step.grad_input(0, write.op("Mul", mask, write.op("Div", gradient, ties)))


def _axes_input(step: Step) -> tuple[str, ...]:
    if step.node.op_type == "GlobalMaxPool":
        return (step.writer.integers(range(2, step.known_rank(step.x))),)
    if step.input(1):
        return (step.input(1),)
    listed = step.attribute("axes", None)
    return () if listed is None else (step.writer.integers(listed),)


def _global_average_pool(step: Step) -> None:
    step.grad_input(0, step.writer.op("Div", step.dy, _count(step)), small=True)


def _average_pool(step: Step) -> None:
    windows = Windows.of(step, tuple(step.attribute("kernel_shape", ())))
    if step.attribute("ceil_mode", 0):
        raise NoRuleError("ceil_mode is not covered")
    sizes, channels = step.known_dims(step.x, 2), step.known_dims(step.x, 1)[0]
    share = step.writer.op("Mul", step.dy, step.writer.array(_shares(step, windows, sizes)))
    ones = step.writer.array(np.ones((channels, 1, *windows.kernel), np.float32))
    step.grad_input(0, spread(step.writer, windows.grouped(channels), share, ones, sizes))


def _shares(step: Step, windows: Windows, sizes: tuple[int, ...]) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    """One over the number of values in each window."""
    if step.attribute("count_include_pad", 0):
        return np.array(1.0 / math.prod(windows.kernel), np.float32)
    count = np.ones((), np.float64)
    for axis, size in enumerate(sizes):
        starts = np.arange(windows.outputs(sizes)[axis]) * windows.strides[axis] - windows.begins[axis]
        reached = starts[:, None] + np.arange(windows.kernel[axis]) * windows.dilations[axis]
        count = np.multiply.outer(count, ((reached >= 0) & (reached < size)).sum(axis=1))
    return np.asarray(1.0 / count, np.float32)


def _max_pool(step: Step) -> None:
    """Scatters by index; windows that overlap go in different rounds, so no index comes twice in one."""
    write, windows = step.writer, Windows.of(step, tuple(step.attribute("kernel_shape", ())))
    if step.attribute("storage_order", 0):
        raise NoRuleError("storage_order is not covered")
    rank = len(windows.kernel)
    spans = [(k - 1) * d + 1 for k, d in zip(windows.kernel, windows.dilations, strict=True)]
    apart = [-(-span // stride) for span, stride in zip(spans, windows.strides, strict=True)]
    total = write.reshape(write.op("Size", step.x), (1,))
    result = write.op("ConstantOfShape", total)
    axes, ends = write.integers(range(2, rank + 2)), write.integers([2**31 - 1] * rank)
    for first in np.ndindex(*apart):
        chosen = []
        for tensor in (step.output(1), step.dy):
            part = tensor
            if max(apart) > 1:
                part = write.op("Slice", tensor, write.integers(first), ends, axes, write.integers(apart))
            chosen.append(write.reshape(part, (-1,)))
        if any(first):
            chosen[1] = write.op("Add", chosen[1], write.op("GatherElements", result, chosen[0]))
        result = write.op("ScatterElements", result, *chosen)
    step.grad_input(0, write.reshape_like(result, step.x))


def _batch_normalization(step: Step) -> None:
    step.only(0, 1, 2)
    if step.attribute("training_mode", 0):
        raise NoRuleError("it is in training mode")
    write, rank = step.writer, step.known_rank(step.x)
    shape, others = (-1, *(1,) * (rank - 2)), (0, *range(2, rank))
    _, scale, _, mean, variance = step.node.input
    deviation = write.op("Sqrt", write.op("Add", variance, step.attribute("epsilon", 1e-5)))
    if 0 in step.needs_grad:
        step.grad_input(0, write.op("Mul", step.dy, write.reshape(write.op("Div", scale, deviation), shape)))
    if 1 in step.needs_grad:
        centred = write.op("Sub", step.x, write.reshape(mean, shape))
        summed = write.reduce_sum(write.op("Mul", step.dy, centred), others)
        step.grad_input(1, write.op("Div", summed, deviation))
    if 2 in step.needs_grad:
        step.grad_input(2, write.reduce_sum(step.dy, others))


def _layer_normalization(step: Step) -> None:
    write, axis, rank = step.writer, step.attribute("axis", -1), step.known_rank(step.x)
    axes = range(axis % rank, rank)
    # The runtime's kernel already has the mean and one over the deviation; they need only be asked for.
    inverse = step.output(2)
    unit = write.op("Mul", write.op("Sub", step.x, step.output(1)), inverse)
    if 0 in step.needs_grad:
        _give_normalized(step, write.op("Mul", step.dy, step.input(1)), unit, inverse, axes)
    if 1 in step.needs_grad:
        step.grad_input_summed(1, write.op("Mul", step.dy, unit))
    if 2 in step.needs_grad:
        step.grad_input_summed(2, step.dy)


def _instance_normalization(step: Step) -> None:
    write, rank = step.writer, step.known_rank(step.x)
    axes, others, shape = range(2, rank), (0, *range(2, rank)), (-1, *(1,) * (rank - 2))
    centred = write.op("Sub", step.x, write.reduce_mean(step.x, axes))
    variance = write.reduce_mean(write.op("Mul", centred, centred), axes)
    deviation = write.op("Sqrt", write.op("Add", variance, step.attribute("epsilon", 1e-5)))
    inverse = write.op("Reciprocal", deviation)
    unit = write.op("Mul", centred, inverse)
    if 0 in step.needs_grad:
        _give_normalized(step, write.op("Mul", step.dy, write.reshape(step.input(1), shape)), unit, inverse, axes)
    if 1 in step.needs_grad:
        step.grad_input(1, write.reduce_sum(write.op("Mul", step.dy, unit), others))
    if 2 in step.needs_grad:
        step.grad_input(2, write.reduce_sum(step.dy, others))


def _give_normalized(step: Step, gradient: str, unit: str, inverse: str, axes: range) -> None:
    """Through mean and deviation: the parts of the gradient along both have no effect."""
    write = step.writer
    projected = write.op("Mul", unit, write.reduce_mean(write.op("Mul", gradient, unit), axes))
    rest = write.op("Sub", write.op("Sub", gradient, write.reduce_mean(gradient, axes)), projected)
    step.grad_input(0, write.op("Mul", rest, inverse))


REDUCTIONS: dict[str, Rule] = {
    "AveragePool": _average_pool,
    "BatchNormalization": _batch_normalization,
    "GlobalAveragePool": _global_average_pool,
    "GlobalMaxPool": _global_max_pool,
    "InstanceNormalization": _instance_normalization,
    "LayerNormalization": _layer_normalization,
    "MaxPool": _max_pool,
    "ReduceMax": _reduce_extreme,
    "ReduceMean": _reduce_mean,
    "ReduceMin": _reduce_extreme,
    "ReduceSum": _reduce_sum,
    "ReduceSumSquare": _reduce_sum_square,
}
