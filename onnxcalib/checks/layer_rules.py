"""Rules about layers: weights, biases, and what stands around them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

import numpy as np
import onnx

from onnxcalib.checks.rule import Hits, Scene, Teller, of_type, rule, rules_about
from onnxcalib.checks.view import Quantizer, View, label
from onnxcalib.model.graph import attributes
from onnxcalib.model.placement import ABSORBED_OPS, RESULT_OPS

WEIGHT_TYPES = {"s8": "s8", "u8": "u8", "s4": "s4", "u4": "u4"}
INT4 = (onnx.TensorProto.INT4, onnx.TensorProto.UINT4)
JOINING_OPS = ("Add", "Mul", "Concat")


def weights(scene: Scene, *, alone: bool | None = None) -> Iterator[tuple[onnx.NodeProto, Quantizer]]:
    """Layers with quantized stored weights; alone or not alone, all of them where it does not matter."""
    for layer in scene.view.layers:
        weight = layer.weight
        if weight is not None and weight.constant and alone in (None, scene.takes_alone(weight)):
            yield layer.node, weight


def biases(scene: Scene) -> Iterator[tuple[onnx.NodeProto, Quantizer]]:
    """Layers with a bias of int32."""
    return ((it.node, it.bias) for it in scene.view.layers if it.bias is not None and it.bias.type == "s32")


WEIGHT_RULES: Mapping[str, Teller] = {
    "weight-zero-point": lambda it: "" if it.zero_is_zero else "the zero point of its weight is not 0",
    "per-channel-weight": lambda it: f"{it.channels} scales" if it.channels > 1 else "",
}
ALONE_RULES: Mapping[str, Teller] = {
    "unblocked-weight": lambda it: (
        f"its s4 weight has {it.channels} scales and no blocks" if it.type == "s4" and not it.block else ""
    ),
}
TYPE_RULES = {f"{kind}-weight": of_type(kind, "its weight", WEIGHT_TYPES) for kind in ("u8", "s4", "u4", "other")}
BIAS_RULES: Mapping[str, Teller] = {
    "integer-bias": lambda _: "its bias is int32",
    "bias-zero-point": lambda it: "" if it.zero_is_zero else "the zero point of its bias is not 0",
}
rules_about(weights, WEIGHT_RULES)
rules_about(partial(weights, alone=True), ALONE_RULES)
rules_about(partial(weights, alone=False), TYPE_RULES)
rules_about(biases, BIAS_RULES)


@rule("float-layer")
def _float_layer(scene: Scene) -> Hits:
    for layer in scene.view.layers:
        if layer.weight is not None and scene.takes_alone(layer.weight):
            continue
        if layer.weight_is_folded and scene.view.weight_only:
            continue
        missing = [word for word, found in (("input", layer.activation), ("weight", layer.weight)) if found is None]
        if not layer.weight_is_constant:
            continue
        if missing:
            yield layer.node, f"its {' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not quantized"
        elif not layer.weight_is_direct and not scene.target.float_compute:
            yield layer.node, "another op stands between it and its weight's DequantizeLinear"


@rule("computed-product")
def _computed_product(scene: Scene) -> Hits:
    for layer in scene.view.layers:
        if not layer.weight_is_constant and not layer.quantized:
            yield layer.node, "its operands are computed and not both quantized"


@rule("weight-axis")
def _weight_axis(scene: Scene) -> Hits:
    direct = {layer.node.output[0] for layer in scene.view.layers if layer.weight_is_direct}
    for node, weight in weights(scene):
        tensor = scene.view.initializer(weight.node.input[0])
        rank = len(tensor.dims) if tensor is not None else None
        if weight.channels == 1 or weight.kind == "quant" or weight.block or node.output[0] not in direct:
            continue
        wanted = _output_axis(node, rank)
        found = weight.axis + rank if weight.axis < 0 and rank is not None else weight.axis
        if wanted is not None and found != wanted:
            yield node, f"its weight is scaled along axis {weight.axis}, and its output channels are axis {wanted}"


@rule("missing-zero-point")
def _missing_zero_point(scene: Scene) -> Hits:
    dynamic = {it.node.output[0] for it in scene.view.layers if it.activation is not None and it.activation.dynamic}
    for node, weight in weights(scene, alone=False):
        if not weight.has_zero and node.op_type in ("Gemm", "MatMul") and node.output[0] not in dynamic:
            yield node, "its weight is dequantized without a zero point"


@rule("packed-weight")
def _packed_weight(scene: Scene) -> Hits:
    computed = _computed_weights(scene)
    return ((node, "standard ops compute the quantized values of its weight") for node, cast in computed if not cast)


@rule("int4-cast")
def _int4_cast(scene: Scene) -> Hits:
    return ((node, "its weight is cast from int4") for node, cast in _computed_weights(scene) if cast)


def _computed_weights(scene: Scene) -> Iterator[tuple[onnx.NodeProto, bool]]:
    """Layers whose quantized weights are computed from stored values, and whether a Cast of int4 alone does it."""
    for node, weight in weights(scene):
        maker = scene.view.maker(weight.node.input[0])
        if maker is not None and maker.op_type != "QuantizeLinear":
            yield node, maker.op_type == "Cast" and scene.view.element_type(maker.input[0]) in INT4


@rule("float-bias")
def _float_bias(scene: Scene) -> Hits:
    for layer in scene.view.layers:
        if layer.quantized and layer.float_bias and layer.node.op_type in scene.target.bias_ops:
            yield layer.node, "its bias is float"


@rule("bias-scale")
def _bias_scale(scene: Scene) -> Hits:
    for layer in scene.view.layers:
        bias, weight, read = layer.bias, layer.weight, layer.activation
        if bias is None or bias.type != "s32" or weight is None or read is None:
            continue
        if bias.scale is None or weight.scale is None or read.scale is None:
            continue
        wanted, found = weight.scale.reshape(-1) * read.scale.reshape(-1)[0], bias.scale.reshape(-1)
        fits = 1 in (wanted.size, found.size) or wanted.size == found.size
        if not fits or not np.allclose(found, wanted, rtol=1e-4, atol=0):
            yield layer.node, "the scale of its bias is not that of its input times that of its weight"


@rule("float-output")
def _float_output(scene: Scene) -> Hits:
    ops = RESULT_OPS.get(scene.target.placement, ("Conv",))
    for layer in scene.view.layers:
        if layer.node.op_type not in ops or not layer.quantized:
            continue
        reader = _float_reader(scene.view, layer.node.output[0])
        if reader is not None:
            yield layer.node, f"{reader} reads its result before any quantizer"


@rule("mixed-inputs")
def _mixed_inputs(scene: Scene) -> Hits:
    for node, quantized, floats in _joins(scene.view):
        if quantized and floats:
            yield node, f"'{floats[0]}' is not quantized, '{quantized[0]}' is"


@rule("float-shortcut")
def _float_shortcut(scene: Scene) -> Hits:
    made = {layer.node.output[0] for layer in scene.view.layers if layer.quantized}
    for node, _, floats in _joins(scene.view):
        direct = [name for name in floats if name in made and scene.view.index.only_reader(name) is node]
        others = [name for name in floats if name not in direct[-1:]]
        if node.op_type == "Add" and direct and others:
            yield node, f"'{others[0]}' is not quantized"


@rule("weight-only-conv")
def _weight_only_conv(scene: Scene) -> Hits:
    for node, weight in weights(scene, alone=True):
        if node.op_type in ("Conv", "ConvTranspose"):
            yield node, f"its weight is {weight.type}, its input float"


def _output_axis(node: onnx.NodeProto, rank: int | None) -> int | None:
    if node.op_type == "MatMul":
        return None if rank is None else rank - 1
    transposed = node.op_type == "Gemm" and attributes(node).get("transB", 0)
    return 0 if node.op_type == "Conv" or transposed else 1


def _float_reader(view: View, name: str) -> str | None:
    """Who reads a tensor as a float, past Relu and Clip; None if quantizers alone do."""
    if name in view.index.outputs:
        return "the outside"
    for reader in view.index.readers.get(name, []):
        if reader.op_type in ("QuantizeLinear", "Quant"):
            continue
        if reader.op_type not in ABSORBED_OPS:
            return f"{reader.op_type} '{label(reader)}'"
        after = _float_reader(view, reader.output[0])
        if after is not None:
            return after
    return None


def _joins(view: View) -> Iterator[tuple[onnx.NodeProto, list[str], list[str]]]:
    """Ops that join tensors, with their quantized and their float computed inputs."""
    for node in view.graph.node:
        names = [name for name in node.input if name and not view.is_constant(name)]
        if node.op_type in JOINING_OPS and len(names) > 1:
            quantized = [name for name in names if view.quantizer_of(name) is not None]
            yield node, quantized, [name for name in names if name not in quantized]
