"""Rules about the file as a whole: versions, shapes, ops, what is stored."""

from __future__ import annotations

from onnxcalib.checks.rule import Hits, Scene, rule
from onnxcalib.checks.view import Quantizer, label
from onnxcalib.model.io import opset_of

INTEGER_OPS = {
    "QLinearConv", "QLinearMatMul", "ConvInteger", "MatMulInteger", "DynamicQuantizeLinear",
}  # fmt: skip


@rule("opset-too-new")
def _opset_too_new(scene: Scene) -> Hits:
    opset = opset_of(scene.model)
    if opset > scene.target.opset_limit and scene.view.outer is None:
        yield None, f"opset {opset}, and {scene.target.name} reads {scene.target.opset_limit} at most"


@rule("opset-too-old")
def _opset_too_old(scene: Scene) -> Hits:
    opset = opset_of(scene.model)
    for it in scene.view.quantizers.values():
        if it.channels > 1 and opset < 13 and it.kind != "quant":
            yield it.node, f"scales along an axis need opset 13, the file has {opset}"
        elif it.type in ("s4", "u4", "s16", "u16") and opset < 21:
            yield it.node, f"{it.type} quantized values need opset 21, the file has {opset}"


@rule("ir-too-new")
def _ir_too_new(scene: Scene) -> Hits:
    version = scene.model.ir_version
    if version > scene.target.newest_ir and scene.view.outer is None:
        yield None, f"IR version {version}, and {scene.target.name} reads {scene.target.newest_ir} at most"


@rule("foreign-op")
def _foreign_op(scene: Scene) -> Hits:
    for node in scene.view.graph.node:
        if node.domain not in ("", *scene.target.domains):
            yield node, f"{node.op_type} is of domain {node.domain}"


@rule("integer-op")
def _integer_op(scene: Scene) -> Hits:
    for node in scene.view.graph.node:
        if node.op_type in INTEGER_OPS:
            yield node, f"{node.op_type} instead of QDQ nodes"


@rule("nothing-quantized")
def _nothing_quantized(scene: Scene) -> Hits:
    inner = any(attribute.HasField("g") for node in scene.view.graph.node for attribute in node.attribute)
    integer = any(node.op_type in INTEGER_OPS for node in scene.view.graph.node)
    folded = any(layer.weight_is_folded for layer in scene.view.layers)
    if scene.view.outer is None and not inner and not integer and not folded and not scene.view.quantizers:
        yield None, "no quantizer in the whole file"


@rule("free-shape")
def _free_shape(scene: Scene) -> Hits:
    if scene.view.outer is not None:
        return
    for value in scene.model.graph.input:
        sizes = value.type.tensor_type.shape.dim
        free = [dim.dim_param or "?" for dim in sizes if dim.dim_value <= 0]
        if value.name in scene.view.index.inputs and free:
            yield None, f"input '{value.name}' has free sizes: {', '.join(free)}"


@rule("shared-codes")
def _shared_codes(scene: Scene) -> Hits:
    first: dict[str, Quantizer] = {}
    for it in scene.view.quantizers.values():
        name = it.node.input[0]
        if it.kind == "dequantize" and scene.view.initializer(name) is not None:
            before = first.setdefault(name, it)
            if before.node.input[1] != it.node.input[1]:
                yield it.node, f"'{name}' has another scale in '{label(before.node)}'"
