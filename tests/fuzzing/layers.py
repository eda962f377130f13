"""Adds layers: convolutions, products, recurrent cells, embeddings."""

from __future__ import annotations

import numpy as np
from onnx import TensorProto

from fuzzing.builder import Builder, Tensor

MOST = 512  # values of a sample, so that a graph runs in a moment


def conv(b: Builder) -> bool:
    """Of any rank, group, stride, dilation and padding."""
    x = b.pick(lambda t: 3 <= t.rank <= 5)
    if x is None:
        return False
    channels, sizes = x.inner[0], x.inner[1:]
    group = b.choose([1, 1, 1, channels, 2 if channels % 2 == 0 else 1])
    outputs = group * b.between(1, max(1, 8 // group))
    kernel = [b.between(1, min(3, size)) for size in sizes]
    attributes: dict[str, object] = {"kernel_shape": kernel} if b.chance(0.7) else {}
    strides = [b.choose([1, 1, 1, 2]) for _ in sizes]
    dilations = [1] * len(sizes)
    if b.chance(0.15):
        dilations = [2 if (k - 1) * 2 + 1 <= size else 1 for k, size in zip(kernel, sizes, strict=True)]
        attributes["dilations"] = dilations
    if b.chance(0.6) or any(step != 1 for step in strides):
        attributes["strides"] = strides
    reach = [(k - 1) * d + 1 for k, d in zip(kernel, dilations, strict=True)]
    if b.chance(0.15) and dilations == [1] * len(sizes):
        attributes["auto_pad"] = b.choose(["SAME_UPPER", "SAME_LOWER"])
        made = [-(-size // step) for size, step in zip(sizes, strides, strict=True)]
    else:
        begin = [b.between(0, k // 2) for k in kernel]
        end = [b.between(0, k // 2) for k in kernel]
        if any(begin + end) or b.chance(0.5):
            attributes["pads"] = begin + end
        made = [
            (size + before + after - span) // step + 1
            for size, before, after, span, step in zip(sizes, begin, end, reach, strides, strict=True)
        ]
    if group != 1 or b.chance(0.5):
        attributes["group"] = group
    inputs = [x.name, b.weight(outputs, channels // group, *kernel, fan_in=channels // group * int(np.prod(kernel)))]
    if b.chance(0.6):
        inputs.append(b.constant(b.floats(outputs, scale=0.3), "b"))
    b.add("Conv", inputs, (x.shape[0], outputs, *made), **attributes)
    return True


def conv_transpose(b: Builder) -> bool:
    """Of any rank up to 2-D, group and stride."""
    x = b.pick(lambda t: 3 <= t.rank <= 4 and np.prod(t.inner) <= MOST // 4)
    if x is None:
        return False
    channels, sizes = x.inner[0], x.inner[1:]
    group = b.choose([1, 1, 2 if channels % 2 == 0 else 1, channels])
    each, kernel = b.between(1, 3), [b.between(1, 3) for _ in sizes]
    strides = [b.choose([1, 2]) for _ in sizes]
    attributes: dict[str, object] = {"strides": strides, "group": group}
    extra = [0] * len(sizes)
    if b.chance(0.2):
        extra = [step - 1 for step in strides]
        attributes["output_padding"] = extra
    trims = [b.between(0, k // 2) for k in kernel] if b.chance(0.3) else [0] * len(sizes)
    if any(trims):
        attributes["pads"] = trims * 2
    made = [
        (size - 1) * step + k + more - 2 * trim
        for size, step, k, more, trim in zip(sizes, strides, kernel, extra, trims, strict=True)
    ]
    if min(made) < 1:
        return False
    inputs = [x.name, b.weight(channels, each, *kernel, fan_in=channels // group * 2)]
    if b.chance(0.6):
        inputs.append(b.constant(b.floats(each * group, scale=0.3), "b"))
    b.add("ConvTranspose", inputs, (x.shape[0], each * group, *made), **attributes)
    return True


def gemm(b: Builder) -> bool:
    """With all its flags; the weight, the bias or neither is computed."""
    x = b.pick(lambda t: t.rank == 2)
    if x is None:
        return False
    features, outputs = x.inner[0], b.between(1, 8)
    attributes: dict[str, object] = {}
    name = x.name
    if b.chance(0.15):
        name = b.silent("Transpose", [name], perm=[1, 0])
        attributes["transA"] = 1
    turned = b.chance(0.5)
    weight = b.weight(*((outputs, features) if turned else (features, outputs)), fan_in=features)
    if turned:
        attributes["transB"] = 1
    for flag in ("alpha", "beta"):
        if b.chance(0.2):
            attributes[flag] = float(b.choose([0.5, 2.0, 1.0]))
    inputs = [name, weight]
    bias = b.rng.random()
    if bias < 0.6 or b.opset < 11:
        shape = b.choose([(outputs,), (outputs,), (1, outputs), (1,), ()])
        inputs.append(b.constant(b.floats(*shape, scale=0.3), "b"))
    elif bias < 0.7:
        other = b.pick(lambda t: t.rank == 2 and t.inner[0] in (1, outputs))
        if other is not None:
            inputs.append(other.name)
    b.add("Gemm", inputs, (x.shape[0], outputs), **attributes)
    return True


def matmul(b: Builder) -> bool:
    """With a constant on the right or the left, of two or more axes, perhaps with a bias after it."""
    x = b.pick(lambda t: 2 <= t.rank <= 4)
    if x is None:
        return False
    outputs = b.between(1, 8)
    kind = b.rng.random()
    if kind < 0.15 and x.rank >= 3:
        rows = x.shape[-2]
        b.add("MatMul", [b.weight(outputs, rows, fan_in=rows), x.name], (*x.shape[:-2], outputs, x.shape[-1]))
        return True
    columns = x.shape[-1]
    if kind < 0.25 and x.rank >= 3:
        lead = [x.shape[-3] or 1] if x.rank == 4 else [1]
        weight = b.constant(b.floats(*lead, columns, outputs, scale=float(columns**-0.5)), "w")
    else:
        weight = b.weight(columns, outputs, fan_in=columns)
    made = b.add("MatMul", [x.name, weight], (*x.shape[:-1], outputs))
    if b.chance(0.5):
        shape = b.choose([(outputs,), (1, outputs), (1,), ()])
        pair = [made.name, b.constant(b.floats(*shape, scale=0.3), "b")]
        b.add("Add", pair[:: b.choose([1, -1])], made.shape)
    return True


def product(b: Builder) -> bool:
    """A MatMul of two computed operands, as in attention."""
    x = b.pick(lambda t: t.rank in (3, 4))
    if x is None:
        return False
    perm = [*range(x.rank - 2), x.rank - 1, x.rank - 2]
    turned = b.silent("Transpose", [x.name], perm=perm)
    square = b.silent("MatMul", [x.name, turned])
    scaled = b.silent("Mul", [square, b.constant(float(1 / (x.shape[-1] or 1)))])
    if b.chance(0.7):
        scaled = b.silent("Softmax", [scaled], axis=x.rank - 1)
    b.add("MatMul", [scaled, x.name], x.shape)
    return True


def recurrent(b: Builder, most: int = 4) -> bool:
    """An LSTM, GRU or RNN over the second axis."""
    x = b.pick(lambda t: t.rank == 3)
    if x is None:
        return False
    steps, features = x.inner
    op, hidden = b.choose(["LSTM", "GRU", "RNN"]), b.between(most // 4, most)
    ways = b.choose([1, 1, 2])
    gates = {"LSTM": 4, "GRU": 3, "RNN": 1}[op]
    turned = b.silent("Transpose", [x.name], perm=[1, 0, 2])
    inputs = [
        turned,
        b.weight(ways, gates * hidden, features, fan_in=features),
        b.weight(ways, gates * hidden, hidden, fan_in=hidden),
    ]
    if b.chance(0.6):
        inputs.append(b.constant(b.floats(ways, 2 * gates * hidden, scale=0.2), "b"))
    attributes: dict[str, object] = {"hidden_size": hidden}
    if ways == 2 or b.chance(0.2):
        attributes["direction"] = "bidirectional" if ways == 2 else b.choose(["forward", "reverse"])
    if op == "GRU" and b.chance(0.5):
        attributes["linear_before_reset"] = 1
    if b.chance(0.2):  # only the last state
        state = b.fresh("state")
        b.append(op, inputs, ["", state], **attributes)
        back = b.silent("Transpose", [state], perm=[1, 0, 2])
        b.add("Reshape", [back, b.constant([0, ways * hidden])], (x.shape[0], ways * hidden))
        return True
    names = b.node(op, inputs, 2 if b.chance(0.5) else 1, **attributes)
    back = b.silent("Transpose", [names[0]], perm=[2, 0, 1, 3])  # [batch, steps, ways, hidden]
    b.add("Reshape", [back, b.constant([0, 0, ways * hidden])], (x.shape[0], steps, ways * hidden))
    return True


def wide_recurrent(b: Builder) -> bool:
    """One whose weights are large enough to be stored as integers."""
    return recurrent(b, 32)


def computed_weight(b: Builder) -> bool:
    """A Conv, Gemm or MatMul whose weight is computed from a constant, or is half constant."""
    x = b.pick(lambda t: t.rank in (2, 4))
    if x is None:
        return False
    outputs, scale = b.between(1, 4), b.constant(0.5)
    shape = (outputs, x.inner[0], 1, 1) if x.rank == 4 else (x.inner[0], outputs)
    weight = b.silent(b.choose(["Mul", "Add"]), [b.weight(*shape, fan_in=x.inner[0]), scale])
    b.add("Conv" if x.rank == 4 else "MatMul", [x.name, weight], (x.shape[0], outputs, *x.shape[2:]))
    return True


def einsum(b: Builder) -> bool:
    """With a matrix, a matrix a head, or another computed tensor."""
    x = b.pick(lambda t: t.rank == 3)
    if x is None or b.opset < 12:
        return False
    outputs, (steps, width) = b.between(1, 5), x.inner
    kind = b.rng.random()
    if kind < 0.5:
        weight = b.weight(width, outputs, fan_in=width)
        b.add("Einsum", [x.name, weight], (*x.shape[:2], outputs), equation=b.choose(["nij,jk->nik", "abc,cd->abd"]))
    elif kind < 0.75:
        weight = b.weight(width, 2, outputs, fan_in=width)
        b.add("Einsum", [x.name, weight], (*x.shape[:2], 2, outputs), equation="nij,jhk->nihk")
    else:
        b.add("Einsum", [x.name, x.name], (x.shape[0], steps, steps), equation="nid,njd->nij")
    return True


def embedding(b: Builder) -> bool:
    """Rows of a table by an integer input."""
    indices = b.choose(b.integers) if b.integers else None
    if indices is None or indices[1] is None:
        return False
    name, shape = indices
    rows, width = 16, b.between(2, 8)
    table = b.weight(rows, width, fan_in=4)
    if len(shape) > 3:
        return False
    kept = (
        b.silent("Clip", [b.silent("Cast", [name], to=b.float_type), *_bounds(b, 0.0, rows - 1.0)])
        if (b.opset >= 11)
        else None
    )
    if kept is None:
        return False
    safe = b.silent("Cast", [kept], to=TensorProto.INT64)
    b.tensors.append(Tensor(b.node("Gather", [table, safe])[0], (*shape, width)))
    return True


def _bounds(b: Builder, low: float, high: float) -> list[str]:
    return [b.constant(low), b.constant(high)]


LAYERS = {conv: 5, conv_transpose: 1.5, gemm: 3, matmul: 3, product: 1, recurrent: 1, computed_weight: 0.4,
          einsum: 0.3, embedding: 0.7}  # fmt: skip
