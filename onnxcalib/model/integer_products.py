"""Products of integers whose left operand is quantized at run time: how readers of files know that form."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import onnx

from onnxcalib.model.graph import GraphIndex, attributes, fresh_name
from onnxcalib.model.walk import refill

DYNAMIC_QUANTIZER = "DynamicQuantizeLinear"
LAYER_OPS = {"MatMulInteger": "MatMul", "ConvInteger": "Conv"}
GEMM_BIAS = "_plus_bias"  # how the name of the Add ends that holds the bias of a Gemm
RENAMED = "_quant"  # what onnxruntime's quantize_dynamic adds to the names of layers


@dataclass(frozen=True)
class _Product:
    """A product of integers with what makes a float of it."""

    node: onnx.NodeProto
    cast: onnx.NodeProto
    scaled: onnx.NodeProto  # the Mul that gives the float product
    unit: onnx.NodeProto  # the Mul of both scales
    read: onnx.NodeProto  # the DynamicQuantizeLinear
    weight_scale: str


def as_float_layers(graph: onnx.GraphProto, ops: Collection[str] = tuple(LAYER_OPS)) -> None:
    """Writes each as DequantizeLinear nodes and the layer that it was: the one form that readers of files know."""
    index = GraphIndex(graph)
    nodes_of = [node for node in graph.node if node.op_type in ops and not node.domain]
    found = [product for node in nodes_of if (product := _product(index, node)) is not None]
    used, dequantized = set(index.names), dict[str, str]()
    made: dict[str, list[onnx.NodeProto]] = {}  # by the first output of the node that they stand for
    gone = {each.output[0] for it in found for each in (it.node, it.cast, it.unit)}

    def new(stem: str) -> str:
        name = fresh_name(stem, used)
        used.add(name)
        return name

    for it in found:
        nodes: list[onnx.NodeProto] = []
        if it.read.output[0] not in dequantized:
            dequantized[it.read.output[0]] = new(f"{it.read.output[0]}_dequantized")
            nodes.append(_dequantizer(list(it.read.output), dequantized[it.read.output[0]]))
        weight = new(f"{it.node.input[1]}_dequantized")
        stored = [it.node.input[1], it.weight_scale, *it.node.input[3:4]]
        axis = 0 if it.node.op_type == "ConvInteger" else 1
        nodes.append(_dequantizer(stored, weight, axis=axis if _has_axis(index, it.weight_scale) else None))
        end = _gemm_bias(index, it)
        inputs, op = [dequantized[it.read.output[0]], weight], LAYER_OPS[it.node.op_type]
        if end is not it.scaled:
            inputs, op = [*inputs, end.input[1]], "Gemm"
            gone.add(it.scaled.output[0])
        name = it.node.name.removesuffix(RENAMED)
        nodes.append(onnx.helper.make_node(op, inputs, end.output, name, **attributes(it.node)))
        made[end.output[0]] = nodes
    kept: list[onnx.NodeProto] = []
    for node in graph.node:
        kept += made[node.output[0]] if node.output[0] in made else [] if node.output[0] in gone else [node]
    refill(graph.node, kept)


def _product(index: GraphIndex, node: onnx.NodeProto) -> _Product | None:
    """The float product that is made of one of integers; None where anything is otherwise."""
    if len(node.input) < 3:
        return None
    read, cast = index.producers.get(node.input[0]), index.only_reader(node.output[0])
    scaled = None if cast is None or cast.op_type != "Cast" else index.only_reader(cast.output[0])
    if read is None or read.op_type != DYNAMIC_QUANTIZER or cast is None or scaled is None or scaled.op_type != "Mul":
        return None
    makers = (index.producers.get(name) for name in scaled.input)
    unit = next((made for made in makers if made is not None and made is not cast), None)
    if unit is None or unit.op_type != "Mul" or read.output[1] not in unit.input:
        return None
    scales = [name for name in unit.input if name != read.output[1] and name in index.initializers]
    return _Product(node, cast, scaled, unit, read, scales[0]) if scales else None


def _gemm_bias(index: GraphIndex, product: _Product) -> onnx.NodeProto:
    """The node that makes the result of the layer: the Add of a Gemm's bias, or the product itself."""
    reader = index.only_reader(product.scaled.output[0])
    own = reader is not None and reader.op_type == "Add" and reader.name == product.node.name + GEMM_BIAS
    return reader if reader is not None and own else product.scaled


def _has_axis(index: GraphIndex, name: str) -> bool:
    """Whether there is one scale a channel; a scale of shape [1] has no axis either."""
    shape = index.initializers[name].dims
    return len(shape) > 0 and shape != [1]


def _dequantizer(inputs: list[str], output: str, axis: int | None = None) -> onnx.NodeProto:
    return onnx.helper.make_node("DequantizeLinear", inputs, [output], output, axis=axis)
