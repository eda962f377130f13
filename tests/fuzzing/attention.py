"""Adds what transformers are made of: attention with masks, rotated places, norms and gates, as ops or spelled out."""

from __future__ import annotations

import numpy as np
from onnx import TensorProto

from fuzzing.builder import Builder, Tensor

FAR = -1e4  # added to what must not be attended to


def attention(b: Builder) -> bool:
    """One head or several, projections of their own or in one product, by MatMul or Einsum."""
    x = b.pick(lambda t: t.rank == 3 and t.inner[0] <= 16)
    if x is None or (b.dtype != np.float32 and b.opset < 13):
        return False
    steps, width = x.inner
    heads, size = b.choose([1, 1, 2, 4]), b.choose([2, 4])
    query, key, value = _projected(b, x, heads * size)
    if b.opset >= 23 and b.chance(0.3):
        made = b.silent("Attention", [query, key, value], q_num_heads=heads, kv_num_heads=heads)
    else:
        made = _by_products(b, (query, key, value), steps, heads, size)
    out = b.add("MatMul", [made, b.weight(heads * size, width, fan_in=heads * size)], x.shape)
    if b.chance(0.6):
        b.add("Add", [x.name, out.name][:: b.choose([1, -1])], x.shape)
    return True


def _projected(b: Builder, x: Tensor, width: int) -> list[str]:
    """Queries, keys and values."""
    features = x.inner[1]
    if b.chance(0.3):
        whole = b.silent("MatMul", [x.name, b.weight(features, 3 * width, fan_in=features)])
        if b.chance(0.5):
            whole = b.silent("Add", [whole, b.constant(b.floats(3 * width, scale=0.3), "b")])
        inputs, attributes = [whole], {"axis": 2}
        if b.opset < 13:
            return b.node("Split", inputs, 3, split=[width] * 3, **attributes)
        return b.node("Split", [whole, b.constant([width] * 3)], 3, **attributes)
    made = [b.silent("MatMul", [x.name, b.weight(features, width, fan_in=features)]) for _ in range(3)]
    if b.chance(0.5):
        made = [b.silent("Add", [each, b.constant(b.floats(width, scale=0.3), "b")]) for each in made]
    return made


def _by_products(b: Builder, parts: tuple[str, str, str], steps: int, heads: int, size: int) -> str:
    whole = b.chance(0.3) and heads == 1  # without an axis of heads
    einsum = b.opset >= 12 and not whole and b.chance(0.25)
    shape = b.constant([0, steps, heads, size])
    apart = [each if whole else b.silent("Reshape", [each, shape]) for each in parts]
    if not whole:
        turns = ([0, 2, 1, 3], [0, 2, 1, 3] if einsum else [0, 2, 3, 1], [0, 2, 1, 3])
        apart = [b.silent("Transpose", [each], perm=perm) for each, perm in zip(apart, turns, strict=True)]
    elif not einsum:
        apart[1] = b.silent("Transpose", [apart[1]], perm=[0, 2, 1])
    query, key, value = apart
    early = b.chance(0.5)
    if early:
        query = b.silent("Mul", [query, b.constant(float(size**-0.5))])
    if einsum:
        scores = b.silent("Einsum", [query, key], equation="bhid,bhjd->bhij")
    else:
        scores = b.silent("MatMul", [query, key])
    if not early:
        scores = b.silent("Div", [scores, b.constant(float(size**0.5))])
    weights = b.silent("Softmax", [_masked(b, scores, steps, 1 if whole else 2)], axis=2 if whole else 3)
    if einsum:
        made = b.silent("Einsum", [weights, value], equation="bhij,bhjd->bhid")
    else:
        made = b.silent("MatMul", [weights, value])
    if whole:
        return made
    made = b.silent("Transpose", [made], perm=[0, 2, 1, 3])
    return b.silent("Reshape", [made, b.constant([0, steps, heads * size])])


def _masked(b: Builder, scores: str, steps: int, axes: int) -> str:
    """Nothing, what comes later, or what the mask among the inputs says must not be attended to."""
    if b.mask is not None and b.mask[1] == steps and b.chance(0.8):
        kept = b.silent("Cast", [b.mask[0]], to=b.float_type)
        far = b.silent("Mul", [b.silent("Sub", [b.constant(1.0), kept]), b.constant(FAR)])
        inputs = [far]
        return b.silent("Add", [scores, b.silent("Unsqueeze", inputs, **b.axes(inputs, [*range(1, axes + 1)], 13))])
    if not b.chance(0.4):
        return scores
    later = np.triu(np.ones((steps, steps), bool), 1)
    if b.chance(0.5):
        return b.silent("Add", [scores, b.constant((later * FAR).astype(b.dtype))])
    return b.silent("Where", [b.constant(later), b.constant(FAR), scores])


def spelled_norm(b: Builder) -> bool:
    """A layer norm or one of root mean squares, spelled out, or as the newest opsets have it."""
    x = b.pick(lambda t: t.rank == 3 and t.inner[1] > 1)
    if x is None:
        return False
    b.noisy = True
    width, centred = x.inner[1], b.chance(0.5)
    scale = b.constant(b.floats(width, scale=0.2, offset=1.0))
    if not centred and b.opset >= 23 and b.chance(0.5):
        b.add("RMSNormalization", [x.name, scale], x.shape, axis=-1, epsilon=1e-2)
        return True
    about = b.silent("Sub", [x.name, _mean(b, x.name)]) if centred else x.name
    square = b.silent("Pow", [about, b.constant(2.0)]) if b.chance(0.5) else b.silent("Mul", [about, about])
    root = b.silent("Sqrt", [b.silent("Add", [_mean(b, square), b.fixed(0.01)])])
    even = b.silent("Div", [about, root])
    made = b.add("Mul", [even, scale], x.shape)
    if centred:
        b.add("Add", [made.name, b.constant(b.floats(width, scale=0.2))], x.shape)
    return True


def _mean(b: Builder, name: str) -> str:
    inputs = [name]
    attributes = b.axes(inputs, [-1], 18)
    if b.opset < 11:
        attributes = {"axes": [2]}
    return b.silent("ReduceMean", inputs, keepdims=1, **attributes)


def feed_forward(b: Builder) -> bool:
    """Two products with a Gelu between them, or a gated one."""
    x = b.pick(lambda t: t.rank == 3)
    if x is None:
        return False
    features, hidden = x.inner[1], b.between(2, 12)
    up = b.silent("MatMul", [x.name, b.weight(features, hidden, fan_in=features)])
    if b.chance(0.4):
        gate = b.silent("MatMul", [x.name, b.weight(features, hidden, fan_in=features)])
        up = b.silent("Mul", [b.silent("Mul", [gate, b.silent("Sigmoid", [gate])]), up])
    else:
        up = _gelu(b, b.silent("Add", [up, b.constant(b.floats(hidden, scale=0.3), "b")]))
    made = b.add("MatMul", [up, b.weight(hidden, features, fan_in=hidden)], x.shape)
    b.add("Add", [x.name, made.name], x.shape)
    return True


def _gelu(b: Builder, name: str) -> str:
    half = b.silent("Mul", [name, b.constant(0.5)])
    if b.chance(0.5):
        inner = b.silent("Erf", [b.silent("Div", [name, b.constant(float(np.sqrt(2)))])])
    else:
        cube = b.silent("Mul", [b.silent("Pow", [name, b.constant(3.0)]), b.constant(0.044715)])
        inner = b.silent("Tanh", [b.silent("Mul", [b.silent("Add", [name, cube]), b.constant(0.7978845608)])])
    return b.silent("Mul", [half, b.silent("Add", [inner, b.constant(1.0)])])


def rotary(b: Builder) -> bool:
    """Pairs of features turned by an angle that grows with the place."""
    x = b.pick(lambda t: t.rank == 3 and t.inner[1] % 2 == 0)
    if x is None or b.opset < 13:
        return False
    steps, width = x.inner
    half = width // 2
    angles = np.outer(np.arange(steps), 10.0 ** -np.arange(half)).astype(b.dtype)
    cosine, sine = (b.constant(np.concatenate([wave(angles)] * 2, 1).astype(b.dtype)) for wave in (np.cos, np.sin))
    first, second = b.node("Split", [x.name, b.constant([half, half])], 2, axis=2)
    turned = b.silent("Concat", [b.silent("Neg", [second]), first], axis=2)
    straight, across = b.silent("Mul", [x.name, cosine]), b.silent("Mul", [turned, sine])
    b.add("Add", [straight, across], x.shape)
    return True


def add_tokens(b: Builder, batch: int | None, rows: int) -> dict[str, np.ndarray]:
    """Token ids, perhaps with a mask, and what their table says of each, with places added; gives the feed."""
    steps, width, words = b.between(2, 8), b.choose([4, 6, 8]), b.choose([16, 200])
    ids = b.choose(["input_ids", "tokens"])
    feed = {ids: b.rng.integers(0, words, (rows, steps))}
    sizes = [batch or "N", steps]
    b.add_input(ids, TensorProto.INT64, sizes)
    if b.chance(0.5):
        b.mask = (b.choose(["attention_mask", "mask"]), steps)
        lengths = b.rng.integers(1, steps + 1, (rows, 1))
        feed[b.mask[0]] = (np.arange(steps) < lengths).astype(np.int64)
        b.add_input(b.mask[0], TensorProto.INT64, sizes)
    table = b.weight(words, width, fan_in=1)
    looked = b.silent("Gather", [table, ids])
    b.add("Add", [looked, b.constant(b.floats(steps, width, scale=0.5))], (None, steps, width))
    return feed


ATTENTION = {attention: 1.5, spelled_norm: 0.8, feed_forward: 0.8, rotary: 0.3}
