"""What the outputs of a model mean, told from its graph.

The rule, for every float output, by the node that makes it (layout ops, casts and quantizers looked through):

- Softmax or LogSoftmax: a distribution over classes. A Conv, Gemm or MatMul, with its bias, a factor or a soft cap
  after it: logits, if the output has two axes, or three in a model that reads token ids.
- A distribution on three axes, [batch, positions, classes], of a model that reads token ids: tokens.
- Two axes, and divided by its own length; or two axes in a model that reads token ids, and pooled over positions (a
  reduction, one of them, or the Tanh of a pooler): an embedding.
- Three axes or more of values, in a model that reads token ids and has tokens or an embedding to give: hidden states
  and caches, which serve those and do not count beside them.
- Everything else: values. Of one class there is no distribution.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper

from onnxcalib.model.graph import GraphIndex, attributes
from onnxcalib.numerics.output_kind import OutputKind

_LAYOUT_OPS = {"Identity", "Flatten", "Reshape", "Squeeze", "Unsqueeze", "QuantizeLinear", "DequantizeLinear", "Cast"}
_FLOATS = {onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16, onnx.TensorProto.DOUBLE}
_INTEGERS = {onnx.TensorProto.INT32, onnx.TensorProto.INT64}
_LAYERS = {"Conv", "Gemm", "MatMul", "QLinearConv", "MatMulNBits"}
_DISTRIBUTIONS = {"Softmax": OutputKind.PROBABILITIES, "LogSoftmax": OutputKind.LOGITS}
_LOOKUPS = {"Gather", "GatherBlockQuantized"}
_POOLS = {"ReduceMean", "ReduceSum", "ReduceMax"}
_AFTER_POOL = {"Div", "Mul", "LayerNormalization", "BatchNormalization"}
_LENGTHS = {"ReduceL2", "LpNormalization"}
_SIZED = {"Sqrt", "Clip", "Max", "Add", "Expand", "Pow", "Reciprocal", *_LAYOUT_OPS}  # between a length and its use


def find_output_kinds(model: onnx.ModelProto) -> dict[str, OutputKind]:
    """The kind of every float output."""
    index = GraphIndex(model.graph)
    tokens = reads_token_ids(index)
    kinds = {}
    for value in model.graph.output:
        if value.type.tensor_type.elem_type in _FLOATS:
            kinds[value.name] = _output_kind(index, value.name, _sizes(value), tokens=tokens)
    if tokens and any(kind.is_of_tokens or kind is OutputKind.EMBEDDING for kind in kinds.values()):
        inner = [value.name for value in model.graph.output if len(_sizes(value)) > 2]
        kinds |= {name: OutputKind.HIDDEN for name in inner if kinds.get(name) is OutputKind.VALUES}
    return kinds


def _sizes(value: onnx.ValueInfoProto) -> list[int]:
    return [axis.dim_value for axis in value.type.tensor_type.shape.dim]


def reads_token_ids(index: GraphIndex) -> bool:
    """Whether an integer input picks rows of a constant table."""
    ids = [
        value.name
        for value in index.graph.input
        if value.name in index.inputs and value.type.tensor_type.elem_type in _INTEGERS
    ]
    if not ids:
        return False
    reached, _ = index.downstream(ids)
    for node in index.graph.node:
        if node.op_type == "EmbedLayerNormalization":
            return True
        if node.op_type in _LOOKUPS and node.input[1] in reached and _is_table(index, node.input[0]):
            return True
    return False


def _is_table(index: GraphIndex, name: str) -> bool:
    while name not in index.initializers:
        node = index.producers.get(name)
        if node is None or node.op_type not in _LAYOUT_OPS | {"Transpose"}:
            return False
        name = node.input[0]
    return len(index.initializers[name].dims) == 2


def _output_kind(index: GraphIndex, name: str, sizes: list[int], *, tokens: bool) -> OutputKind:
    node, rank = _maker(index, name), len(sizes)
    if node is None or not sizes:
        return OutputKind.VALUES
    if node.op_type in _DISTRIBUTIONS:
        kind = _DISTRIBUTIONS[node.op_type]
        return kind.at_every_position if tokens and rank == 3 else kind
    if sizes[-1] == 1:
        return OutputKind.VALUES
    if _is_layer(index, node, capped=tokens):
        if tokens and rank == 3:
            return OutputKind.TOKEN_LOGITS
        return OutputKind.LOGITS if rank == 2 else OutputKind.VALUES
    if rank == 2 and (_is_normalized(index, node) or (tokens and _is_pooled(index, node))):
        return OutputKind.EMBEDDING
    return OutputKind.VALUES


def _maker(index: GraphIndex, name: str) -> onnx.NodeProto | None:
    node = index.producers.get(name)
    while node is not None and node.op_type in _LAYOUT_OPS:
        node = index.producers.get(node.input[0])
    return node


def _is_layer(index: GraphIndex, node: onnx.NodeProto, *, capped: bool) -> bool:
    """Whether a layer makes it; a model of tokens may scale and cap its logits by constants."""
    between = {"Add", "Mul", "Div", "Tanh"} if capped else {"Add"}
    found: onnx.NodeProto | None = node
    while found is not None and found.op_type in between:
        operands = [name for name in found.input if name not in index.initializers]
        if len(operands) != 1 or (found.op_type == "Tanh" and found is node):  # a pooler ends so
            return False
        found = _maker(index, operands[0]) if capped else index.producers.get(operands[0])
        if not capped:
            break
    return found is not None and found.op_type in _LAYERS


def _is_normalized(index: GraphIndex, node: onnx.NodeProto) -> bool:
    """Whether it is divided by its own length."""
    if node.op_type in _LENGTHS:
        return True
    if node.op_type not in ("Div", "Mul"):
        return False
    length: str = node.input[1]
    while (maker := index.producers.get(length)) is not None and maker.op_type in _SIZED:
        length = next((name for name in maker.input if name not in index.initializers), "")
    return maker is not None and maker.op_type in (*_LENGTHS, "ReduceSumSquare", "ReduceSum") and maker.input[0] != ""


def _is_pooled(index: GraphIndex, node: onnx.NodeProto) -> bool:
    """Whether the positions of a sequence became one; a pooler ends in the Tanh of a layer."""
    if node.op_type == "Tanh":
        before = _maker(index, node.input[0])
        return before is not None and _is_layer(index, before, capped=False)
    found: onnx.NodeProto | None = node
    while found is not None and (found.op_type in _AFTER_POOL or (found.op_type == "Concat" and len(found.input) == 1)):
        found = _maker(index, found.input[0])
    if found is None:
        return False
    if found.op_type == "Gather":
        return attributes(found).get("axis", 0) == 1 and _constant(index, found.input[1]) is not None
    return found.op_type in _POOLS and _reduced_axes(index, found) == [1]


def _reduced_axes(index: GraphIndex, node: onnx.NodeProto) -> list[int]:
    given = attributes(node).get("axes")
    if given is None and len(node.input) > 1:
        given = _constant(index, node.input[1])
    return [] if given is None else [int(axis) for axis in np.ravel(given)]


def _constant(index: GraphIndex, name: str) -> np.ndarray[Any, Any] | None:
    """A constant, also of a file as exporters write it."""
    node = index.producers.get(name)
    if node is not None and node.op_type == "Constant" and "value" in (given := attributes(node)):
        return numpy_helper.to_array(given["value"])
    return index.constant(name)
