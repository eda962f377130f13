"""The paper's quantizer: asymmetric per-channel weights, quantized layer inputs, everything else float."""

from __future__ import annotations

from onnxcalib.targets.target import Placement, Storage, Target

PAPER = Target(
    name="paper",
    summary="the paper's protocol: asymmetric per-channel weights, QDQ at layer inputs and weights only",
    # Signed activations beside unsigned weights are a pair that onnxruntime never fuses: its integer Conv fails on
    # (1.19) or crawls through (1.31, depthwise) per-channel zero points. So layers compute in float, as simulated.
    signed_activations=True,
    symmetric_activations=False,
    signed_weights=False,
    symmetric_weights=False,
    per_channel=True,
    integer_bias=False,
    placement=Placement.LAYER_INPUTS,
    storage=Storage.BIT_PLANES,
)
