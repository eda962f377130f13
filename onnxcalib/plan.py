"""The quantization plan: names and arrays, all that decides the written file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from onnxcalib.numerics.quant_params import QuantParams
from onnxcalib.recipe import Precision


@dataclass(frozen=True)
class LayerParams:
    """A layer's quantized weights with their grid, and its float bias."""

    quantized: npt.NDArray[Any]
    qparams: QuantParams
    bias: npt.NDArray[np.float32] | None
    weight: npt.NDArray[np.float32]  # what the quantized values were rounded from, for those who train on
    input: QuantParams | None = None  # a trained grid of its own for what the layer reads; None: the tensor's


@dataclass(frozen=True)
class QuantPlan:
    """What is quantized, and how."""

    target: str
    ranges: str  # the range estimators
    precisions: Mapping[str, Precision]  # by layer
    layers: Mapping[str, LayerParams]
    shared: Mapping[str, QuantParams]  # by tensor: the grid that every reader sees
    inputs: Mapping[str, QuantParams]  # by tensor: the grid that layers see, on top of the shared one if there is one

    def layer_input(self, tensor: str) -> QuantParams | None:
        """The grid on which layers read a tensor, None if that is float."""
        return self.inputs.get(tensor) or self.shared.get(tensor)

    def joined(self, other: QuantPlan) -> QuantPlan:
        """One plan for two graphs of a model."""
        return QuantPlan(
            self.target,
            ", ".join(dict.fromkeys((self.ranges, other.ranges))),
            {**self.precisions, **other.precisions},
            {**self.layers, **other.layers},
            {**self.shared, **other.shared},
            {**self.inputs, **other.inputs},
        )


@dataclass(frozen=True)
class Candidates:
    """Every layer at every precision that it may get, ready to be stitched into one plan."""

    target: str
    ranges: str
    shared: Mapping[str, QuantParams]
    inputs: Mapping[str, Mapping[int, QuantParams]]  # by tensor that layers read, then by bits
    layers: Mapping[str, Mapping[Precision, LayerParams]]
    tensors: Mapping[str, str]  # by layer: the tensor that it reads

    def stitch(self, precisions: Mapping[str, Precision]) -> QuantPlan:
        """The plan at these precisions; layers that read one tensor must agree on its bits."""
        bits: dict[str, int] = {}
        for layer, precision in precisions.items():
            shared = bits.setdefault(self.tensors[layer], precision.activation)
            assert shared == precision.activation, f"layers disagree on the bits of {self.tensors[layer]}"
        inputs = {tensor: self.inputs[tensor][width] for tensor, width in bits.items() if width in self.inputs[tensor]}
        layers = {layer: self.layers[layer][precision] for layer, precision in precisions.items()}
        inputs |= {self.tensors[layer]: params.input for layer, params in layers.items() if params.input is not None}
        return QuantPlan(self.target, self.ranges, dict(precisions), layers, self.shared, inputs)
