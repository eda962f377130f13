"""Quantizers of weights that train, beside the graph of the network: once a step, not for each piece of a batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import numpy.typing as npt

from onnxcalib.model.layers import Layer
from onnxcalib.model.model_loss import Parameter, quantized_weight_name
from onnxcalib.numerics.quant_params import QuantParams, dequantize, fake_quantize
from onnxcalib.numerics.straight_through import scale_gradient, straight_through
from onnxcalib.plan import QuantPlan
from onnxcalib.runtime.threads import in_threads

FloatArray = npt.NDArray[np.float32]
Arrays = Mapping[str, FloatArray]


def weight_name(layer: Layer) -> str:
    """The parameter that is a layer's weight before it is rounded."""
    return f"{layer.name}:weight"


def weight_scale_name(layer: Layer) -> str:
    """The parameter that is the steps of a weight's grid."""
    return f"{layer.name}:weight_scale"


@dataclass(frozen=True)
class WeightQuantizers:
    """What the network reads of weights whose values or scales train, and the gradients the way back."""

    layers: Sequence[Layer]
    plan: QuantPlan  # has the zero points, and what does not train
    units: Arrays

    @classmethod
    def of(cls, layers: Sequence[Layer], plan: QuantPlan, parameters: Mapping[str, Parameter]) -> WeightQuantizers:
        """The quantizers of those layers of which a parameter is a weight or its scales."""
        trained = [it for it in layers if weight_name(it) in parameters or weight_scale_name(it) in parameters]
        return cls(trained, plan, {name: parameter.unit for name, parameter in parameters.items()})

    def owns(self, name: str) -> bool:
        """Whether a parameter is one of theirs."""
        return any(name in (weight_name(layer), weight_scale_name(layer)) for layer in self.layers)

    def quantized(self, parameters: Arrays) -> dict[str, FloatArray]:
        """What the network reads."""
        found = in_threads(partial(self._quantized, parameters), self.layers)
        return {quantized_weight_name(layer): value for layer, value in zip(self.layers, found, strict=True)}

    def gradients(self, parameters: Arrays, of_quantized: Arrays) -> dict[str, FloatArray]:
        """The gradients for the parameters, from those for what the network reads."""
        found = in_threads(partial(self._gradients, parameters, of_quantized), self.layers)
        return {name: gradient for each in found for name, gradient in each.items()}

    def _quantized(self, parameters: Arrays, layer: Layer) -> FloatArray:
        weight, qparams = self._values(parameters, layer)
        if weight is None:
            return dequantize(self.plan.layers[layer.name].quantized, qparams)
        return fake_quantize(weight, qparams)

    def _gradients(self, parameters: Arrays, of_quantized: Arrays, layer: Layer) -> dict[str, FloatArray]:
        gradient = of_quantized[quantized_weight_name(layer)]
        weight, qparams = self._values(parameters, layer)
        if weight is None:
            found = {
                weight_scale_name(layer): scale_gradient(self.plan.layers[layer.name].quantized, qparams, gradient)
            }
        else:
            passed, scales = straight_through(weight, qparams, gradient)
            found = {weight_name(layer): passed, weight_scale_name(layer): scales}
        return {name: value * self.units[name] for name, value in found.items() if name in self.units}

    def _values(self, parameters: Arrays, layer: Layer) -> tuple[FloatArray | None, QuantParams]:
        """The weight, None where its quantized values stay, and its grid."""
        qparams, scale = self.plan.layers[layer.name].qparams, self._real(parameters, weight_scale_name(layer))
        qparams = qparams if scale is None else replace(qparams, scale=scale)
        return self._real(parameters, weight_name(layer)), qparams

    def _real(self, parameters: Arrays, name: str) -> FloatArray | None:
        return np.asarray(parameters[name] * self.units[name], np.float32) if name in self.units else None
