"""A part of a quantized network that takes and gives quantized values: what joins it is a quarter as large.

A runtime then also computes in integers up to the border, where a float tensor would keep its last layer float.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import onnx

from onnxcalib.model.graph import GraphIndex
from onnxcalib.model.io import copied
from onnxcalib.model.walk import refill


@dataclass(frozen=True)
class CodeBorders:
    """The part, and by tensor at its border what the quantized values are called."""

    model: onnx.ModelProto
    reads: dict[str, str]
    makes: dict[str, str]


def with_code_borders(model: onnx.ModelProto, tensors: Collection[str]) -> CodeBorders:
    """The model with quantized values in place of those of its inputs and outputs that every reader quantizes."""
    index = GraphIndex(model.graph)
    makes = {name: codes for name in index.outputs & set(tensors) if (codes := _codes_made(index, name)) is not None}
    read = {name: nodes for name in index.inputs & set(tensors) if (nodes := _quantizer_of(index, name)) is not None}
    reads = {name: nodes[-1].output[0] for name, nodes in read.items()}
    changed = copied(model)
    gone = {node.name for nodes in read.values() for node in nodes}
    types = {name: _code_type(index, nodes[0]) for name, nodes in read.items()}
    types |= {name: _code_type(index, index.producers[name]) for name in makes}
    graph = changed.graph
    refill(graph.node, [node for node in graph.node if node.name not in gone])
    refill(graph.input, [_border(value, reads, types) for value in graph.input])
    refill(graph.output, [_border(value, makes, types) for value in graph.output])
    return CodeBorders(changed, reads, makes)


def _codes_made(index: GraphIndex, name: str) -> str | None:
    """What an output is dequantized from."""
    maker = index.producers.get(name)
    if maker is None or maker.op_type != "DequantizeLinear" or maker.input[0] not in index.producers:
        return None
    return str(maker.input[0])


def _quantizer_of(index: GraphIndex, name: str) -> list[onnx.NodeProto] | None:
    """The nodes that quantize an input, if all who read it read what these make."""
    first = index.only_reader(name)
    if first is None or first.op_type != "QuantizeLinear":
        return None
    then = index.only_reader(first.output[0])
    nodes = [first, then] if then is not None and then.op_type == "Clip" else [first]
    made = nodes[-1].output[0]
    readers = index.readers.get(made, [])
    known = made not in index.outputs and all(node.op_type == "DequantizeLinear" for node in readers)
    return nodes if readers and known else None


def _code_type(index: GraphIndex, node: onnx.NodeProto) -> int:
    return int(index.initializers[node.input[2]].data_type)


def _border(value: onnx.ValueInfoProto, codes: dict[str, str], types: dict[str, int]) -> onnx.ValueInfoProto:
    if value.name not in codes:
        return value
    return onnx.helper.make_tensor_value_info(codes[value.name], types[value.name], None)
