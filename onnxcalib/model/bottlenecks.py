"""Tensors through which everything passes: the borders of a network's blocks."""

from __future__ import annotations

from collections import Counter

import onnx

from onnxcalib.model.graph import GraphIndex

QUANTIZED_TYPES = {
    onnx.TensorProto.UINT8,
    onnx.TensorProto.INT8,
    onnx.TensorProto.UINT16,
    onnx.TensorProto.INT16,
}


def bottlenecks(graph: onnx.GraphProto) -> list[str]:
    """The tensors that alone carry what later nodes still read, in order."""
    index = GraphIndex(graph)
    moving, _ = index.downstream(index.inputs)
    unread = Counter(name for node in graph.node for name in GraphIndex.reads(node) if name in moving)
    live: set[str] = set(index.inputs) & unread.keys()
    found: list[str] = []
    for node in graph.node:
        for name in GraphIndex.reads(node):
            unread[name] -= 1
            if not unread[name]:
                live.discard(name)
        live.update(name for name in node.output if unread.get(name, 0) > 0)
        if len(live) == 1 and live <= set(node.output):
            found.extend(live)
    return found


def quantized_bottlenecks(model: onnx.ModelProto) -> list[str]:
    """Those that hold quantized values, by declared types: no kernel is fused across one, so that cuts change nothing.

    Those that are not read by DequantizeLinear alone are left out: a quantizer may end in a Clip.
    """
    index = GraphIndex(model.graph)
    quantized = {value.name for value in model.graph.value_info if value.type.tensor_type.elem_type in QUANTIZED_TYPES}
    return [
        name
        for name in bottlenecks(model.graph)
        if name in quantized and all(node.op_type == "DequantizeLinear" for node in index.readers[name])
    ]
