"""Nodes beside layers that a person would ask about: what they hold, and why they stay float."""

from __future__ import annotations

import math
from dataclasses import dataclass

import onnx

from onnxcalib.model.graph import GraphIndex
from onnxcalib.model.walk import all_nodes, bodies

LAYER_OPS = ("Conv", "ConvTranspose", "Gemm", "MatMul")
RECURRENT_OPS = ("LSTM", "GRU", "RNN")
LEAST_TABLE = 4096  # elements
LOOKED_UP = "embedding tables are looked up in float; only their storage may shrink"
FUSED_ATTENTION = "it holds the products of attention within, in float; quantize a model with MatMuls instead of it"
FLOAT_BETWEEN = "it computes in float between layers"
FUSED = "an op of {domain}, for which there is no quantized form here"
REASONS = {
    **dict.fromkeys(
        (
            "Attention", "MultiHeadAttention", "GroupQueryAttention", "DecoderMaskedMultiHeadAttention",
            "PagedAttention", "PackedAttention", "PackedMultiHeadAttention", "LongformerAttention", "SparseAttention",
        ),
        FUSED_ATTENTION,
    ),
    **dict.fromkeys(
        (
            "SkipLayerNormalization", "SkipSimplifiedLayerNormalization", "SimplifiedLayerNormalization", "QuickGelu",
            "FastGelu", "BiasGelu", "Gelu", "BiasSplitGelu", "RotaryEmbedding", "GroupNorm", "SkipGroupNorm", "BiasAdd",
            "RelativePositionBias", "GatedRelativePositionBias",
        ),
        FLOAT_BETWEEN,
    ),
    "EmbedLayerNormalization": LOOKED_UP,
    "FusedMatMul": "a fused product; quantize a model that was not optimized by a runtime",
    "FusedGemm": "a fused product; quantize a model that was not optimized by a runtime",
    "FusedConv": "a fused convolution; quantize a model that was not optimized by a runtime",
    "MatMulNBits": "its weight is quantized already",
    "GatherBlockQuantized": "its table is quantized already",
}  # fmt: skip


@dataclass(frozen=True)
class FloatNode:
    """A node with weights or products that stays float, and why."""

    name: str
    op: str
    reason: str
    inside: str | None = None  # the node whose subgraph holds it
    parameters: int = 0  # constants that it computes with
    macs: int | None = None  # a sample; None where that is unknown, or nothing is multiplied


def other_float_nodes(index: GraphIndex, node: onnx.NodeProto) -> list[FloatNode]:
    """Recurrent ops, embeddings, lone batch norms, ops of runtimes, and what the bodies of If and Loop hold."""
    size = _parameters(index, node)
    if node.domain:
        reason = REASONS.get(node.op_type) or FUSED.format(domain=node.domain)
        return [FloatNode(node.name, node.op_type, reason, None, size)]
    if node.op_type == "Attention":
        return [FloatNode(node.name, node.op_type, FUSED_ATTENTION)]
    if node.op_type in RECURRENT_OPS:
        reason = "recurrent ops compute in float; only their storage may shrink"
        return [FloatNode(node.name, node.op_type, reason, None, size)]
    if node.op_type == "BatchNormalization":
        return [FloatNode(node.name, node.op_type, "no layer directly before it to fold it into", None, size)]
    table = index.initializers.get(node.input[0]) if node.op_type == "Gather" else None
    if table is not None and _is_table(table):
        return [FloatNode(node.name, node.op_type, LOOKED_UP, None, math.prod(table.dims), 0)]
    reason = f"inside a subgraph of {node.op_type} '{node.name}'"
    inner = [each for body in bodies(node) for each in all_nodes(body) if each.op_type in (*LAYER_OPS, *RECURRENT_OPS)]
    return [FloatNode(each.name or each.output[0], each.op_type, reason, node.name) for each in inner]


def _is_table(tensor: onnx.TensorProto) -> bool:
    """Whether rows of several floats are looked up in it; scales of rows are no table."""
    several = math.prod(tensor.dims[1:]) > 1
    return several and tensor.data_type == onnx.TensorProto.FLOAT and math.prod(tensor.dims) >= LEAST_TABLE


def _parameters(index: GraphIndex, node: onnx.NodeProto) -> int:
    """The float constants that a node reads."""
    read = (index.initializers.get(name) for name in dict.fromkeys(node.input))
    return sum(
        math.prod(tensor.dims) for tensor in read if tensor is not None and tensor.data_type == onnx.TensorProto.FLOAT
    )
