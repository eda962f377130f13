"""Round to nearest: from statistics to every layer at every precision that it may get."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from onnxcalib.algorithms.calibration import Statistics
from onnxcalib.algorithms.tied import SHARED_BITS, Tied
from onnxcalib.data.arrays import give_back
from onnxcalib.model.layers import Layer, weights_of
from onnxcalib.model.placement import InsertionPoints, QuantizedTensor
from onnxcalib.model.prepare import Model
from onnxcalib.numerics.quant_params import QuantParams, QuantScheme, make_qparams, quantize, with_least_scale, within
from onnxcalib.numerics.range_estimators import ESTIMATORS, blockwise_qparams, weight_qparams
from onnxcalib.plan import Candidates, LayerParams
from onnxcalib.recipe import MAX_BITS, Precision, RangeMethod
from onnxcalib.recipe.overrides import Override
from onnxcalib.runtime.threads import in_threads
from onnxcalib.targets import Target

# An int32 bias saturates beyond this many steps; half of int32 leaves room for the products added to it.
BIAS_STEPS = 2.0**30

CandidatePrecisions = Mapping[str, Sequence[Precision]]  # by layer: the precisions that it may get


@dataclass(frozen=True)
class Ranges:
    """Which estimator finds the ranges."""

    activations: Mapping[int, RangeMethod]  # by bits
    weights: RangeMethod
    block: int | None = None  # of the weights of Gemm and MatMul


@dataclass(frozen=True)
class _Rounded:
    """A weight's grid, and its quantized values."""

    qparams: QuantParams
    quantized: npt.NDArray[Any]


@dataclass(frozen=True)
class Rounding:
    """Rounds the layers of a graph; what one range was searched for is remembered for every other that is tried."""

    model: Model
    layers: Sequence[Layer]
    points: InsertionPoints
    statistics: Statistics
    target: Target
    overrides: Mapping[str, Override] = field(default_factory=dict)  # by layer
    tied: Mapping[str, Tied] = field(default_factory=dict)  # by layer: the table that holds its weight too
    _activations: dict[tuple[str, int, RangeMethod], QuantParams] = field(default_factory=dict)
    _weights: dict[tuple[str, QuantScheme, int | None, int | None, RangeMethod], _Rounded] = field(default_factory=dict)

    @cached_property
    def values(self) -> Mapping[str, npt.NDArray[Any]]:
        """The weights and biases of all layers."""
        return weights_of(self.model, [name for layer in self.layers for name in (layer.weight, layer.bias) if name])

    def to_nearest(self, candidate_precisions: CandidatePrecisions, ranges: Ranges) -> Candidates:
        """Every layer at each of its candidate precisions."""
        shared: dict[str, QuantParams] = {}
        inputs: dict[str, dict[int, QuantParams]] = {layer.input: {} for layer in self.layers}
        for tensor in self.points.tensors.values():
            if tensor.shared or not tensor.layers:
                shared[tensor.name] = self._activation(tensor, MAX_BITS, ranges)
            widths = sorted({choice.activation for layer in tensor.layers for choice in candidate_precisions[layer]})
            inputs[tensor.name] = {
                bits: self._activation(tensor, bits, ranges)
                for bits in widths
                # At eight bits layers read the shared value as it is.
                if tensor.name not in shared or bits < MAX_BITS
            }
        self._search_weights(candidate_precisions, ranges)
        params: dict[str, dict[Precision, LayerParams]] = {layer.name: {} for layer in self.layers}
        for layer in self.layers:
            for precision in candidate_precisions[layer.name]:
                qparams = inputs[layer.input].get(precision.activation) or shared.get(layer.input)
                params[layer.name][precision] = self._layer(layer, precision.weight, qparams, ranges)
        used = ", ".join(sorted({method.value for method in ranges.activations.values()}))
        tensors = {layer.name: layer.input for layer in self.layers}
        return Candidates(self.target.name, used, shared, inputs, params, tensors, self.points.dynamic)

    def _activation(self, tensor: QuantizedTensor, bits: int, ranges: Ranges) -> QuantParams:
        """The grid of a tensor, or of the one whose grid it keeps."""
        own = [it.ranges for layer in tensor.layers if (it := self.overrides.get(layer)) is not None and it.ranges]
        method = own[-1] if own else RangeMethod.MINMAX if tensor.is_output else ranges.activations[bits]
        key = (tensor.name, bits, method)
        if key not in self._activations:
            stats = self.statistics.tensors[tensor.same_qparams_as or tensor.name]
            scheme = self.target.activation_scheme(bits, positive=stats.low >= 0)
            found = make_qparams(*ESTIMATORS[method](stats, scheme), scheme)
            self._activations[key] = within(found, tensor.bounds, scheme)
        return self._activations[key]

    def _layer(self, layer: Layer, bits: int, activation: QuantParams | None, ranges: Ranges) -> LayerParams:
        """A layer's quantized values at a precision."""
        weight, bias = self.values[layer.weight], self.values[layer.bias] if layer.bias else None
        axis, found = self._axis(layer), self._weight(layer, bits, ranges)
        if bias is not None and activation is not None:
            least = least_scale(self.target, bias, activation, per_channel=axis is not None)
            qparams = with_least_scale(found.qparams, least)
            if (qparams.scale != found.qparams.scale).any():
                found = _Rounded(qparams, quantize(weight, qparams))
        own = None if bias is None else bias.astype(np.float32)
        params, tied = LayerParams(found.quantized, found.qparams, own, weight), self.tied.get(layer.name)
        if tied is None or not tied.can_have(found.qparams, self.target.table_bits):
            return params
        return replace(params, table=tied.with_codes(found.quantized, found.qparams))

    def _search_weights(self, candidate_precisions: CandidatePrecisions, ranges: Ranges) -> None:
        """Finds the grids of all weights, several at a time; each is looked for once, however many layers share it."""
        wanted = {
            (layer.weight, precision.weight, self.overrides.get(layer.name)): layer
            for layer in self.layers
            for precision in candidate_precisions[layer.name]
        }
        in_threads(lambda item: self._weight(item[1], item[0][1], ranges), wanted.items())

    def _axis(self, layer: Layer) -> int | None:
        """Along which its weight has a scale a channel, None if it has one scale."""
        possible = self.target.has_channels(layer.op) and layer.per_channel
        return layer.channel_axis if possible and self._own(layer).per_channel is not False else None

    def _own(self, layer: Layer) -> Override:
        return self.overrides.get(layer.name, Override())

    def _weight(self, layer: Layer, bits: int, ranges: Ranges) -> _Rounded:
        """A weight on its own grid; layers may share it."""
        if bits == SHARED_BITS and layer.name in self.tied:
            return _Rounded(self.tied[layer.name].qparams, self.tied[layer.name].quantized)
        own, axis = self._own(layer), self._axis(layer)
        scheme, block = self.target.weight_scheme(bits), ranges.block if layer.has_sums else None
        if block is not None and layer.name in self.tied and self.tied[layer.name].table.quantized.shape[1] % block:
            block = None  # rows that are looked up have no block that is shorter than others
        if own.symmetric is not None:
            scheme = replace(scheme, symmetric=own.symmetric)
        along = axis if block is None else 1 - layer.channel_axis
        method = own.ranges or ranges.weights
        key = (layer.weight, scheme, along, block, method)
        if key not in self._weights:
            weight = self.values[layer.weight]
            if block is not None:
                qparams = blockwise_qparams(weight, scheme, 1 - layer.channel_axis, block, method)
            else:
                qparams = weight_qparams(weight, scheme, axis, method)
            self._weights[key] = _Rounded(qparams, quantize(weight, qparams))
            give_back(weight)
        return self._weights[key]


def least_scale(
    target: Target, bias: npt.NDArray[np.float32], activation: QuantParams | None, *, per_channel: bool
) -> npt.NDArray[np.float64]:
    """Nearly zero weights would get a step too fine for an int32 bias, which runtimes make of a float one too."""
    if activation is None:
        return np.zeros(())
    least = np.abs(bias.astype(np.float64)) / (float(activation.scale) * BIAS_STEPS)
    least = least if per_channel else np.asarray(least.max())
    if target.power_of_two:
        return np.exp2(np.ceil(np.log2(least, where=least > 0, out=np.full(least.shape, -np.inf))))
    return least
