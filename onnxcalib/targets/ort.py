"""onnxruntime's CPU provider, 1.19 to the newest: everything between layers in eight-bit integer kernels."""

from __future__ import annotations

from onnxcalib.targets.target import Placement, Storage, Target

ORT = Target(
    name="ort",
    summary="onnxruntime CPU: u8 activations, s8 symmetric per-channel weights, int32 bias",
    signed_activations=False,
    symmetric_activations=False,
    signed_weights=True,
    symmetric_weights=True,
    per_channel=True,
    integer_bias=True,
    placement=Placement.FUSED,
    # An int4 tensor would need opset 21 and a Cast that 1.19 does not have; planes fold on every version.
    storage=Storage.BIT_PLANES,
)
