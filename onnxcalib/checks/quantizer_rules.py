"""Rules about single quantizers: scales, zero points, pairs, types."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import onnx

from onnxcalib.checks.rule import Hits, Scene, Teller, of_type, rule, rules_about
from onnxcalib.checks.view import PASSING_OPS, TYPES, Array, Quantizer, View, label
from onnxcalib.targets import Dynamic

ACTIVATION_TYPES = {"u8": "u8", "s8": "s8", "u4": "u4", "s4": "u4", "u16": "u16", "s16": "u16"}


def quantizers(scene: Scene) -> Iterator[tuple[onnx.NodeProto, Quantizer]]:
    """All that there are."""
    return ((it.node, it) for it in scene.view.quantizers.values())


def activations(scene: Scene) -> Iterator[tuple[onnx.NodeProto, Quantizer]]:
    """What quantizes something that is computed."""
    return ((node, it) for node, it in quantizers(scene) if not it.constant and it.kind != "dequantize")


def _bad_scale(it: Quantizer) -> str:
    if it.scale is None or (np.isfinite(it.scale).all() and (it.scale > 0).all()):
        return ""
    return f"scale {it.scale.reshape(-1)[np.argmin(np.nan_to_num(it.scale.reshape(-1), nan=-1.0))]:g}"


def _zero_point_shape(it: Quantizer) -> str:
    if it.scale is None or it.zero is None or it.kind == "quant" or it.scale.size == it.zero.size:
        return ""
    return f"{it.scale.size} scales, {it.zero.size} zero points"


QUANTIZER_RULES: Mapping[str, Teller] = {
    "scale-not-positive": _bad_scale,
    "zero-point-shape": _zero_point_shape,
    "power-of-two": lambda it: (
        "" if it.scale is None or np.all(np.frexp(it.scale)[0] == 0.5) else f"scale {it.scale.reshape(-1)[0]:g}"
    ),
}
ACTIVATION_RULES: Mapping[str, Teller] = {
    "per-channel-activation": lambda it: f"{it.channels} scales" if it.channels > 1 else "",
    "activation-zero-point": lambda it: (
        "" if it.zero is None or it.zero_is_zero else f"zero point {it.zero.reshape(-1)[0]:g}"
    ),
}
ACTIVATION_TYPE_RULES = {
    f"{kind}-activation": of_type(kind, "its input", ACTIVATION_TYPES) for kind in ("u8", "s8", "u4", "u16", "other")
}
rules_about(quantizers, QUANTIZER_RULES)
rules_about(activations, {**ACTIVATION_RULES, **ACTIVATION_TYPE_RULES})


@rule("blocked-scales")
def _blocked_scales(scene: Scene) -> Hits:
    return ((node, f"blocks of {it.block}") for node, it in quantizers(scene) if it.block and not scene.takes_alone(it))


@rule("zero-point-type")
def _zero_point_type(scene: Scene) -> Hits:
    for it in scene.view.quantizers.values():
        if it.kind == "dequantize" and it.has_zero:
            quantized, zero = (scene.view.element_type(it.node.input[place]) for place in (0, 2))
            if quantized is not None and zero is not None and quantized != zero:
                read, given = (TYPES.get(kind, kind) for kind in (quantized, zero))
                yield it.node, f"its input is {read}, the zero point is {given}"


@rule("scale-length")
def _scale_length(scene: Scene) -> Hits:
    for it in scene.view.quantizers.values():
        tensor = scene.view.initializer(it.node.input[0])
        if tensor is None or it.channels == 1 or it.block or it.kind == "quant":
            continue
        if not -len(tensor.dims) <= it.axis < len(tensor.dims):
            yield it.node, f"axis {it.axis} of a tensor of {len(tensor.dims)} axes"
        elif tensor.dims[it.axis] != it.channels:
            yield it.node, f"{it.channels} scales for {tensor.dims[it.axis]} channels"


@rule("computed-scale")
def _computed_scale(scene: Scene) -> Hits:
    for it in scene.view.quantizers.values():
        takes = it.dynamic and scene.target.dynamic is not Dynamic.NONE
        if not takes and (it.scale is None or (it.has_zero and it.zero is None)):
            yield it.node, "its scale or zero point is not a constant"


@rule("dangling-quantize")
def _dangling_quantize(scene: Scene) -> Hits:
    for name, it in scene.view.quantizers.items():
        if it.kind == "quantize" and not _is_dequantized(scene.view, name):
            yield it.node, "nobody dequantizes what it makes"


@rule("dangling-dequantize")
def _dangling_dequantize(scene: Scene) -> Hits:
    view = scene.view
    for name, it in view.quantizers.items():
        if it.kind != "dequantize":
            continue
        if not view.index.readers.get(name) and name not in view.index.outputs:
            yield it.node, "nobody reads what it makes"
        elif (
            not it.constant
            and not it.dynamic
            and view.quantizer_behind(it) is None
            and it.node.input[0] not in view.index.inputs
        ):
            yield it.node, f"'{it.node.input[0]}' does not come from a QuantizeLinear"


@rule("pair-mismatch")
def _pair_mismatch(scene: Scene) -> Hits:
    for it in scene.view.quantizers.values():
        before = scene.view.quantizer_behind(it) if it.kind == "dequantize" and not it.constant else None
        if before is not None and not (same(it.scale, before.scale) and same(it.zero, before.zero)):
            yield it.node, f"another grid than that of '{label(before.node)}'"


@rule("clipped-codes")
def _clipped_codes(scene: Scene) -> Hits:
    for node in scene.view.graph.node:
        maker = scene.view.maker(node.input[0]) if node.op_type == "Clip" else None
        if maker is not None and maker.op_type == "QuantizeLinear":
            yield node, f"after '{label(maker)}'"


@rule("clipped-values")
def _clipped_values(scene: Scene) -> Hits:
    """Less than half of the quantized values are left."""
    for _, it in activations(scene):
        maker = scene.view.maker(it.node.input[0])
        if maker is None or maker.op_type != "Clip" or it.kind != "quantize" or it.channels > 1 or it.scale is None:
            continue
        bounds = [scene.view.value(name) if name else None for name in maker.input[1:3]]
        if len(bounds) == 2 and bounds[0] is not None and bounds[1] is not None:
            step = float(it.scale.reshape(-1)[0])
            left = float((bounds[1] - bounds[0]).reshape(-1)[0]) / step if step > 0 else np.inf
            if left < 127:
                yield maker, f"{left + 1:.0f} of the quantized values are left"


def _is_dequantized(view: View, name: str) -> bool:
    if name in view.index.outputs:
        return True
    readers = view.index.readers.get(name, [])
    if any(reader.op_type == "DequantizeLinear" for reader in readers):
        return True
    moved = [output for reader in readers if reader.op_type in PASSING_OPS for output in reader.output]
    # An op with bodies may read it inside; that is for the body's own view to judge.
    inside = any(attribute.HasField("g") for reader in readers for attribute in reader.attribute)
    return inside or any(_is_dequantized(view, output) for output in moved)


def same(one: Array | None, other: Array | None) -> bool:
    """Whether two scales or zero points are equal; none stands for zero."""
    if one is None or other is None:
        return (one is None or not np.any(one)) and (other is None or not np.any(other))
    return one.size == other.size and np.array_equal(one.reshape(-1), other.reshape(-1))
