"""A random valid graph from a seed: the model, and a feed that it runs on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from fuzzing.attention import ATTENTION, add_tokens
from fuzzing.builder import Builder, Tensor
from fuzzing.control import CONTROL
from fuzzing.elementwise import OTHERS
from fuzzing.layers import LAYERS, conv, gemm, matmul, wide_recurrent
from fuzzing.shapes import SHAPES
from onnxcalib.model.walk import all_nodes

OLDEST, NEWEST = 9, 25
IR_OF_OPSET = {
    9: 4, 10: 5, 11: 6, 12: 7, 13: 7, 14: 7, 15: 8, 16: 8, 17: 8, 18: 8, 19: 9, 20: 9, 21: 10, 22: 10, 23: 11, 24: 12,
    25: 13,
}  # fmt: skip
SAMPLES = 9
INPUT_SHAPES = ((3, 6, 6), (4, 5, 5), (2, 8, 8), (6,), (4,), (5, 6), (4, 8), (2, 3, 4, 4))

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Case:
    """A model, what to feed it, and whether it makes much of small differences."""

    model: onnx.ModelProto
    feed: Arrays
    noisy: bool
    half: bool
    loose: frozenset[str] = frozenset()  # outputs of as many rows as values make them have


def random_graph(seed: int) -> Case:
    """Almost every graph is valid; whoever needs that runs it first."""
    rng = np.random.default_rng([15, seed])
    half = bool(rng.random() < 0.08)
    b = Builder(rng, int(rng.integers(OLDEST, NEWEST + 1)), np.dtype(np.float16 if half else np.float32))
    b.plain_names, b.twice = b.chance(0.75), b.chance(0.1)
    batch, kind = b.choose([None, None, None, 1, 2]), b.rng.random()
    tokens, sequences = kind < 0.12, 0.12 <= kind < 0.15
    feed = add_tokens(b, batch, (batch or 1) * SAMPLES) if tokens else _add_inputs(b, batch)
    ops = {**LAYERS, **OTHERS, **SHAPES, **ATTENTION, **(CONTROL if b.chance(0.35) else {})}
    if tokens:
        ops = {**ops, **{op: 10 * weight for op, weight in ATTENTION.items()}}
    if sequences:  # recurrent cells are all its layers
        feed |= _add_sequence(b, batch)
        wide_recurrent(b)
        ops = {**OTHERS, wide_recurrent: 5}
    chances = np.array([*ops.values()]) / sum(ops.values())
    wanted = b.between(3, 14)
    while wanted > 0:
        wanted -= bool(list(ops)[int(b.rng.choice(len(ops), p=chances))](b))
    if not sequences and b.chance(0.9):  # else little would be there to quantize
        last = [conv, gemm, matmul]
        any(last[int(place)](b) for place in b.rng.permutation(3))
    return Case(_model(b, batch), feed, b.noisy, half, frozenset(tensor.name for tensor in b.loose))


def _add_sequence(b: Builder, batch: int | None) -> Arrays:
    name, inner = b.fresh("x"), (b.between(2, 6), b.choose([16, 40]))
    b.add_input(name, b.float_type, [batch or "N", *inner])
    b.tensors.append(Tensor(name, (None, *inner)))
    return {name: b.floats((batch or 1) * SAMPLES, *inner)}


def _add_inputs(b: Builder, batch: int | None) -> Arrays:
    feed: Arrays = {}
    for _ in range(b.choose([1, 1, 1, 2, 2, 3])):
        name = b.fresh("x")
        inner = b.choose(INPUT_SHAPES)
        rows = (batch or 1) * SAMPLES
        if b.chance(0.05):
            pixels = b.rng.integers(0, 256, (rows, *inner)).astype(np.uint8)
            b.add_input(name, TensorProto.UINT8, [batch or "N", *inner])
            scaled = b.silent("Mul", [b.silent("Cast", [name], to=b.float_type), b.constant(1 / 128)])
            b.tensors.append(Tensor(scaled, (None, *inner)))
            feed[name] = pixels
            continue
        if b.chance(0.1):
            inner = inner[-1:]
            b.add_input(name, TensorProto.INT64, [batch or "N", *inner])
            b.integers.append((name, (None, *inner)))
            feed[name] = b.rng.integers(0, 16, (rows, *inner))
            continue
        sizes: list[Any] = [batch or "N", *inner]
        if batch is None and b.chance(0.1):
            sizes = ["N", *(f"{name}_d{place}" for place in range(len(inner)))]
        b.add_input(name, b.float_type, sizes)
        b.tensors.append(Tensor(name, (None, *inner)))
        feed[name] = b.floats(rows, *inner) * b.dtype.type(b.choose([1, 1, 1, 1, 1, 1, 1, 10, 0.01, 0]))
    if not b.tensors:
        name, inner = b.fresh("x"), b.choose(INPUT_SHAPES)
        b.add_input(name, b.float_type, [batch or "N", *inner])
        b.tensors.append(Tensor(name, (None, *inner)))
        feed[name] = b.floats((batch or 1) * SAMPLES, *inner)
    return feed


def _model(b: Builder, batch: int | None) -> onnx.ModelProto:
    nodes = list(b.nodes)
    if b.chance(0.05):
        nodes = [nodes[place] for place in b.rng.permutation(len(nodes))]
    name = "" if b.chance(0.05) else "main"
    graph = helper.make_graph(nodes, name, b.inputs, _outputs(b, batch), b.initializers)
    opsets = [helper.make_opsetid("", b.opset)]
    if b.functions:
        opsets.append(helper.make_opsetid("local", 1))
    if any(node.domain == "com.microsoft" for node in all_nodes(graph)) or b.chance(0.1):
        opsets.append(helper.make_opsetid("com.microsoft", 1))
    model = helper.make_model(graph, opset_imports=opsets, functions=b.functions)
    model.ir_version = max(IR_OF_OPSET[b.opset], 8 if b.functions else 0)
    if b.chance(0.2) and not b.functions:
        model.ir_version = max(model.ir_version, 8)
    return model


def _outputs(b: Builder, batch: int | None) -> list[onnx.ValueInfoProto]:
    """What nobody reads, but for dead ends; sometimes inner tensors, inputs, integers; sometimes without a shape."""
    read = {name for node in b.nodes for name in node.input}
    fed = {value.name for value in b.inputs}
    ends = [tensor for tensor in b.tensors if tensor.name not in read and tensor.name not in fed]
    kept = [tensor for tensor in ends[:-1] if b.chance(0.75)] + ends[-1:]
    inside = [tensor for tensor in b.tensors if tensor.name in read or tensor.name in fed]
    if inside and b.chance(0.15):
        kept.append(b.choose(inside))
    shapeless = 0.5 if b.chance(0.08) else 0.0
    values = [_value(b, tensor.name, tensor.shape, b.float_type, batch, shapeless) for tensor in kept]
    numbers = [each for each in b.integers if each[0] not in fed and b.chance(0.5)]
    values += [helper.make_tensor_value_info(it.name, b.float_type, ["K", *it.inner]) for it in b.loose]
    return values + [_value(b, name, shape, TensorProto.INT64, batch, shapeless) for name, shape in numbers]


def _value(
    b: Builder, name: str, shape: tuple[int | None, ...], kind: int, batch: int | None, shapeless: float
) -> onnx.ValueInfoProto:
    sizes = [(batch or "N") if size is None else size for size in shape]
    return helper.make_tensor_value_info(name, kind, None if b.chance(shapeless) else sizes)
