"""The layer list: what can be quantized, with all that later stages ask of a layer, and why the rest stays float."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx

from onnxcalib.errors import ModelError, RecipeError, near
from onnxcalib.model.attention import find_attention
from onnxcalib.model.float_nodes import LAYER_OPS, FloatNode, other_float_nodes
from onnxcalib.model.fold import BatchNorm, channel_values
from onnxcalib.model.graph import GraphIndex, attributes
from onnxcalib.model.patterns import Pattern, find_patterns
from onnxcalib.model.prepare import Model
from onnxcalib.model.shapes import infer_shapes
from onnxcalib.plan import StoredConstant

ACTIVATION_OPS = (
    "Relu", "Clip", "LeakyRelu", "PRelu", "Sigmoid", "HardSigmoid", "HardSwish", "Tanh", "Elu", "Gelu",
    "Softplus", "Mish",
)  # fmt: skip


Shape = tuple[int | None, ...]
Shapes = dict[str, Shape]


@dataclass(frozen=True)
class Layer:
    """A Conv, ConvTranspose, Gemm or MatMul with a constant weight."""

    name: str
    op: str
    input: str  # the tensor that it reads
    output: str  # the tensor that its node makes
    weight: str
    bias: str | None
    bias_node: str | None  # the Add that holds the bias of a MatMul
    summed: str  # the tensor after the bias
    activation: str | None  # op of the activation that directly follows
    activated: str  # the tensor after bias and activation
    batch_norm: BatchNorm | None
    weight_shape: tuple[int, ...]
    channel_axis: int  # of the weight: output channels
    groups: int
    transposed: bool  # a Gemm that keeps its weight as [outputs, inputs]
    parameters: int
    macs: int | None  # a sample; None where the size of the output is unknown

    @property
    def channels(self) -> int:
        """How many output channels the layer has."""
        return self.weight_shape[self.channel_axis] * (self.groups if self.op == "ConvTranspose" else 1)

    @property
    def per_channel(self) -> bool:
        """Whether one scale an output channel is possible: a grouped ConvTranspose has no axis for that."""
        return not (self.op == "ConvTranspose" and self.groups > 1)

    @property
    def has_sums(self) -> bool:
        """Whether its weight is a matrix, one axis of which is summed over: blocks of weights lie along that."""
        return self.op in ("Gemm", "MatMul")

    @property
    def takes_bias(self) -> bool:
        """Whether there is a place for a bias: a MatMul without one has none."""
        return self.op != "MatMul" or self.bias is not None

    @property
    def is_depthwise(self) -> bool:
        """Whether every output channel reads one input channel."""
        return self.op == "Conv" and self.groups > 1 and self.weight_shape[1] == 1


@dataclass(frozen=True)
class Product:
    """A product of attention: both operands are computed, and it has no weight."""

    name: str
    op: str
    inputs: tuple[str, str]
    output: str
    role: str  # "scores": queries by keys; "values": the shares of a Softmax by values
    macs: int | None = None  # a sample; None where a size is unknown


@dataclass(frozen=True)
class LayerList:
    """The quantizable layers in the order of the graph, and the nodes that stay float."""

    layers: tuple[Layer, ...]
    float_nodes: tuple[FloatNode, ...]
    products: tuple[Product, ...] = ()  # of attention
    patterns: tuple[Pattern, ...] = ()  # norms, activations and rotary positions, however they are spelled
    constants: tuple[StoredConstant, ...] = ()  # beside the layers' own: what can be stored as integers

    def __getitem__(self, name: str) -> Layer:
        return next(layer for layer in self.layers if layer.name == name)


def find_layers(model: Model) -> LayerList:
    """Requires a prepared model; ensures finite weights."""
    graph = model.proto.graph
    index, shapes = GraphIndex(graph), infer_shapes(model.proto)
    layers, floats = [], []
    products = _products(graph, shapes)
    for node in graph.node:
        if node.name in products:
            continue
        if node.op_type in LAYER_OPS and not node.domain:
            reason = why_float(index, node)
            if reason is None:
                layers.append(_layer(model, index, shapes, node))
            else:
                floats.append(FloatNode(node.name, node.op_type, reason))
        else:
            floats.extend(other_float_nodes(index, node))
    for layer in layers:
        _check_finite(index, layer, model.source)
    return LayerList(tuple(layers), tuple(floats), tuple(products.values()), find_patterns(graph))


def _products(graph: onnx.GraphProto, shapes: Shapes) -> dict[str, Product]:
    """The products of attention, by name: of MatMuls alone, for which runtimes have integer kernels."""
    found = find_attention(graph)
    roles = {name: "scores" for each in found for name in each.scores}
    roles |= {name: "values" for each in found for name in each.values}
    return {
        node.name: Product(
            node.name, node.op_type, (node.input[0], node.input[1]), node.output[0], roles[node.name],
            _product_macs(shapes.get(node.input[0]), shapes.get(node.output[0])),
        )
        for node in graph.node
        if node.name in roles and node.op_type == "MatMul"
    }  # fmt: skip


def _product_macs(left: Shape | None, result: Shape | None) -> int | None:
    """Each place of the result is a sum over the last axis of the left operand."""
    sizes = [*(result or (None,)), *(left or (None,))[-1:]]
    return None if None in sizes else math.prod(size for size in sizes if size is not None)


def why_float(index: GraphIndex, node: onnx.NodeProto) -> str | None:
    """Why a layer op cannot be quantized; None if it can."""
    weight = index.initializers.get(node.input[1])
    if weight is None:
        if node.op_type == "MatMul" and node.input[0] in index.initializers:
            return "its constant is the left operand"
        return "both operands are computed" if node.op_type in ("MatMul", "Gemm") else "its weight is computed"
    if weight.data_type != onnx.TensorProto.FLOAT:
        return f"its weight is {onnx.TensorProto.DataType.Name(weight.data_type).lower()}, not float32"
    if node.input[0] in index.initializers:
        return "both operands are constant"
    if node.op_type == "MatMul" and len(weight.dims) != 2:
        return f"its weight has {len(weight.dims)} axes, not 2"
    if math.prod(weight.dims) == 0:
        return "its weight is empty"
    values = attributes(node)
    if node.op_type == "Gemm":
        if values.get("transA", 0):
            return "its input is transposed (transA)"
        if values.get("alpha", 1.0) != 1.0 or values.get("beta", 1.0) != 1.0:
            return "alpha or beta is not 1 and its bias is computed"
    return _why_float_bias(index, node)


def _why_float_bias(index: GraphIndex, node: onnx.NodeProto) -> str | None:
    if len(node.input) < 3 or not node.input[2]:
        return None
    bias = index.constant(node.input[2])
    if bias is None:
        return "its bias is computed"
    channels = index.initializers[node.input[1]].dims[0 if attributes(node).get("transB", 0) else 1]
    if node.op_type == "Gemm" and channel_values(bias, (1, channels)) is None:
        return f"its bias has shape {list(bias.shape)}, not one value a channel"
    return None


def _layer(model: Model, index: GraphIndex, shapes: Shapes, node: onnx.NodeProto) -> Layer:
    values = attributes(node)
    weight = index.initializers[node.input[1]]
    bias = node.input[2] if len(node.input) > 2 and node.input[2] else None
    bias_node = _bias_add(index, node) if node.op_type == "MatMul" else None
    result = node.output[0]
    if bias_node is not None:
        bias = next(name for name in bias_node.input if name in index.initializers)
        result = bias_node.output[0]
    follower = index.only_reader(result)
    activation = follower if follower is not None and _is_activation(index, follower, result) else None
    transposed = node.op_type == "Gemm" and bool(values.get("transB", 0))
    size = math.prod(weight.dims) + (math.prod(index.initializers[bias].dims) if bias else 0)
    return Layer(
        name=node.name, op=node.op_type, input=node.input[0], output=node.output[0], weight=weight.name, bias=bias,
        bias_node=bias_node.name if bias_node is not None else None,
        summed=result,
        activation=activation.op_type if activation is not None else None,
        activated=activation.output[0] if activation is not None else result,
        batch_norm=model.batch_norms.get(node.name), weight_shape=tuple(weight.dims),
        channel_axis=0 if node.op_type == "Conv" or transposed else 1,
        groups=values.get("group", 1), transposed=transposed, parameters=size,
        macs=_macs(node, tuple(weight.dims), shapes),
    )  # fmt: skip


def _is_activation(index: GraphIndex, node: onnx.NodeProto, tensor: str) -> bool:
    """An activation of the tensor alone; bounds and slopes are constants."""
    others = [name for name in node.input[1:] if name]
    return (
        node.op_type in ACTIVATION_OPS
        and node.input[0] == tensor
        and all(name in index.initializers for name in others)
    )


def _bias_add(index: GraphIndex, node: onnx.NodeProto) -> onnx.NodeProto | None:
    """The Add of a vector as long as the MatMul has columns."""
    add = index.only_reader(node.output[0])
    if add is None or add.op_type != "Add":
        return None
    columns = index.initializers[node.input[1]].dims[1]
    vectors = [index.initializers[name] for name in add.input if name in index.initializers]
    return add if len(vectors) == 1 and list(vectors[0].dims) == [columns] else None


def _macs(node: onnx.NodeProto, weight: tuple[int, ...], shapes: Shapes) -> int | None:
    if node.op_type == "Gemm":
        return math.prod(weight)
    # Each weight of a Conv works once a place of the output, of a ConvTranspose once a place of the input.
    shape = shapes.get(node.input[0] if node.op_type == "ConvTranspose" else node.output[0])
    places = None if shape is None else shape[1:-1] if node.op_type == "MatMul" else shape[2:]
    if places is None or any(size is None for size in places):
        return None
    return math.prod(weight) * math.prod(size for size in places if size is not None)


def _check_finite(index: GraphIndex, layer: Layer, source: str) -> None:
    for name in (layer.weight, layer.bias):
        value = index.constant(name) if name else None
        if value is not None and not np.isfinite(value).all():
            raise ModelError(
                f"{source}: '{name}' of layer '{layer.name}' holds NaN or infinite values.",
                "Export the model again from a sound checkpoint.",
            )


def weights_of(model: Model, names: Sequence[str]) -> dict[str, npt.NDArray[Any]]:
    """The values of initialisers."""
    index = GraphIndex(model.proto.graph)
    return {name: value for name in names if (value := index.constant(name)) is not None}


def takes(include: Sequence[str], exclude: Sequence[str], name: str) -> bool:
    """Whether a node's name matches include, where there is any, and not exclude."""
    included = not include or any(fnmatch.fnmatchcase(name, pattern) for pattern in include)
    return included and not any(fnmatch.fnmatchcase(name, pattern) for pattern in exclude)


def choose(
    layers: LayerList, include: Sequence[str], exclude: Sequence[str], others: Collection[str] = ()
) -> tuple[Layer, ...]:
    """The layers whose names match include and not exclude; a pattern that matches nothing is an error.

    Others are nodes beside layers that have something to store.
    """
    names = [*(layer.name for layer in layers.layers), *others]
    matched: dict[str, set[str]] = {"include": set(), "exclude": set()}
    for option, pattern in (*(("include", it) for it in include), *(("exclude", it) for it in exclude)):
        found = {name for name in names if fnmatch.fnmatchcase(name, pattern)}
        if not found:
            raise RecipeError(f"`{option}={pattern!r}` matches no layer.", near(pattern, names))
        matched[option] |= found
    wanted = (matched["include"] if include else set(names)) - matched["exclude"]
    chosen = tuple(layer for layer in layers.layers if layer.name in wanted)
    if not chosen:
        raise RecipeError("every layer is excluded.", "Narrow `exclude` or widen `include`.")
    return chosen
