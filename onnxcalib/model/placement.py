"""Where QDQ nodes go: decided from the graph and the target, before any range is known."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import onnx

from onnxcalib.model.graph import GraphIndex, activation_bounds, attributes
from onnxcalib.model.io import opset_of
from onnxcalib.model.layers import Layer, Product
from onnxcalib.model.prepare import Model
from onnxcalib.numerics.quant_params import UNBOUNDED, Bounds
from onnxcalib.targets.target import Placement, Target

# Ops with an integer kernel once every input and the output are quantized.
INTEGER_OPS = {"Add", "Mul", "Concat", "AveragePool", "GlobalAveragePool", "Sigmoid", "LeakyRelu"}
# Ops that only move values: the output keeps the grid of the input, and the QDQ pair around them vanishes.
SAME_QPARAMS_OPS = {
    "MaxPool", "Reshape", "Flatten", "Transpose", "Squeeze", "Unsqueeze", "Slice", "Gather", "DepthToSpace", "Split",
}  # fmt: skip
# What a runtime may move a quantizer across, or take out of the graph first.
CROSSED_OPS = SAME_QPARAMS_OPS | {"Identity", "Dropout", "Expand", "Cast"}
OUTPUT_TYPE_OPSET = 21  # the first in which a quantizer names its type
# Activations that a quantizer after them makes redundant.
ABSORBED_OPS = {"Relu", "Clip"}

# Layers whose results are quantized whoever reads them.
RESULT_OPS = {Placement.FUSED: ("Conv",), Placement.EVERYWHERE: ("Conv", "ConvTranspose", "Gemm")}


@dataclass(frozen=True)
class QuantizedTensor:
    """A tensor with QDQ nodes."""

    name: str
    layers: tuple[str, ...]  # the layers that read it: they share its activation bits
    shared: bool  # non-layer readers take the quantized value too, at eight bits
    same_qparams_as: str | None = None  # the tensor whose grid it keeps
    is_output: bool = False  # a model output: nobody knows what clipping its outliers would cost
    bounds: Bounds = UNBOUNDED  # of the Relu or Clip that makes it: no code may lie beyond


@dataclass(frozen=True)
class InsertionPoints:
    """The quantized tensors in graph order, and those that layers read on a grid that is found at run time."""

    tensors: Mapping[str, QuantizedTensor]
    dynamic: tuple[str, ...] = ()

    def group(self, layer: Layer) -> QuantizedTensor:
        """The tensor that a layer reads."""
        return self.tensors[layer.input]


def find_insertion_points(
    model: Model, layers: Sequence[Layer], target: Target, products: Sequence[Product] = ()
) -> InsertionPoints:
    """Requires a prepared model, its chosen layers and products; ensures that all of their inputs are quantized.

    Where activations stay float, nothing is.
    """
    if target.float_activations:
        return InsertionPoints({})
    index = GraphIndex(model.proto.graph)
    readers: dict[str, list[str]] = {}
    for layer in layers:
        readers.setdefault(layer.input, []).append(layer.name)
    shared: dict[str, str | None] = {}
    wanted: set[str] = set()
    if target.placement in RESULT_OPS:
        shared, wanted = _integer_islands(index, layers, RESULT_OPS[target.placement])
    elif target.placement is Placement.RESIDUALS:
        wanted = _shortcuts(index, layers)
    wanted.update(name for product in products for name in product.inputs if name not in shared)
    order = [*(value.name for value in model.proto.graph.input), *index.producers]
    names = {layer.name for layer in layers}
    everywhere = {name for name in order if _is_shared(index, name, shared, wanted, names)}
    copies = _moved(index, everywhere, shared)
    if not (target.signed_activations and opset_of(model.proto) >= OUTPUT_TYPE_OPSET):
        captured = {name for node in index.graph.node for name in GraphIndex.captures(node)}
        copies = {name: source for name, source in copies.items() if name in captured}
    shared = {**shared, **copies}
    chosen = [name for name in order if name in readers or name in shared or name in wanted]
    return InsertionPoints(
        {
            name: QuantizedTensor(
                name,
                tuple(readers.get(name, ())),
                _is_shared(index, name, shared, wanted, names),
                shared.get(name),
                name in index.outputs,
                activation_bounds(index.producers.get(shared.get(name) or name), index.constant) or UNBOUNDED,
            )
            for name in chosen
        }
    )


def _is_shared(
    index: GraphIndex, name: str, shared: Mapping[str, str | None], wanted: set[str], layers: Collection[str]
) -> bool:
    """A tensor that only layers read needs no second, wider grid for others."""
    if name not in shared and name not in wanted:
        return False
    others = [node for node in index.readers.get(name, []) if node.name not in layers]
    return bool(others) or name in index.outputs or shared.get(name) is not None


def _moved(index: GraphIndex, quantized: set[str], shared: Mapping[str, str | None]) -> dict[str, str]:
    """Tensors that only moving ops part from a quantized one, and the one that they share the grid of.

    onnxruntime moves quantizers there by itself, and fails: it aborts where a subgraph reads such a tensor, and gives
    signed quantizers a type that it later contradicts. Where one is there already, it does not.
    """
    moved: dict[str, str] = {}
    for node in index.graph.node:
        source = next(iter(node.input), "")
        if _is_crossed(node) and (source in moved or source in quantized):
            made = node.output if node.op_type == "Split" else node.output[:1]  # no masks, no indices
            moved |= dict.fromkeys(made, moved.get(source) or shared.get(source) or source)
    return moved


def _is_crossed(node: onnx.NodeProto) -> bool:
    """Whether a runtime may move a quantizer across a node; a Cast to another type is no place for one."""
    return node.op_type in CROSSED_OPS and attributes(node).get("to", onnx.TensorProto.FLOAT) == onnx.TensorProto.FLOAT


def _integer_islands(
    index: GraphIndex, layers: Sequence[Layer], result_ops: Collection[str]
) -> tuple[dict[str, str | None], set[str]]:
    """Tensors made by integer ops (with the tensor whose grid they keep), and others that integer ops read."""
    by_node = {layer.name: layer for layer in layers}
    useful = _before_layers(index, layers)
    made: dict[str, str | None] = {}
    wanted: set[str] = set()
    for node in index.graph.node:
        layer = by_node.get(node.name)
        if layer is not None:
            if layer.op in result_ops or (layer.op == "Gemm" and _feeds_integer_op(index, layer, useful)):
                made[_after_absorbed(index, node)] = None
        elif node.op_type in INTEGER_OPS and _joins(index, node, made, useful):
            made[_after_absorbed(index, node)] = None
            wanted.update(name for name in node.input if name and name not in made)
        elif node.op_type in SAME_QPARAMS_OPS and node.input[0] in made:
            source = made[node.input[0]] or node.input[0]
            made |= {name: source for name in node.output if name in useful}
    return made, wanted


def _shortcuts(index: GraphIndex, layers: Sequence[Layer]) -> set[str]:
    """What Adds read beside the last layer before them, which takes the Add in."""
    find_insertion_points = {layer.name: number for number, layer in enumerate(layers)}
    made = {layer.output: find_insertion_points[layer.name] for layer in layers}
    shortcuts: set[str] = set()
    for node in index.graph.node:
        if node.op_type != "Add" or any(name in index.initializers for name in node.input):
            continue
        fused = [name for name in node.input if name in made and index.only_reader(name) is node]
        if fused:
            last = max(fused, key=made.__getitem__)
            shortcuts.update(name for name in node.input if name != last)
    return shortcuts


def _before_layers(index: GraphIndex, layers: Sequence[Layer]) -> set[str]:
    """Tensors that some layer later depends on; past the last layers, integer ops would only cost accuracy."""
    names = {layer.name for layer in layers}
    useful: set[str] = set()
    for node in reversed(index.graph.node):
        if node.name in names or any(name in useful for name in node.output):
            useful.update(name for name in node.input if name)
    return useful


def _joins(index: GraphIndex, node: onnx.NodeProto, made: Mapping[str, str | None], useful: set[str]) -> bool:
    inputs = [name for name in node.input if name]
    return (
        any(name in made for name in inputs)
        and not any(name in index.initializers for name in inputs)
        and _after_absorbed(index, node) in useful
    )


def _feeds_integer_op(index: GraphIndex, layer: Layer, useful: set[str]) -> bool:
    result = layer.activated if layer.activation in ABSORBED_OPS else layer.output
    return result in useful and any(
        reader.op_type in INTEGER_OPS and not any(name in index.initializers for name in reader.input)
        for reader in index.readers.get(result, [])
    )


def _after_absorbed(index: GraphIndex, node: onnx.NodeProto) -> str:
    """The tensor to quantize after a node: past a Relu or Clip, which the quantizer absorbs."""
    follower = index.only_reader(node.output[0])
    if follower is None or follower.op_type not in ABSORBED_OPS or follower.input[0] != node.output[0]:
        return str(node.output[0])
    return str(follower.output[0])
