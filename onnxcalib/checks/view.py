"""A quantized graph as rules see it: quantizers with their constants, and layers with what they read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto

from onnxcalib.model.external import values_of
from onnxcalib.model.float_nodes import LAYER_OPS
from onnxcalib.model.folded import folded
from onnxcalib.model.graph import GraphIndex, attributes
from onnxcalib.model.integer_products import DYNAMIC_QUANTIZER
from onnxcalib.model.placement import SAME_QPARAMS_OPS
from onnxcalib.model.walk import bodies

Array = npt.NDArray[Any]

TYPES: dict[int, str] = {
    TensorProto.INT8: "s8", TensorProto.UINT8: "u8", TensorProto.INT32: "s32", TensorProto.INT4: "s4",
    TensorProto.UINT4: "u4", TensorProto.INT16: "s16", TensorProto.UINT16: "u16",
}  # fmt: skip
QUANTIZER_OPS = {"QuantizeLinear": "quantize", "DequantizeLinear": "dequantize", "Quant": "quant"}
# Between a quantizer and its dequantizer quantized values may be moved, and clipped.
PASSING_OPS = {*SAME_QPARAMS_OPS, "Identity", "Clip"}


def label(node: onnx.NodeProto) -> str:
    """The node's name, or that of what it makes."""
    return str(node.name or next(iter(node.output), node.op_type))


@dataclass(frozen=True)
class Quantizer:
    """A QuantizeLinear, DequantizeLinear or Quant node."""

    node: onnx.NodeProto
    kind: str  # quantize, dequantize, quant
    scale: Array | None  # None: computed at run time
    zero: Array | None  # None: left out, or computed
    has_zero: bool
    type: str | None  # of the quantized values; None for Quant nodes, which have none
    axis: int
    block: int
    constant: bool  # what it quantizes or dequantizes is stored
    dynamic: bool = False  # it dequantizes what a DynamicQuantizeLinear made

    @property
    def channels(self) -> int:
        """How many scales it has."""
        return 1 if self.scale is None else int(self.scale.size)

    @property
    def zero_is_zero(self) -> bool:
        """Whether quantized values of zero mean zero."""
        return not self.has_zero or self.zero is None or not np.any(self.zero)


@dataclass(frozen=True)
class LayerView:
    """A layer and the quantizers that it reads."""

    node: onnx.NodeProto
    activation: Quantizer | None
    weight: Quantizer | None
    weight_is_direct: bool  # nothing stands between the layer and its weight's quantizer
    weight_is_constant: bool
    weight_is_folded: bool  # stored as int8, and computed at load
    bias: Quantizer | None
    float_bias: bool

    @property
    def quantized(self) -> bool:
        """Whether both operands are quantized."""
        return self.activation is not None and self.weight is not None


class View:
    """One graph, main or inner; constants are initialisers."""

    def __init__(self, graph: onnx.GraphProto, outer: View | None = None) -> None:
        self.graph, self.outer = graph, outer
        self.index = GraphIndex(graph)
        self._constant: dict[str, bool] = {}

    def initializer(self, name: str) -> onnx.TensorProto | None:
        """A stored tensor, of this graph or one around it."""
        found = self.index.initializers.get(name)
        return self.outer.initializer(name) if found is None and self.outer is not None else found

    def value(self, name: str) -> Array | None:
        """The value of a stored tensor."""
        tensor = self.initializer(name)
        return None if tensor is None else values_of(tensor)

    def maker(self, name: str) -> onnx.NodeProto | None:
        """The node that makes a tensor."""
        return self.index.producers.get(name) or (self.outer.maker(name) if self.outer is not None else None)

    def is_constant(self, name: str) -> bool:
        """Whether a tensor is stored, or computed from stored ones alone."""
        if name not in self._constant:
            node = self.maker(name)
            stored = self.initializer(name) is not None
            reads = [read for read in node.input if read] if node is not None else []
            self._constant[name] = stored or (bool(reads) and all(self.is_constant(read) for read in reads))
        return self._constant[name]

    @cached_property
    def quantizers(self) -> dict[str, Quantizer]:
        """By output, in graph order."""
        nodes = [node for node in self.graph.node if node.op_type in QUANTIZER_OPS and len(node.input) >= 2]
        return {node.output[0]: self._quantizer(node) for node in nodes}

    def quantizer_of(self, name: str) -> Quantizer | None:
        """The quantizer that gives a float tensor."""
        found = self.quantizers.get(name) or (self.outer.quantizer_of(name) if self.outer is not None else None)
        return found if found is not None and found.kind != "quantize" else None

    def quantizer_behind(self, dequantizer: Quantizer) -> Quantizer | None:
        """The QuantizeLinear whose quantized values it reads, past what only moves or clips them."""
        name = dequantizer.node.input[0]
        while True:
            found, node = self.quantizers.get(name), self.maker(name)
            if found is not None:
                return found if found.kind == "quantize" else None
            if node is None or node.op_type not in PASSING_OPS or not node.input:
                return self.outer.quantizer_behind(dequantizer) if self.outer is not None else None
            name = node.input[0]

    @cached_property
    def layers(self) -> list[LayerView]:
        """Conv, ConvTranspose, Gemm and MatMul, in graph order."""
        nodes = [
            node
            for node in self.graph.node
            # What only computes on constants is folded at load, as the unpacking of bit planes is.
            if node.op_type in LAYER_OPS and not node.domain and not self.is_constant(node.output[0])
        ]
        return [self._layer(node) for node in nodes]

    @cached_property
    def weight_only(self) -> bool:
        """Whether layers have quantized weights and none a quantized input."""
        weights = any(it.weight or it.weight_is_folded for it in self.layers)
        return weights and not any(it.activation for it in self.layers)

    def element_type(self, name: str) -> int | None:
        """The type of a tensor of quantized values, as far as the graph says it."""
        tensor, node = self.initializer(name), self.maker(name)
        if tensor is not None:
            return int(tensor.data_type)
        if node is None:
            return next((v.type.tensor_type.elem_type for v in self.graph.input if v.name == name), None)
        if node.op_type == "Cast":
            return int(attributes(node)["to"])
        if node.op_type == DYNAMIC_QUANTIZER:
            return int(TensorProto.UINT8)
        if node.op_type == "QuantizeLinear":
            declared = attributes(node).get("output_dtype", 0) or TensorProto.UINT8
            return self.element_type(node.input[2]) if len(node.input) > 2 and node.input[2] else int(declared)
        return self.element_type(node.input[0]) if node.op_type in PASSING_OPS and node.input else None

    def _quantizer(self, node: onnx.NodeProto) -> Quantizer:
        kind, values, maker = QUANTIZER_OPS[node.op_type], attributes(node), self.maker(node.input[0])
        has_zero = len(node.input) > 2 and bool(node.input[2])
        quantized = node.output[0] if kind == "quantize" else node.input[0]
        element = self.element_type(quantized) or (self.element_type(node.input[2]) if has_zero else None)
        return Quantizer(
            node,
            kind,
            self.value(node.input[1]),
            self.value(node.input[2]) if has_zero else None,
            has_zero,
            None if kind == "quant" or element is None else TYPES.get(element, "other"),
            int(values.get("axis", 1)),
            int(values.get("block_size", 0)),
            self.is_constant(node.input[0]),
            maker is not None and maker.op_type == DYNAMIC_QUANTIZER,
        )

    def _layer(self, node: onnx.NodeProto) -> LayerView:
        activation, weight, *biases = (self.quantizer_of(name) for name in node.input if name)
        maker, direct, constant = self.maker(node.input[1]), weight is not None, self.is_constant(node.input[1])
        moved = maker is not None and maker.op_type in ("Reshape", "Transpose")
        source = maker.input[0] if maker is not None and moved else node.input[1]
        weight = weight or self.quantizer_of(source)
        integer = folded(source, self.maker, lambda name: self.initializer(name) is not None)
        inner = integer is not None and self.is_constant(integer.codes)
        return LayerView(node, activation, weight, direct, constant, inner, next(iter(biases), None), biases == [None])


def views_of(graph: onnx.GraphProto, outer: View | None = None) -> Iterator[View]:
    """The graph and every graph inside its nodes."""
    view = View(graph, outer)
    yield view
    for node in graph.node:
        for inner in bodies(node):
            yield from views_of(inner, view)
