"""Gradient rules of ops that move values: reshape, join, cut, repeat."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import onnx

from onnxcalib.autodiff.standard.step import Rule, Step, full
from onnxcalib.autodiff.writer import Array, Dim, NoRuleError


def _reshape(step: Step) -> None:
    step.grad_input(0, step.writer.reshape_like(step.dy, step.x))


def _transpose(step: Step) -> None:
    perm = step.attribute("perm", None)
    settings: dict[str, Any] = {} if perm is None else {"perm": np.argsort(perm).tolist()}
    step.grad_input(0, step.writer.op("Transpose", step.dy, **settings))


def _concat(step: Step) -> None:
    write, axis = step.writer, step.attribute("axis", 0)
    shapes = [step.shape(name) for name in step.node.input]
    sizes = [shape[axis] if shape is not None else None for shape in shapes]
    if any(not isinstance(size, int) for size in sizes):
        lengths = [write.op("Gather", write.op("Shape", name), write.integers([axis])) for name in step.node.input]
        parts = [write.fresh("gradient:Split") for _ in lengths]
        split = [step.dy, write.op("Concat", *lengths, axis=0)]
        write.nodes.append(onnx.helper.make_node("Split", split, parts, axis=axis))
        for index in step.needs_grad:
            step.grad_input(index, parts[index])
        return
    bounds = [int(bound) for bound in np.cumsum([0, *sizes])]
    for index in step.needs_grad:
        start, end = write.integers([bounds[index]]), write.integers([bounds[index + 1]])
        step.grad_input(index, write.op("Slice", step.dy, start, end, write.integers([axis])))


def _split(step: Step) -> None:
    step.only(0)
    write, parts = step.writer, []
    for index, gradient in enumerate(step.grad_outputs):
        name = step.output(index)
        if gradient is None:
            parts.append(write.op("Expand", 0.0, write.op("Shape", name)))
        else:
            parts.append(full(write, gradient, name))
    step.grad_input(0, write.op("Concat", *parts, axis=step.attribute("axis", 0)))


def _slice(step: Step) -> None:
    """Puts zeros back where values were cut away."""
    write, rank = step.writer, step.known_rank(step.x)
    starts, ends = (step.known_value(step.input(index)).tolist() for index in (1, 2))
    axes = step.known_value(step.input(3)).tolist() if step.input(3) else list(range(len(starts)))
    steps = step.known_value(step.input(4)).tolist() if step.input(4) else [1] * len(starts)
    if min(steps) < 1:
        raise NoRuleError("negative steps are not covered")
    begins, rests, gradient = [0] * rank, [0] * rank, step.dy
    for start, end, axis, by in zip(starts, ends, (axis % rank for axis in axes), steps, strict=True):
        size = _fixed(step, axis)
        chosen = range(size)[start:end:by]
        if not chosen:
            raise NoRuleError("nothing is left after the cut")
        if by > 1:
            gradient = _with_gaps(step, gradient, axis, by)
        begins[axis], rests[axis] = chosen.start, size - chosen.start - len(chosen) * by
    step.grad_input(0, write.op("Pad", gradient, write.integers([*begins, *rests])))


def _fixed(step: Step, axis: int) -> int:
    size = (step.shape(step.x) or ())[axis]
    if not isinstance(size, int):
        raise NoRuleError(f"the size of '{step.x}' along axis {axis} must be fixed")
    return size


def _with_gaps(step: Step, name: str, axis: int, by: int) -> str:
    """Zeros after each value along the axis, so that values stand so many places apart."""
    write, rank = step.writer, step.known_rank(step.x)
    apart = write.op("Unsqueeze", name, write.integers([axis + 1]))
    gaps = [0] * (2 * rank + 2)
    gaps[rank + 1 + axis + 1] = by - 1
    padded = write.op("Pad", apart, write.integers(gaps))
    shape = write.op("Shape", padded)
    before, after = (
        write.op("Slice", shape, *map(write.integers, ([start], [end])))
        for start, end in ((0, axis), (axis + 2, rank + 1))
    )
    return write.op("Reshape", padded, write.op("Concat", before, write.integers([-1]), after, axis=0))


def _gather(step: Step) -> None:
    """A product with the matrix that says which value went where."""
    step.only(0)
    write, rank, indices = step.writer, step.known_rank(step.x), step.input(1)
    axis = step.attribute("axis", 0) % rank
    depth, picked = _fixed(step, axis), step.shape(indices)
    shape = step.shape(step.x) or ()
    count = _product((None,) if picked is None else picked)
    before, after = _product(shape[:axis]), _product(shape[axis + 1 :])
    if [before, count, after].count(-1) > 1:
        raise NoRuleError("more than one size is free")
    flat = write.reshape(step.dy, (before, count, after))
    step.grad_input(0, write.reshape_like(write.op("MatMul", _choice(step, indices, depth), flat), step.x))


def _product(dims: tuple[Dim, ...]) -> int:
    """The number of values along these axes, -1 where it is free."""
    sizes = [dim for dim in dims if isinstance(dim, int)]
    return math.prod(sizes) if len(sizes) == len(dims) else -1


def _choice(step: Step, indices: str, depth: int) -> str:
    """One where the value at a place, the row, was picked by an index, the column."""
    write, value = step.writer, step.writer.facts.value(indices)
    if value is not None:
        return write.array((np.arange(depth)[:, None] == value.reshape(-1) % depth).astype(np.float32))
    values = write.array(np.array([0, 1], np.float32))
    return write.op("OneHot", write.reshape(indices, (-1,)), write.integers([depth]), values, axis=0)


def _expand(step: Step) -> None:
    step.only(0)
    step.grad_input_summed(0, step.dy)


def _pad(step: Step) -> None:
    """Cuts off what was added, with the pads negated."""
    step.only(0)
    if step.attribute("mode", "constant") != "constant":
        raise NoRuleError(f"mode={step.attribute('mode', '')} is not covered")
    write, value = step.writer, step.writer.facts.value(step.input(1))
    cuts = write.op("Neg", step.input(1)) if value is None else write.array(-value)
    axes = (step.input(3),) if step.input(3) else ()
    step.grad_input(0, write.op("Pad", step.dy, cuts, *(("", *axes) if axes else ())))


def _depth_to_space(step: Step) -> None:
    write, block = step.writer, step.attribute("blocksize", 1)
    if step.attribute("mode", "DCR") == "DCR":
        step.grad_input(0, write.op("SpaceToDepth", step.dy, blocksize=block))
        return
    channels, height, width = step.known_dims(step.x, 1)
    split = write.reshape(step.dy, (0, channels // block**2, height, block, width, block))
    moved = write.op("Transpose", split, perm=[0, 1, 3, 5, 2, 4])
    step.grad_input(0, write.reshape(moved, (0, channels, height, width)))


def _space_to_depth(step: Step) -> None:
    step.grad_input(0, step.writer.op("DepthToSpace", step.dy, blocksize=step.attribute("blocksize", 1)))


def _resize(step: Step) -> None:
    """Resizing is a matrix along each axis; its gradient is the turned matrix."""
    step.only(0)
    write, gradient, rank = step.writer, step.dy, step.known_rank(step.x)
    _check_resize(step)
    before, after = step.shape(step.x) or (), step.shape(step.y)
    if after is None:
        raise NoRuleError(f"the sizes of '{step.y}' must be fixed")
    for axis, (size, result) in enumerate(zip(before, after, strict=True)):
        scale = _scale(step, axis)
        if scale == 1 or (size == result and size is not None):
            continue
        if axis < rank - 2 or not isinstance(size, int) or not isinstance(result, int):
            raise NoRuleError("only the last two axes, of fixed sizes, are covered")
        matrix = _resize_matrix(step, size, result, scale or result / size)
        if axis == rank - 1:
            gradient = write.op("MatMul", gradient, write.array(matrix))
        else:
            gradient = write.op("MatMul", write.array(matrix.T), gradient)
    step.grad_input(0, gradient)


def _check_resize(step: Step) -> None:
    covered = {
        "mode": ("nearest", "linear"),
        "coordinate_transformation_mode": ("half_pixel", "pytorch_half_pixel", "asymmetric", "align_corners"),
        "antialias": (0,),
        "keep_aspect_ratio_policy": ("stretch",),
    }
    defaults = {"mode": "nearest", "coordinate_transformation_mode": "half_pixel", "antialias": 0}
    for name, values in covered.items():
        value = step.attribute(name, defaults.get(name, "stretch"))
        if value not in values:
            raise NoRuleError(f"{name}={value} is not covered")


def _scale(step: Step, axis: int) -> float | None:
    """The scale along an axis, None where sizes are given instead."""
    scales = step.known_value(step.input(2)).tolist() if step.input(2) else []
    axes = step.attribute("axes", None) or range(len(scales))
    given = dict(zip((item % step.known_rank(step.x) for item in axes), scales, strict=False))
    return given.get(axis, 1.0 if scales else None)


def _resize_matrix(step: Step, size: int, result: int, scale: float) -> Array:
    """How much of each input position, a column, every output position, a row, takes."""
    where = _places(step, size, result, scale)
    if step.attribute("mode", "nearest") == "nearest":
        near = np.clip(_nearest(step, where), 0, size - 1)
        return np.asarray(np.eye(size)[near], np.float32)
    where = np.clip(where, 0, size - 1)
    low = np.floor(where).astype(int)
    part, eye = (where - low)[:, None], np.eye(size)
    return np.asarray(eye[low] * (1 - part) + eye[np.minimum(low + 1, size - 1)] * part, np.float32)


def _places(step: Step, size: int, result: int, scale: float) -> Array:
    """Where each output position lies among the input positions."""
    mode = step.attribute("coordinate_transformation_mode", "half_pixel")
    places = np.arange(result, dtype=np.float64)
    if mode == "align_corners":
        return places * (size - 1) / max(result - 1, 1)
    if mode == "asymmetric":
        return places / scale
    if mode == "pytorch_half_pixel" and result == 1:
        return np.zeros(1)
    return (places + 0.5) / scale - 0.5


def _nearest(step: Step, where: Array) -> Array:
    # In single precision as the runtime does it: exact halves decide which neighbour is taken.
    where = where.astype(np.float32)
    match step.attribute("nearest_mode", "round_prefer_floor"):
        case "round_prefer_floor":
            nearest = np.ceil(where - 0.5)
        case "round_prefer_ceil":
            nearest = np.floor(where + 0.5)
        case "floor":
            nearest = np.floor(where)
        case _:
            nearest = np.ceil(where)
    return nearest.astype(int)


SHAPES: dict[str, Rule] = {
    "Concat": _concat,
    "DepthToSpace": _depth_to_space,
    "Expand": _expand,
    "Flatten": _reshape,
    "Gather": _gather,
    "Pad": _pad,
    "Reshape": _reshape,
    "Resize": _resize,
    "Slice": _slice,
    "SpaceToDepth": _space_to_depth,
    "Split": _split,
    "Squeeze": _reshape,
    "Transpose": _transpose,
    "Unsqueeze": _reshape,
}
