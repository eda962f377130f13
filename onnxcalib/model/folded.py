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


def folded(name: str, maker: Maker, is_stored: Callable[[str], bool]) -> Folded | None:
    """The constant behind a tensor that a Mul, perhaps a Sub, and a Cast of integers make; None for others."""
    product = maker(name)
    if product is None or product.op_type != "Mul" or not is_stored(product.input[1]):
        return None
    before, zero, nodes = maker(product.input[0]), None, [product]
    if before is not None and before.op_type == "Sub" and is_stored(before.input[1]):
        zero, nodes = before.input[1], [product, before]
        before = maker(before.input[0])
    if before is None or before.op_type != "Cast" or attributes(before).get("to") != TensorProto.FLOAT:
        return None
    return Folded(before.input[0], zero, product.input[1], (*nodes, before))


def as_dequantizers(graph: onnx.GraphProto, is_integer: Callable[[str], bool]) -> None:
    """Writes each such constant as a DequantizeLinear, the one form that readers of files know."""
    index = GraphIndex(graph)
    used, gone = {*index.initializers, *index.producers, *index.inputs}, set()
    for node in list(graph.node):
        found = folded(node.output[0], index.producers.get, index.initializers.__contains__)
        scale = None if found is None else index.value(found.scale)
        if found is None or scale is None or max(scale.shape, default=1) != scale.size or not is_integer(found.codes):
            continue
        axis = next((place for place, size in enumerate(scale.shape) if size > 1), None)
        inputs = [found.codes, _vector(graph, used, f"{node.output[0]}_scale", scale, axis)]
        if found.zero is not None:
            zero = index.value(found.zero).astype(np.int8)
            inputs.append(_vector(graph, used, f"{node.output[0]}_zero", zero, axis))
        gone |= {inner.output[0] for inner in found.nodes[1:] if index.only_reader(inner.output[0]) is not None}
        node.CopyFrom(onnx.helper.make_node("DequantizeLinear", inputs, node.output, node.name, axis=axis))
    refill(graph.node, [node for node in graph.node if not gone.intersection(node.output)])


def _vector(
    graph: onnx.GraphProto, used: set[str], stem: str, value: np.ndarray[tuple[int, ...], np.dtype], axis: int | None
) -> str:
    name = fresh_name(stem, used)
    used.add(name)
    graph.initializer.append(numpy_helper.from_array(value.reshape(() if axis is None else -1), name))
    return name
