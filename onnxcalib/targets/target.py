"""What a target is: types, symmetry, placement, storage, opset, allowed bits."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from onnxcalib.numerics.grid import GridKind


class Placement(enum.Enum):
    """Which tensors get QDQ nodes."""

    FUSED = "every tensor between ops that the runtime has integer kernels for"
    LAYER_INPUTS = "only what a layer reads"


class Storage(enum.Enum):
    """How weight codes narrower than eight bits lie in the file."""

    INT8 = "one byte a code"
    BIT_PLANES = "packed bits that the runtime unpacks once, at load"


@dataclass(frozen=True)
class Target:
    """One runtime or compiler, as far as the written file goes."""

    name: str
    summary: str
    signed_activations: bool
    symmetric_activations: bool
    signed_weights: bool
    symmetric_weights: bool
    per_channel: bool
    integer_bias: bool
    placement: Placement
    storage: Storage
    power_of_two: bool = False  # scales of activations and weights
    float_compute: bool = False  # keep runtimes from fusing convolutions into integer kernels
    oldest_opset: int = 13  # per-channel QuantizeLinear
    newest_opset: int = 21  # what onnxruntime 1.19 loads

    def activation_kind(self, bits: int) -> GridKind:
        """The form of an activation's grid."""
        return GridKind(bits, self.signed_activations, self.symmetric_activations, self.power_of_two)

    def weight_kind(self, bits: int) -> GridKind:
        """The form of a weight's grid."""
        return GridKind(bits, self.signed_weights, self.symmetric_weights, self.power_of_two)
