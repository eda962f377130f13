"""Adds ops that move values without computing: Reshape, Transpose, Slice, Concat and their kin."""

from __future__ import annotations

import math

import numpy as np

from fuzzing.builder import Builder, Tensor
from fuzzing.layers import MOST


def reshape(b: Builder) -> bool:
    """To another factorization; the shape is a constant, or computed from the input's."""
    x = b.pick(lambda t: t.rank >= 2)
    if x is None:
        return False
    total = math.prod(x.inner)
    inner = _factors(b, total)
    kind = b.rng.random()
    if kind < 0.5:
        shape = b.constant([b.choose([0, -1]), *inner])
    elif kind < 0.7:
        shape = b.constant([0, -1, *inner[1:]]) if inner else b.constant([-1])
    else:
        batch = b.silent("Gather", [b.silent("Shape", [x.name]), b.constant([0])], axis=0)
        shape = b.silent("Concat", [batch, b.constant(list(inner) or [1])], axis=0)
        inner = inner or (1,)
    b.add("Reshape", [x.name, shape], (x.shape[0], *inner))
    return True


def _factors(b: Builder, total: int) -> tuple[int, ...]:
    parts = []
    while total > 1 and len(parts) < 3:
        part = b.choose([size for size in range(1, total + 1) if total % size == 0])
        parts.append(part)
        total //= part
    return (*parts, total) if total > 1 or not parts else tuple(parts)


def merge(b: Builder) -> bool:
    """Folds steps into the batch, works there, and takes them apart again."""
    x = b.pick(lambda t: t.rank == 3)
    if x is None:
        return False
    steps, features = x.inner
    flat = b.silent("Reshape", [x.name, b.constant([-1, features])])
    outputs = b.between(1, 6)
    inputs = [flat, b.weight(features, outputs, fan_in=features), b.constant(b.floats(outputs, scale=0.3), "b")]
    done = b.silent("Relu", [b.silent("Gemm", inputs)])
    b.add("Reshape", [done, b.constant([-1, steps, outputs])], (x.shape[0], steps, outputs))
    return True


def transpose(b: Builder) -> bool:
    x = b.pick(lambda t: t.rank >= 3)
    if x is None:
        return False
    perm = [0, *(1 + int(axis) for axis in b.rng.permutation(x.rank - 1))]
    b.add("Transpose", [x.name], tuple(x.shape[axis] for axis in perm), perm=perm)
    return True


def there_and_back(b: Builder) -> bool:
    """The batch goes last, and comes back."""
    x = b.pick(lambda t: t.rank >= 2)
    if x is None:
        return False
    turned = b.silent("Transpose", [x.name])  # all axes reversed
    b.add("Transpose", [b.silent("Relu", [turned])], x.shape)
    return True


def squeeze(b: Builder) -> bool:
    x = b.pick(lambda t: 1 in t.inner)
    if x is None:
        return False
    axis, inputs = 1 + x.inner.index(1), [x.name]
    attributes = b.axes(inputs, [axis], 13)
    b.add("Squeeze", inputs, (*x.shape[:axis], *x.shape[axis + 1 :]), **attributes)
    return True


def unsqueeze(b: Builder) -> bool:
    x = b.pick(lambda t: t.rank <= 4)
    if x is None:
        return False
    axis, inputs = b.between(1, x.rank), [x.name]
    attributes = b.axes(inputs, [axis], 13)
    b.add("Unsqueeze", inputs, (*x.shape[:axis], 1, *x.shape[axis:]), **attributes)
    return True


def cut(b: Builder) -> bool:
    """A Slice of one axis, perhaps with a step or from the end."""
    x = b.pick(lambda t: t.rank >= 2 and max(t.inner) > 1)
    if x is None:
        return False
    axis = b.choose([place for place in range(1, x.rank) if (x.shape[place] or 0) > 1])
    size = x.shape[axis] or 1
    first = b.between(0, size - 1)
    last = b.between(first + 1, size)
    made = [*x.shape]
    if b.opset < 10:
        made[axis] = last - first
        b.add("Slice", [x.name], tuple(made), starts=[first], ends=[last], axes=[axis])
        return True
    step = b.choose([1, 1, 2])
    made[axis] = -(-(last - first) // step)
    ends = [2**62] if last == size and b.chance(0.5) else [last]
    begins = [first - size] if b.chance(0.3) else [first]
    b.add("Slice", [x.name, *map(b.constant, (begins, ends, [axis], [step]))], tuple(made))
    return True


def concat(b: Builder) -> bool:
    x = b.pick(lambda t: t.rank >= 2 and np.prod(t.inner) <= MOST)
    if x is None:
        return False
    axis = b.between(1, x.rank - 1)
    others = [
        t
        for t in b.tensors
        if t.rank == x.rank
        and all(p == q for place, (p, q) in enumerate(zip(t.shape, x.shape, strict=True)) if place != axis)
    ]
    some = [x, *(b.choose(others) for _ in range(b.between(1, 2)))]
    made = [*x.shape]
    made[axis] = sum(t.shape[axis] or 0 for t in some)
    b.add(
        "Concat", [t.name for t in some], tuple(made), axis=axis - x.rank if b.opset >= 11 and b.chance(0.3) else axis
    )
    return True


def split(b: Builder) -> bool:
    x = b.pick(lambda t: t.rank >= 2 and max(t.inner) > 1)
    if x is None:
        return False
    axis = b.choose([place for place in range(1, x.rank) if (x.shape[place] or 0) > 1])
    size = x.shape[axis] or 1
    first = b.between(1, size - 1)
    sizes, inputs, attributes = [first, size - first], [x.name], {"axis": axis}
    if b.opset < 13:
        attributes["split"] = sizes
    elif b.opset >= 18 and size % 2 == 0 and b.chance(0.5):
        sizes, attributes["num_outputs"] = [size // 2] * 2, 2
    else:
        inputs.append(b.constant(sizes))
    names = b.node("Split", inputs, 2, **attributes)
    for name, part in zip(names, sizes, strict=True):
        b.tensors.append(Tensor(name, (*x.shape[:axis], part, *x.shape[axis + 1 :])))
    return True


def pad(b: Builder) -> bool:
    x = b.pick(lambda t: 2 <= t.rank <= 5 and np.prod(t.inner) <= MOST // 2)
    if x is None:
        return False
    before = [0, *(b.between(0, 1) for _ in x.inner)]
    after = [0, *(b.between(0, 1) for _ in x.inner)]
    mode = b.choose(["constant", "constant", "edge", "reflect" if min(x.inner) > 1 else "edge"])
    made = tuple(None if size is None else size + p + q for size, p, q in zip(x.shape, before, after, strict=True))
    if b.opset < 11:
        b.add("Pad", [x.name], made, pads=before + after, mode=mode)
        return True
    value = [b.constant(float(b.choose([0.0, 0.5])))] if mode == "constant" and b.chance(0.6) else []
    b.add("Pad", [x.name, b.constant(before + after), *value], made, mode=mode)
    return True


def resize(b: Builder) -> bool:
    x = b.pick(lambda t: t.rank == 4 and np.prod(t.inner) <= MOST // 4)
    if x is None:
        return False
    mode = b.choose(["nearest", "linear"])
    scales = b.constant(np.array([1, 1, 2, 2], np.float32))
    made = (*x.shape[:2], 2 * x.inner[1], 2 * x.inner[2])
    if b.opset < 11:
        b.add("Upsample" if b.opset < 10 else "Resize", [x.name, scales], made, mode=mode)
        return True
    how = {"coordinate_transformation_mode": b.choose(["asymmetric", "half_pixel"])} if b.chance(0.7) else {}
    roi = "" if b.opset >= 13 else b.constant(np.zeros(0, np.float32))
    b.add("Resize", [x.name, roi, scales], made, mode=mode, **how)
    return True


def gather(b: Builder) -> bool:
    """Some places of an axis, or one, which drops it."""
    x = b.pick(lambda t: t.rank >= 2)
    if x is None:
        return False
    axis = b.between(1, x.rank - 1)
    size = x.shape[axis] or 1
    if b.chance(0.4) and x.rank > 2:
        index = b.constant(np.array(b.between(0, size - 1), np.int64))
        b.add("Gather", [x.name, index], (*x.shape[:axis], *x.shape[axis + 1 :]), axis=axis)
        return True
    places = [b.between(0, size - 1) for _ in range(b.between(1, 3))]
    b.add("Gather", [x.name, b.constant(places)], (*x.shape[:axis], len(places), *x.shape[axis + 1 :]), axis=axis)
    return True


def flatten(b: Builder) -> bool:
    x = b.pick(lambda t: t.rank >= 2)
    if x is None:
        return False
    b.add("Flatten", [x.name], (x.shape[0], math.prod(x.inner)), axis=1)
    return True


def expand(b: Builder) -> bool:
    x = b.pick(lambda t: t.rank >= 2 and 1 in t.inner and np.prod(t.inner) <= MOST // 4)
    if x is None:
        return False
    axis, times = 1 + x.inner.index(1), b.between(2, 4)
    shape = [1] * x.rank
    shape[axis] = times
    b.add(b.choose(["Expand", "Tile"]), [x.name, b.constant(shape)], (*x.shape[:axis], times, *x.shape[axis + 1 :]))
    return True


def space_to_depth(b: Builder) -> bool:
    x = b.pick(lambda t: t.rank == 4 and t.inner[1] % 2 == 0 and t.inner[2] % 2 == 0)
    if x is None:
        return False
    c, h, w = x.inner
    b.add("SpaceToDepth", [x.name], (x.shape[0], 4 * c, h // 2, w // 2), blocksize=2)
    return True


def sequence(b: Builder) -> bool:
    """Split into a sequence, and one of its items."""
    x = b.pick(lambda t: t.rank >= 2 and t.inner[0] > 1)
    if x is None or b.opset < 11:
        return False
    parts = b.silent("SplitToSequence", [x.name, b.constant([1] * x.inner[0])], axis=1)
    b.add("SequenceAt", [parts, b.constant(np.array(0, np.int64))], (x.shape[0], 1, *x.shape[2:]))
    return True


SHAPES = {
    reshape: 2, merge: 0.7, transpose: 1.5, there_and_back: 0.3, squeeze: 1, unsqueeze: 0.7, cut: 1, concat: 1.5,
    split: 1, pad: 1, resize: 0.7, gather: 1, flatten: 1.2, expand: 0.5, space_to_depth: 0.4, sequence: 0.15,
}  # fmt: skip
