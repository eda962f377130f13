"""Good files with one violation each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from models import conv_net, feed_for, transformer_block
from onnxcalib import Precision, RangeMethod, Recipe, quantize
from onnxcalib.model.folded import as_dequantizers


@cache
def _good(target: str, bits: str = "w8a8") -> bytes:
    model = conv_net()
    recipe = Recipe(bits=(Precision.parse(bits),), target=target, ranges=RangeMethod.MINMAX)
    return quantize(model, feed_for(model), recipe).model.SerializeToString()


def good(target: str, bits: str = "w8a8") -> onnx.ModelProto:
    """Our own file for a target."""
    return onnx.load_from_string(_good(target, bits))


class File:
    """A file to break."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self.model, self.graph = model, model.graph

    def node(self, name: str) -> onnx.NodeProto:
        return next(node for node in self.graph.node if node.name == name)

    def value(self, name: str) -> np.ndarray:
        return next(numpy_helper.to_array(tensor) for tensor in self.graph.initializer if tensor.name == name)

    def store(self, value: np.ndarray, name: str = "planted_value") -> str:
        self.graph.initializer.append(numpy_helper.from_array(np.asarray(value), name))
        return name

    def store_as(self, kind: int, name: str, like: str) -> str:
        """Codes of a type that NumPy does not have, or not here."""
        quantized = self.value(like)
        values = np.clip(quantized, 0, 1).reshape(-1)
        self.graph.initializer.append(helper.make_tensor(name, kind, quantized.shape, values))
        return name

    def add(self, op: str, inputs: list[str], output: str, *, before: str = "", **attrs: object) -> onnx.NodeProto:
        node = helper.make_node(op, inputs, [output], name=output, **attrs)
        places = [place for place, other in enumerate(self.graph.node) if other.name == before]
        self.graph.node.insert(places[0] if places else len(self.graph.node), node)
        return node

    def scale(self, quantizer: str, value: np.ndarray) -> str:
        self.node(quantizer).input[1] = self.store(np.asarray(value, np.float32))
        return quantizer

    def pair(self, tensor: str) -> list[onnx.NodeProto]:
        return [self.node(f"{tensor}_quantized"), self.node(f"{tensor}_dequantized")]

    def codes_of(self, layer: str, kind: int) -> str:
        """Another type for a layer's weight, zero point and all."""
        node = self.node(f"{layer}_weight")
        node.input[0] = self.store_as(kind, "planted_codes", node.input[0])
        node.input[2] = self.store_as(kind, "planted_zero", node.input[2])
        return layer

    def activation_of(self, tensor: str, kind: int) -> str:
        zero = self.store_as(kind, "planted_zero", self.pair(tensor)[0].input[2])
        for node in self.pair(tensor):
            node.input[2] = zero
        return f"{tensor}_quantized"

    def opset(self, version: int) -> str:
        self.model.opset_import[0].version = version
        return ""


def _zero_point_type(file: File) -> str:
    file.node("project_weight").input[2] = file.store(np.zeros(8, np.uint8))
    return "project_weight"


def _zero_point_shape(file: File) -> str:
    file.node("project_weight").input[2] = file.store(np.zeros(3, np.int8))
    return "project_weight"


def _computed_scale(file: File) -> str:
    file.add("ReduceMax", ["x"], "planted", before="r1_quantized", keepdims=0)
    for node in file.pair("r1"):
        node.input[1] = "planted"
    return "r1_quantized"


def _dangling_quantize(file: File) -> str:
    file.add("QuantizeLinear", ["r1", *file.node("r1_quantized").input[1:]], "planted")
    return "planted"


def _dangling_dequantize(file: File) -> str:
    file.add("Cast", ["r1"], "planted", before="r1_dequantized", to=TensorProto.UINT8)
    file.node("r1_dequantized").input[0] = "planted"
    return "r1_dequantized"


def _unread_dequantize(file: File) -> str:
    file.add("DequantizeLinear", list(file.node("r1_dequantized").input), "planted")
    return "planted"


def _pair_mismatch(file: File) -> str:
    return file.scale("r1_dequantized", file.value(file.node("r1_dequantized").input[1]) * 2)


def _ir_too_new(file: File) -> str:
    file.model.ir_version = 10
    return ""


def _foreign_op(file: File) -> str:
    file.node("sum").domain = "my.ops"
    return "sum"


def _weight_axis(file: File) -> str:
    next(each for each in file.node("project_weight").attribute if each.name == "axis").i = 1
    return "project"


def _per_channel_activation(file: File) -> str:
    scale = file.store(np.full(8, 0.1, np.float32))
    zero = file.store(np.zeros(8, file.value(file.node("r1_quantized").input[2]).dtype), "planted_zero")
    for node in file.pair("r1"):
        node.input[1], node.input[2] = scale, zero
    return "r1_quantized"


def _blocked_scales(file: File) -> str:
    node = file.node("fc_weight")
    node.input[1] = file.store(np.full((5, 4), 0.1, np.float32))
    node.input[2] = file.store(np.zeros((5, 4), np.int8), "planted_zero")
    next(each for each in node.attribute if each.name == "axis").i = 1
    node.attribute.append(helper.make_attribute("block_size", 4))
    return "fc_weight"


def _float_input(file: File) -> str:
    file.node("project").input[0] = "r2"
    return "project"


def _float_weight(file: File) -> str:
    file.node("project").input[1] = file.store(np.ones((8, 8, 1, 1), np.float32))
    return "project"


def _weight_behind_an_op(file: File) -> str:
    file.add("Transpose", ["project_weight"], "planted", before="project", perm=[0, 1, 3, 2])
    file.node("project").input[1] = "planted"
    return "project"


def _float_output(file: File) -> str:
    file.add("Sigmoid", ["b3"], "planted", before="b3_quantized")
    file.node("b3_quantized").input[0] = "planted"
    return "project"


def _float_result(file: File) -> str:
    file.node("fc").output[0] = "y"
    file.graph.node.remove(file.node("y_quantized"))
    file.graph.node.remove(file.node("y"))
    return "fc"


def _mixed_inputs(file: File) -> str:
    file.node("sum").input[0] = "r1"
    return "sum"


def _weight_zero_point(file: File) -> str:
    file.node("project_weight").input[2] = file.store(np.arange(8).astype(np.int8))
    return "project"


def _activation_zero_point(file: File) -> str:
    zero = file.store(np.array(3, np.int8))
    for node in file.pair("r1"):
        node.input[2] = zero
    return "r1_quantized"


def _per_channel_weight(file: File) -> str:
    node = file.node("project_weight")
    node.input[1] = file.store(np.full(8, 0.125, np.float32))
    node.input[2] = file.store(np.zeros(8, np.int8), "planted_zero")
    node.attribute.append(helper.make_attribute("axis", 0))
    return "project"


def _missing_zero_point(file: File) -> str:
    del file.node("fc_weight").input[2]
    return "fc"


def _float_bias(file: File) -> str:
    file.node("head").input[2] = file.store(np.ones(16, np.float32))
    return "head"


def _integer_bias(file: File) -> str:
    scale = file.store(np.full(16, 0.125, np.float32), "planted_scale")
    file.add("DequantizeLinear", [file.store(np.ones(16, np.int32)), scale], "planted", before="head", axis=0)
    file.node("head").input[2] = "planted"
    return "head"


def _bias_scale(file: File) -> str:
    file.scale("head_bias", file.value(file.node("head_bias").input[1]) * 1.5)
    return "head"


def _bias_zero_point(file: File) -> str:
    file.node("head_bias").input[2] = file.store(np.full(16, 2, np.int32))
    return "head"


def _clipped_codes(file: File) -> str:
    kind = file.value(file.node("r1_quantized").input[2]).dtype
    bounds = [file.store(np.array(value, kind), f"planted_{value}") for value in (0, 15)]
    file.add("Clip", ["r1_quantized", *bounds], "planted", before="r1_dequantized")
    file.node("r1_dequantized").input[0] = "planted"
    return "planted"


def _clipped_values(file: File) -> str:
    scale = float(file.value(file.node("b3_quantized").input[1]))
    bounds = [file.store(np.array(value * scale, np.float32), f"planted_{value}") for value in (0, 15)]
    file.add("Clip", ["b3", *bounds], "planted", before="b3_quantized")
    file.node("b3_quantized").input[0] = "planted"
    return "planted"


def _beyond_the_cut(most: float) -> Callable[[File], str]:
    def plant(file: File) -> str:
        scale = file.store(np.array(most / 255, np.float32))
        for node in file.pair("r1"):
            node.input[1] = scale
        return "stem"

    return plant


def _packed_weight(file: File) -> str:
    node = file.node("project_weight")
    shape = file.store(np.array([8, 8, 1, 1]), "planted_shape")
    file.add("Reshape", [node.input[0], shape], "planted", before="project_weight")
    node.input[0] = "planted"
    return "project"


def _int4_cast(file: File) -> str:
    node = file.node("project_weight")
    stored = file.store_as(TensorProto.INT4, "planted_codes", node.input[0])
    file.add("Cast", [stored], "planted", before="project_weight", to=TensorProto.INT8)
    node.input[0] = "planted"
    return "project"


def _shared_codes(file: File) -> str:
    file.node("depth_bias").input[0] = file.node("stem_bias").input[0]
    return "depth_bias"


def _free_shape(file: File) -> str:
    file.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "N"
    return ""


def _integer_op(file: File) -> str:
    node = helper.make_node("DynamicQuantizeLinear", ["x"], ["one", "two", "three"], name="planted")
    file.graph.node.append(node)
    return "planted"


def _nothing_quantized(file: File) -> str:
    file.model.CopyFrom(conv_net())
    return ""


def _computed_product(file: File) -> str:
    model = transformer_block()
    recipe = Recipe(target="ort", ranges=RangeMethod.MINMAX, exclude=("scores",))
    file.model.CopyFrom(quantize(model, feed_for(model), recipe).model)
    return "scores"


def _weights_alone(node: str, bits: str = "w4") -> Callable[[File], str]:
    """Our file for onnxruntime with float activations, the node's weight under DequantizeLinear."""

    def plant(file: File) -> str:
        file.model.CopyFrom(good("ort", bits))
        if node != "fc":
            as_dequantizers(file.model.graph, lambda _: True)
        return node

    return plant


@dataclass(frozen=True)
class Broken:
    """One violation in a good file."""

    rule: str
    target: str
    plant: Callable[[File], str]  # gives the name of the node that it breaks
    others: tuple[str, ...] = ()  # rules that the same change breaks as well

    def build(self) -> tuple[onnx.ModelProto, str]:
        """The file, and the node to be named."""
        file = File(good(self.target))
        return file.model, self.plant(file)


ROWS = (
    Broken("scale-not-positive", "ort", lambda file: file.scale("r1_quantized", np.float32(0)), ("pair-mismatch",)),
    Broken("scale-not-positive", "rknn", lambda file: file.scale("stem_weight", np.full(8, np.nan)), ("bias-scale",)),
    Broken("scale-not-positive", "xnnpack", lambda file: file.scale("stem_weight", np.full(8, -1.0)), ("bias-scale",)),
    Broken("scale-not-positive", "qnn", lambda file: file.scale("fc_bias", np.float32(np.inf)), ("bias-scale",)),
    Broken("zero-point-type", "ort", _zero_point_type),
    Broken("zero-point-shape", "tensorrt", _zero_point_shape),
    Broken("scale-length", "ort", lambda file: file.scale("stem_weight", np.ones(5)), ("zero-point-shape",)),
    Broken("computed-scale", "openvino", _computed_scale),
    Broken("dangling-quantize", "ort", _dangling_quantize),
    Broken("dangling-dequantize", "ort", _dangling_dequantize, ("dangling-quantize", "float-output")),
    Broken("dangling-dequantize", "qnn", _unread_dequantize),
    Broken("pair-mismatch", "tensorrt", _pair_mismatch),
    Broken("opset-too-new", "ort-compat", lambda file: file.opset(20)),
    Broken("opset-too-new", "rknn", lambda file: file.opset(21)),
    Broken("opset-too-old", "ort", lambda file: file.opset(12) or "stem_weight"),
    Broken("ir-too-new", "ort-compat", _ir_too_new),
    Broken("foreign-op", "tensorrt", _foreign_op),
    Broken("foreign-op", "vitis", _foreign_op),
    Broken("weight-axis", "tensorrt", _weight_axis),
    Broken("weight-axis", "qnn", _weight_axis),
    Broken("per-channel-activation", "tensorrt", _per_channel_activation),
    Broken("per-channel-activation", "ort", _per_channel_activation),
    Broken("blocked-scales", "ort", _blocked_scales),
    Broken("float-layer", "ort", _float_input, ("dangling-dequantize", "float-output")),
    Broken("float-layer", "vitis", _float_weight, ("dangling-dequantize",)),
    Broken("float-layer", "ort", _weight_behind_an_op),
    Broken("nothing-quantized", "ort", _nothing_quantized, ("float-layer",)),
    Broken("computed-product", "ort", _computed_product),
    Broken("float-output", "ort", _float_output),
    Broken("float-output", "qnn", _float_result),
    Broken("mixed-inputs", "ort", _mixed_inputs, ("float-output",)),
    Broken("mixed-inputs", "qnn", _mixed_inputs, ("float-output",)),
    Broken("float-shortcut", "tensorrt", _mixed_inputs),
    Broken("weight-zero-point", "openvino", _weight_zero_point),
    Broken("weight-zero-point", "ort-compat", _weight_zero_point),
    Broken("activation-zero-point", "tensorrt", _activation_zero_point),
    Broken("activation-zero-point", "vitis", _activation_zero_point),
    Broken("per-channel-weight", "vitis", _per_channel_weight),
    Broken("power-of-two", "vitis", lambda file: file.scale("stem_weight", np.float32(0.3))),
    Broken("missing-zero-point", "ort-compat", _missing_zero_point),
    Broken("float-bias", "ort-compat", _float_bias, ("dangling-dequantize",)),
    Broken("integer-bias", "tensorrt", _integer_bias),
    Broken("bias-scale", "qnn", _bias_scale),
    Broken("bias-zero-point", "xnnpack", _bias_zero_point),
    Broken("clipped-codes", "tensorrt", _clipped_codes),
    Broken("clipped-codes", "rknn", _clipped_codes),
    Broken("clipped-values", "ort", _clipped_values, ("clip-not-absorbed",)),
    Broken("clip-not-absorbed", "ort", _beyond_the_cut(6.02)),
    Broken("clip-nearly-absorbed", "ort-compat", _beyond_the_cut(6.01)),
    Broken("packed-weight", "openvino", _packed_weight),
    Broken("int4-cast", "ort-compat", _int4_cast),
    Broken("shared-codes", "qnn", _shared_codes),
    Broken("free-shape", "qnn", _free_shape),
    Broken("free-shape", "rknn", _free_shape),
    Broken("integer-op", "tensorrt", _integer_op),
    Broken("u8-weight", "tensorrt", lambda file: file.codes_of("project", TensorProto.UINT8)),
    Broken("s4-weight", "ort", lambda file: file.codes_of("project", TensorProto.INT4), ("opset-too-old",)),
    Broken("weight-only-conv", "ort", _weights_alone("stem", "w8")),
    Broken("weight-only-conv", "tensorrt", _weights_alone("stem", "w8")),
    Broken("unblocked-weight", "tensorrt", _weights_alone("fc")),
    Broken("float-layer", "qnn", _weights_alone("fc"), ("free-shape",)),
    Broken("u4-weight", "qnn", lambda file: file.codes_of("project", TensorProto.UINT4), ("opset-too-old",)),
    Broken("other-weight", "xnnpack", lambda file: file.codes_of("project", TensorProto.INT16), ("opset-too-old",)),
    Broken("u8-activation", "tensorrt", lambda file: file.activation_of("r1", TensorProto.UINT8)),
    Broken("s8-activation", "qnn", lambda file: file.activation_of("r1", TensorProto.INT8)),
    Broken("u4-activation", "ort", lambda file: file.activation_of("r1", TensorProto.UINT4), ("opset-too-old",)),
    Broken("u16-activation", "vitis", lambda file: file.activation_of("r1", TensorProto.UINT16), ("opset-too-old",)),
    Broken("other-activation", "ort", lambda file: file.activation_of("r1", TensorProto.INT32)),
)
