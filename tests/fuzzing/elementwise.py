"""Adds norms, activations, elementwise ops with broadcasting, pools and reductions."""

from __future__ import annotations

from typing import Any

import numpy as np
from onnx import TensorProto

from fuzzing.builder import Builder, Shape, Tensor

# An activation with its first opset and attributes.
ACTIVATIONS: tuple[tuple[str, int, dict[str, Any]], ...] = (
    ("Relu", 1, {}), ("Relu", 1, {}), ("LeakyRelu", 1, {"alpha": 0.1}), ("Sigmoid", 1, {}), ("Tanh", 1, {}),
    ("Elu", 1, {}), ("Selu", 1, {}), ("HardSigmoid", 1, {}), ("Softplus", 1, {}), ("Softsign", 1, {}),
    ("ThresholdedRelu", 10, {}), ("Abs", 1, {}), ("Neg", 1, {}), ("Erf", 9, {}), ("HardSwish", 14, {}),
    ("Gelu", 20, {}), ("Mish", 18, {}), ("Celu", 12, {}), ("Identity", 1, {}), ("Dropout", 1, {}), ("Floor", 1, {}),
    ("Sin", 7, {}),
)  # fmt: skip
ROUGH = ("Floor", "ThresholdedRelu")


def activation(b: Builder) -> bool:
    x = b.pick(lambda _: True)
    op, since, attributes = b.choose(ACTIVATIONS)
    if x is None or b.opset < since or (op == "Dropout" and b.opset in (10, 11)):
        return False
    b.noisy |= op in ROUGH
    b.add(op, [x.name], x.shape, **attributes)
    return True


def clip(b: Builder) -> bool:
    x = b.pick(lambda _: True)
    if x is None:
        return False
    low, high = b.choose([(0.0, 6.0), (-1.0, 1.0), (0.0, None), (None, 0.5), (-0.3, 0.7)])
    if b.opset < 11:
        given = {name: value for name, value in (("min", low), ("max", high)) if value is not None}
        b.add("Clip", [x.name], x.shape, **given)
        return True
    names = [x.name, *("" if value is None else b.constant(value) for value in (low, high))]
    b.add("Clip", names[:2] if not names[2] else names, x.shape)
    return True


def gated(b: Builder) -> bool:
    """SiLU, hard swish and the like, written out."""
    x = b.pick(lambda _: True)
    if x is None:
        return False
    gate = b.silent(b.choose(["Sigmoid", "Tanh", "HardSigmoid"]), [x.name])
    b.add("Mul", [x.name, gate], x.shape)
    return True


def prelu(b: Builder) -> bool:
    x = b.pick(lambda t: t.rank >= 2)
    if x is None:
        return False
    slope = b.choose([(1,), (x.inner[0], *[1] * (x.rank - 2)), x.inner[-1:]])
    b.add("PRelu", [x.name, b.constant(b.floats(*slope, scale=0.3))], x.shape)
    return True


def softmax(b: Builder) -> bool:
    x = b.pick(lambda t: t.rank >= 2)
    if x is None:
        return False
    axis = b.between(1, x.rank - 1)
    op = b.choose(["Softmax", "Softmax", "LogSoftmax"])
    b.add(op, [x.name], x.shape, axis=axis - x.rank if b.opset >= 13 and b.chance(0.5) else axis)
    return True


def batch_norm(b: Builder) -> bool:
    x = b.pick(lambda t: t.rank >= 2)
    if x is None:
        return False
    c = x.inner[0]
    variance = b.rng.uniform(0.5, 2.0, c).astype(b.dtype)
    values = [b.floats(c, scale=0.2, offset=1.0), b.floats(c, scale=0.3), b.floats(c, scale=0.3), variance]
    attributes = {"epsilon": 1e-3} if b.chance(0.5) else {}
    b.add("BatchNormalization", [x.name, *map(b.constant, values)], x.shape, **attributes)
    return True


def norm(b: Builder) -> bool:
    """Layer, instance and group norms, and those of vectors: they scale differences up."""
    x = b.pick(lambda t: t.rank >= 3 and np.prod(t.inner[1:]) > 2)
    op = b.choose(["LayerNormalization", "InstanceNormalization", "GroupNormalization", "LpNormalization", "LRN"])
    since = {"LayerNormalization": 17, "GroupNormalization": 21, "LRN": 1}.get(op, 1)
    if (
        x is None
        or b.opset < since
        or (op == "LRN" and x.rank != 4)
        or (op == "LpNormalization" and b.dtype != np.float32)
    ):
        return False
    b.noisy = True
    c, last = x.inner[0], x.inner[-1]
    pair = {"LayerNormalization": last, "InstanceNormalization": c, "GroupNormalization": c}.get(op)
    inputs = [x.name]
    if pair is not None:
        inputs += [b.constant(b.floats(pair, scale=0.2, offset=1.0)), b.constant(b.floats(pair, scale=0.3))]
    attributes: dict[str, Any] = {"LRN": {"size": 3}, "GroupNormalization": {"num_groups": 2 if c % 2 == 0 else 1}}.get(
        op, {}
    )
    if op in ("LayerNormalization", "InstanceNormalization", "GroupNormalization"):
        attributes = {**attributes, "epsilon": 1e-2}
    b.add(op, inputs, x.shape, **attributes)
    return True


def binary(b: Builder) -> bool:
    """Two tensors, or a tensor and a constant, of shapes that broadcast."""
    x = b.pick(lambda t: t.rank >= 1)
    if x is None:
        return False
    op = b.choose(["Add", "Add", "Sub", "Mul", "Mul", "Min", "Max", "Div"])
    if b.chance(0.5):
        other = b.pick(lambda t: t.rank == x.rank and _broadcasts(t.shape, x.shape))
        assert other is not None
        name, shape = other.name, tuple(_wider(p, q) for p, q in zip(x.shape, other.shape, strict=True))
    else:
        inner = x.inner[b.between(0, len(x.inner)) :] if x.inner else ()
        name = b.constant(b.floats(*(size if b.chance(0.7) else 1 for size in inner), scale=0.5))
        shape = x.shape
    if op == "Div":
        b.noisy = True
        name = b.silent("Add", [b.silent("Abs", [name]), b.constant(1.0)])
    b.add(op, [x.name, name][:: b.choose([1, -1]) if op != "Div" else 1], shape)
    return True


def _broadcasts(one: Shape, other: Shape) -> bool:
    return all(p == q or 1 in (p, q) for p, q in zip(one[1:], other[1:], strict=True)) and one[0] == other[0]


def _wider(one: int | None, other: int | None) -> int | None:
    return other if one == 1 else one


def unary(b: Builder) -> bool:
    """Ops that need their input in a safe range."""
    x = b.pick(lambda _: True)
    if x is None:
        return False
    op = b.choose(["Sqrt", "Exp", "Log", "Reciprocal", "Pow"])
    b.noisy = True
    safe = b.silent("Add", [b.silent("Abs", [x.name]), b.constant(0.5)])
    inner = b.silent("Tanh", [x.name]) if op == "Exp" else safe
    b.add(op, [inner, b.constant(2.0)] if op == "Pow" else [inner], x.shape)
    return True


def where(b: Builder) -> bool:
    x = b.pick(lambda _: True)
    if x is None or b.opset < 9:
        return False
    b.noisy = True
    condition = b.silent("Greater", [x.name, b.constant(0.1)])
    b.add("Where", [condition, x.name, b.constant(-0.5)], x.shape)
    return True


def pool(b: Builder) -> bool:
    x = b.pick(lambda t: 3 <= t.rank <= 5)
    if x is None:
        return False
    if b.chance(0.3):
        op = b.choose(["GlobalAveragePool", "GlobalMaxPool"])
        b.add(op, [x.name], (*x.shape[:2], *[1] * (x.rank - 2)))
        return True
    op, kernel = b.choose(["MaxPool", "AveragePool"]), [b.between(1, min(3, size)) for size in x.inner[1:]]
    strides = [b.choose([1, 2]) for _ in kernel]
    pads = [b.between(0, k // 2) for k in kernel] * 2
    rank = len(kernel)
    made = [(size + pads[i] + pads[i + rank] - kernel[i]) // strides[i] + 1 for i, size in enumerate(x.inner[1:])]
    attributes: dict[str, Any] = {"kernel_shape": kernel, "strides": strides, "pads": pads}
    if op == "MaxPool" and b.chance(0.1):  # its places as well, which nobody reads
        b.tensors.append(Tensor(b.node(op, [x.name], 2, **attributes)[0], (*x.shape[:2], *made)))
        return True
    if op == "AveragePool" and b.chance(0.5):
        attributes["count_include_pad"] = 1
    b.add(op, [x.name], (*x.shape[:2], *made), **attributes)
    return True


def reduce(b: Builder) -> bool:
    x = b.pick(lambda t: t.rank >= 3)
    if x is None:
        return False
    op = b.choose(["ReduceMean", "ReduceMean", "ReduceSum", "ReduceMax", "ReduceL2"])
    some = sorted({b.between(1, x.rank - 1) for _ in range(b.between(1, x.rank - 1))})
    keep, inputs = b.choose([0, 1]), [x.name]
    attributes = b.axes(inputs, [axis - x.rank if b.opset >= 11 and b.chance(0.3) else axis for axis in some],
                        13 if op == "ReduceSum" else 18)  # fmt: skip
    shape = [size if axis not in some else 1 for axis, size in enumerate(x.shape) if keep or axis not in some]
    b.add(op, inputs, tuple(shape), keepdims=keep, **attributes)
    return True


def arg_max(b: Builder) -> bool:
    """Integers, which only an output or an embedding reads."""
    x = b.pick(lambda t: t.rank >= 2)
    if x is None:
        return False
    axis = b.between(1, x.rank - 1)
    name = b.node(b.choose(["ArgMax", "ArgMin"]), [x.name], axis=axis, keepdims=0)[0]
    b.integers.append((name, tuple(size for place, size in enumerate(x.shape) if place != axis)))
    return True


def contrib(b: Builder) -> bool:
    """An op of onnxruntime's own domain."""
    x = b.pick(lambda _: True)
    if x is None or b.dtype != np.float32:
        return False
    b.add(b.choose(["Gelu", "QuickGelu"]), [x.name], x.shape, domain="com.microsoft")
    return True


def cast(b: Builder) -> bool:
    """To another type and back."""
    x = b.pick(lambda _: True)
    if x is None:
        return False
    to = b.choose([TensorProto.DOUBLE, TensorProto.FLOAT16, TensorProto.FLOAT, TensorProto.INT32])
    b.noisy |= to == TensorProto.INT32
    b.add("Cast", [b.silent("Cast", [x.name], to=to)], x.shape, to=b.float_type)
    return True


def top_k(b: Builder) -> bool:
    x = b.pick(lambda t: t.rank >= 2 and (t.shape[-1] or 0) >= 2)
    if x is None or b.opset < 10:
        return False
    names = b.node("TopK", [x.name, b.constant([1])], 2, axis=-1)
    b.noisy = True
    b.tensors.append(Tensor(names[0], (*x.shape[:-1], 1)))
    return True


OTHERS = {
    activation: 5, clip: 1.5, gated: 1.5, prelu: 0.7, softmax: 0.8, batch_norm: 2, norm: 1.2, binary: 4, unary: 0.4,
    where: 0.3, pool: 1.5, reduce: 1, arg_max: 0.3, cast: 0.4, contrib: 0.2, top_k: 0.2,
}  # fmt: skip
