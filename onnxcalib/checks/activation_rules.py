"""Rules about a Relu or Clip between an op and its quantizer: one that has to stay keeps the op in float."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx

from onnxcalib.checks.quantizer_rules import same
from onnxcalib.checks.rule import Hits, Scene, rule
from onnxcalib.checks.view import Array, Quantizer, View, label
from onnxcalib.model.graph import activation_bounds
from onnxcalib.model.placement import ABSORBED_OPS, INTEGER_OPS
from onnxcalib.numerics.quant_params import Bounds

ZERO = np.zeros((), np.int32)
CODES = {"u8": (0, 255), "s8": (-128, 127)}
EPSILON = float(np.finfo(np.float32).eps)  # what older versions of onnxruntime let pass


@rule("clip-not-absorbed")
def _not_absorbed(scene: Scene) -> Hits:
    return ((node, what) for node, what, steps in _staying(scene.view) if steps > 0.5)


@rule("clip-nearly-absorbed")
def _nearly_absorbed(scene: Scene) -> Hits:
    return ((node, what) for node, what, steps in _staying(scene.view) if steps <= 0.5)


def _staying(view: View) -> Iterator[tuple[onnx.NodeProto, str, float]]:
    """Ops before an activation that does more than its quantizer, why, and by how many steps more."""
    ops = {layer.node.output[0] for layer in view.layers if layer.quantized and layer.node.op_type != "ConvTranspose"}
    for node in view.graph.node:
        if node.op_type in INTEGER_OPS and all(view.quantizer_of(name) for name in node.input if name):
            ops.add(node.output[0])
        if node.op_type not in ABSORBED_OPS or node.input[0] not in ops:
            continue
        readers = view.index.readers.get(node.output[0], [])
        if node.output[0] in view.index.outputs or {reader.op_type for reader in readers} != {"QuantizeLinear"}:
            continue
        steps, why = _reach(node, view, [view.quantizers[reader.output[0]] for reader in readers])
        if steps > 0:
            yield view.index.producers[node.input[0]], f"its {node.op_type} '{label(node)}' stays: {why}", steps


def _reach(node: onnx.NodeProto, view: View, quantizers: list[Quantizer]) -> tuple[float, str]:
    """How many steps beyond an activation's bounds its quantizer reaches, infinitely many where nobody looks."""
    bounds, it = activation_bounds(node, view.value), quantizers[0]
    if any(not (same(it.scale, other.scale) and same(it.zero, other.zero)) for other in quantizers):
        return np.inf, f"{len(quantizers)} quantizers read what it makes"
    if bounds is None:
        return np.inf, "its bounds are computed"
    constants = [value for value in (it.scale, it.zero) if value is not None]
    if it.type not in CODES or len(constants) != 1 + it.has_zero or any(value.size != 1 for value in constants):
        return 0.0, ""  # for other rules to judge
    if node.op_type == "Clip" and any(value.ndim > 0 for value in constants):
        return np.inf, f"the scale of '{label(it.node)}' is a list of one number"
    steps = _beyond(CODES[it.type], *constants, bounds=bounds)
    if steps == 0 and not it.has_zero:
        return EPSILON, f"'{label(it.node)}' has no zero point"
    return (
        steps,
        f"quantized values of '{label(it.node)}' reach {steps:.2g} steps beyond {bounds[0]:g} to {bounds[1]:g}",
    )


def _beyond(quantized: tuple[int, int], scale: Array, zero: Array = ZERO, *, bounds: Bounds) -> float:
    step = np.float32(scale.item())
    with np.errstate(invalid="ignore"):
        low, high = (float(np.float32(code - zero.item()) * step) for code in quantized)
    over = max(bounds[0] - low, high - bounds[1])
    return over / float(step) if over > EPSILON else 0.0
