"""Biases where layers look for them: straight after the product, one value a channel."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import helper, numpy_helper

from onnxcalib.model.graph import GraphIndex, attributes, drop_unused_initializers, fresh_name
from onnxcalib.model.shapes import infer_shapes
from onnxcalib.model.walk import refill

Array = npt.NDArray[Any]
# Ops that keep values in their order, whatever the axes.
KEEPING_OPS = ("Reshape", "Squeeze", "Unsqueeze", "Flatten")


def biases_before_reshapes(model: onnx.ModelProto) -> None:
    """Moves what is added after a Reshape of a product to before it, where every row gets the same."""
    graph, index = model.graph, GraphIndex(model.graph)
    moved = [pair for node in graph.node if (pair := _late_bias(index, node)) is not None]
    shapes = infer_shapes(model) if moved else {}
    nodes = list(graph.node)
    for node, add in moved:
        weight = index.initializers[node.input[1]]
        columns = weight.dims[0 if attributes(node).get("transB", 0) else 1]
        bias = next(name for name in add.input if name in index.initializers)
        source = next(name for name in add.input if name != bias)
        values = _row_of(index.value(bias), shapes.get(source) or _last_sizes(index, source), columns)
        if values is None:
            continue
        name = fresh_name(f"{node.name}_bias", index.names)
        index.names.add(name)
        graph.initializer.append(numpy_helper.from_array(values, name))
        index.producers[source].output[0] = add.output[0]
        product = fresh_name(f"{node.output[0]}_product", index.names)
        index.names.add(product)
        summed = helper.make_node("Add", [product, name], [node.output[0]], add.name)
        node.output[0] = product
        nodes.insert(nodes.index(node) + 1, summed)
        nodes.remove(add)
    if moved:
        refill(graph.node, nodes)
        drop_unused_initializers(graph)


def _late_bias(index: GraphIndex, node: onnx.NodeProto) -> tuple[onnx.NodeProto, onnx.NodeProto] | None:
    """A product without a bias, and the Add of a constant past ops that keep the order of values."""
    weight = index.initializers.get(node.input[1]) if node.op_type in ("MatMul", "Gemm") and not node.domain else None
    if weight is None or len(weight.dims) != 2 or len(node.input) > 2 or weight.data_type != onnx.TensorProto.FLOAT:
        return None
    reader, passed = index.only_reader(node.output[0]), 0
    while reader is not None and reader.op_type in KEEPING_OPS:
        reader, passed = index.only_reader(reader.output[0]), passed + 1
    if reader is None or reader.op_type != "Add" or not passed:
        return None
    return (node, reader) if sum(name in index.initializers for name in reader.input) == 1 else None


def _last_sizes(index: GraphIndex, tensor: str) -> tuple[int | None, ...]:
    """The sizes that a Reshape writes out at the end of those that it computes."""
    reshape = index.producers.get(tensor)
    maker = index.producers.get(reshape.input[1]) if reshape is not None and reshape.op_type == "Reshape" else None
    while maker is not None and maker.op_type in ("Cast", "Identity"):
        maker = index.producers.get(maker.input[0])
    if maker is None or maker.op_type != "Concat":
        return ()
    sizes = index.constant(maker.input[-1])
    return () if sizes is None or not (sizes > 0).all() else (None, *map(int, sizes))


def _row_of(bias: Array, shape: tuple[int | None, ...], columns: int) -> Array | None:
    """The bias as one value a column, where the last axes of the tensor that it is added to are these columns."""
    for count in range(1, len(shape) + 1):
        sizes = [size for size in shape[-count:] if size is not None]
        if len(sizes) < count or math.prod(sizes) > columns:
            return None
        if math.prod(sizes) == columns:
            if not _has_row(bias, count):
                return None
            row = bias.reshape(bias.shape[max(bias.ndim - count, 0) :])
            pairs: list[tuple[int, int]] = list(zip(reversed(row.shape), reversed(sizes), strict=False))
            fits = all(own in (1, size) for own, size in pairs)
            return np.ascontiguousarray(np.broadcast_to(row, sizes)).reshape(-1) if fits else None
    return None


def _has_row(bias: Array, count: int) -> bool:
    """Whether it differs along the last axes only, and has no more axes than the tensor."""
    return all(size == 1 for size in bias.shape[: max(bias.ndim - count, 0)])
