"""What the outputs of a model mean, told from the graph: logits, probabilities, or plain values."""

from __future__ import annotations

import onnx

from onnxcalib.model.graph import GraphIndex
from onnxcalib.numerics.losses import OutputKind

_LAYOUT_OPS = {"Identity", "Flatten", "Reshape", "Squeeze", "Unsqueeze", "QuantizeLinear", "DequantizeLinear", "Cast"}
_FLOATS = {onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16, onnx.TensorProto.DOUBLE}
_LAYERS = {"Conv", "Gemm", "MatMul", "QLinearConv"}
_DISTRIBUTIONS = {"Softmax": OutputKind.PROBABILITIES, "LogSoftmax": OutputKind.LOGITS}


def find_output_kinds(model: onnx.ModelProto) -> dict[str, OutputKind]:
    """The kind of every float output: a layer's own output with two axes is read as logits."""
    index = GraphIndex(model.graph)
    kinds = {}
    for value in model.graph.output:
        if value.type.tensor_type.elem_type in _FLOATS:
            dims = value.type.tensor_type.shape.dim
            # Of one class there is no distribution.
            kinds[value.name] = _output_kind(index, value.name, len(dims) == 2 and dims[1].dim_value != 1)
    return kinds


def _output_kind(index: GraphIndex, name: str, classes: bool) -> OutputKind:
    node = index.producers.get(name)
    while node is not None and node.op_type in _LAYOUT_OPS:
        node = index.producers.get(node.input[0])
    if node is not None and node.op_type in _DISTRIBUTIONS:
        return _DISTRIBUTIONS[node.op_type]
    if node is not None and node.op_type == "Add" and any(operand in index.initializers for operand in node.input):
        node = next((made for operand in node.input if (made := index.producers.get(operand)) is not None), None)
    return OutputKind.LOGITS if classes and node is not None and node.op_type in _LAYERS else OutputKind.VALUES
