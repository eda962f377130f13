"""Constants that lie in the file as int8 and become float at load, by a Cast and a Mul: how readers know that form."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper

from onnxcalib.model.graph import GraphIndex, attributes, fresh_name
from onnxcalib.model.walk import refill

Maker = Callable[[str], onnx.NodeProto | None]


@dataclass(frozen=True)
class Folded:
    """A float constant, by the tensors that it is computed from."""

    codes: str
    zero: str | None
    scale: str
    nodes: tuple[onnx.NodeProto, ...]  # the Mul first
    spread: onnx.NodeProto | None = None  # what gives each value the scale of its block


def folded(name: str, maker: Maker, is_stored: Callable[[str], bool]) -> Folded | None:
    """The constant behind a tensor that a Mul, perhaps a Sub, and a Cast of integers make; None for others."""

    def stored(name: str) -> tuple[str, onnx.NodeProto | None] | None:
        spread = maker(name)
        if spread is not None and spread.op_type == "Gather" and all(map(is_stored, spread.input)):
            return spread.input[0], spread
        return (name, None) if is_stored(name) else None

    product = maker(name)
    if product is None or product.op_type != "Mul" or (scale := stored(product.input[1])) is None:
        return None
    before, zero, nodes = maker(product.input[0]), None, [product, *(scale[1:] if scale[1] is not None else ())]
    if before is not None and before.op_type == "Sub" and (found := stored(before.input[1])) is not None:
        zero, nodes = found[0], [*nodes, before, *(found[1:] if found[1] is not None else ())]
        before = maker(before.input[0])
    if before is None or before.op_type != "Cast" or attributes(before).get("to") != TensorProto.FLOAT:
        return None
    return Folded(before.input[0], zero, scale[0], (*nodes, before), scale[1])


def as_dequantizers(graph: onnx.GraphProto, is_integer: Callable[[str], bool]) -> None:
    """Writes each such constant as a DequantizeLinear, the one form that readers of files know."""
    index = GraphIndex(graph)
    used, gone = {*index.initializers, *index.producers, *index.inputs}, set()
    for node in list(graph.node):
        found = folded(node.output[0], index.producers.get, index.initializers.__contains__)
        scale = None if found is None else index.value(found.scale)
        if found is None or scale is None or not is_integer(found.codes):
            continue
        if found.spread is None and max(scale.shape, default=1) != scale.size:
            continue
        spread = found.spread
        axis = next((place for place, size in enumerate(scale.shape) if size > 1), None)
        stored = index.initializers.get(found.codes)
        if axis is not None and stored is not None:
            axis += len(stored.dims) - scale.ndim  # a vector of scales belongs to the last axis
        axis = axis if spread is None else attributes(spread).get("axis", 0)
        block, shape = (None, None) if spread is None else (_block(index, spread), scale.shape)
        inputs = [found.codes, _stored(graph, used, f"{node.output[0]}_scale", scale, axis, shape)]
        if found.zero is not None:
            zero = _zero(index, found, scale.shape)
            inputs.append(_stored(graph, used, f"{node.output[0]}_zero", zero, axis, shape))
        gone |= {inner.output[0] for inner in found.nodes[1:] if index.only_reader(inner.output[0]) is not None}
        node.CopyFrom(
            onnx.helper.make_node("DequantizeLinear", inputs, node.output, node.name, axis=axis, block_size=block)
        )
    refill(graph.node, [node for node in graph.node if not gone.intersection(node.output)])


def _zero(index: GraphIndex, found: Folded, shape: tuple[int, ...]) -> np.ndarray[tuple[int, ...], np.dtype]:
    """The zero points; those of rows at four bits are one, and such codes have no sign."""
    assert found.zero is not None
    value, maker = index.value(found.zero), index.producers.get(found.codes)
    is_packed = maker is not None and maker.op_type == "Concat"
    return np.full(shape, value, np.uint8) if is_packed else value.astype(np.int8)


def _block(index: GraphIndex, spread: onnx.NodeProto) -> int:
    """How many values share a scale: the first block is a whole one, if there are two."""
    return int((index.value(spread.input[1]) == 0).sum())


def _stored(
    graph: onnx.GraphProto,
    used: set[str],
    stem: str,
    value: np.ndarray[tuple[int, ...], np.dtype],
    axis: int | None,
    shape: tuple[int, ...] | None,
) -> str:
    name = fresh_name(stem, used)
    used.add(name)
    graph.initializer.append(numpy_helper.from_array(value.reshape(shape or (() if axis is None else -1)), name))
    return name
