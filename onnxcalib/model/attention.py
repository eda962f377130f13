"""Where attention is: a Softmax of a product of computed tensors, which is multiplied with another one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import onnx

from onnxcalib.model.graph import GraphIndex

# What may stand between a product and the Softmax of its scores, and between that and the product with the values.
BEFORE_SOFTMAX = (
    "Div", "Mul", "Add", "Sub", "Where", "Max", "Clip", "Tanh", "Reshape", "Transpose", "Squeeze", "Unsqueeze", "Cast",
    "Identity", "Flatten",
)  # fmt: skip
AFTER_SOFTMAX = (
    "Dropout", "Identity", "Cast", "Reshape", "Transpose", "Squeeze", "Unsqueeze", "Mul", "Where", "IsNaN", "Flatten",
)  # fmt: skip
PRODUCTS = ("MatMul", "Gemm", "Einsum")


@dataclass(frozen=True)
class Attention:
    """A Softmax between two products of computed tensors: queries by keys, and the shares of these by values."""

    softmax: str
    scores: tuple[str, ...]  # names of the nodes
    values: tuple[str, ...]


def find_attention(graph: onnx.GraphProto) -> tuple[Attention, ...]:
    """Requires named nodes; every Softmax of a product whose result is multiplied with something computed."""
    index = GraphIndex(graph)
    found = []
    for node in (node for node in graph.node if node.op_type == "Softmax" and not node.domain):
        scores = tuple(dict.fromkeys(_upwards(index, node.input[0], set())))
        values = tuple(dict.fromkeys(_downwards(index, node.output[0], set())))
        if scores and values:
            found.append(Attention(node.name, scores, values))
    return tuple(found)


def _upwards(index: GraphIndex, tensor: str, seen: set[str]) -> Iterator[str]:
    """The products of computed tensors that a tensor comes from; several where scores are added up."""
    node = index.producers.get(tensor)
    if node is None or node.domain or tensor in seen:
        return
    seen.add(tensor)
    if node.op_type in PRODUCTS and is_product(index, node):
        yield node.name
    elif node.op_type in BEFORE_SOFTMAX:
        for source in node.input:
            yield from _upwards(index, source, seen)


def _downwards(index: GraphIndex, tensor: str, seen: set[str]) -> Iterator[str]:
    """The products of computed tensors that read the tensor."""
    seen.add(tensor)
    for node in (node for node in index.readers.get(tensor, []) if not node.domain):
        if node.op_type in PRODUCTS and is_product(index, node):
            yield node.name
        elif node.op_type in AFTER_SOFTMAX and node.output[0] not in seen:
            yield from _downwards(index, node.output[0], seen)


def is_product(index: GraphIndex, node: onnx.NodeProto) -> bool:
    """Whether both operands are computed."""
    return len(node.input) >= 2 and not any(name in index.initializers for name in node.input[:2])
