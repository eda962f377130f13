"""The paper's quantizer: asymmetric per-channel weights, quantized layer inputs, everything else float."""

from __future__ import annotations

from onnxcalib.targets.target import Placement, Storage, Target

PAPER = Target(
    name="paper",
    summary="the paper's protocol: asymmetric per-channel weights, QDQ at layer inputs and weights only",
    signed_activations=False,
    symmetric_activations=False,
    signed_weights=False,
    symmetric_weights=False,
    per_channel=True,
    integer_bias=False,
    placement=Placement.LAYER_INPUTS,
    storage=Storage.BIT_PLANES,
    # onnxruntime's integer Conv fails on (1.19) or crawls through (1.31, depthwise) per-channel zero points.
    float_compute=True,
)
