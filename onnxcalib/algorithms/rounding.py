"""Round to nearest: from statistics to every layer at every precision that it may get."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from onnxcalib.algorithms.calibration import Statistics
from onnxcalib.model.layers import Layer, weights_of
from onnxcalib.model.placement import InsertionPoints, QuantizedTensor
from onnxcalib.model.prepare import Model
from onnxcalib.numerics.quant_params import QuantParams, make_qparams, quantize, with_least_scale, within
from onnxcalib.numerics.range_estimators import ESTIMATORS, blockwise_qparams, weight_qparams
from onnxcalib.plan import Candidates, LayerParams
from onnxcalib.recipe import MAX_BITS, Precision, RangeMethod
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


def round_to_nearest(
    model: Model,
    layers: Sequence[Layer],
    points: InsertionPoints,
    statistics: Statistics,
    candidate_precisions: CandidatePrecisions,
    target: Target,
    ranges: Ranges,
) -> Candidates:
    """Every layer at each of its candidate precisions."""
    shared: dict[str, QuantParams] = {}
    inputs: dict[str, dict[int, QuantParams]] = {layer.input: {} for layer in layers}
    for tensor in points.tensors.values():
        if tensor.shared or not tensor.layers:
            shared[tensor.name] = _activation_qparams(tensor, statistics, MAX_BITS, target, ranges)
        widths = sorted({precision.activation for layer in tensor.layers for precision in candidate_precisions[layer]})
        inputs[tensor.name] = {
            bits: _activation_qparams(tensor, statistics, bits, target, ranges)
            for bits in widths
            # At eight bits layers read the shared value as it is.
            if tensor.name not in shared or bits < MAX_BITS
        }
    params: dict[str, dict[Precision, LayerParams]] = {layer.name: {} for layer in layers}
    for layer in layers:
        for precision in candidate_precisions[layer.name]:
            qparams = inputs[layer.input].get(precision.activation) or shared.get(layer.input)
            params[layer.name][precision] = _round_layer(model, layer, precision.weight, qparams, target, ranges)
    used = ", ".join(sorted({method.value for method in ranges.activations.values()}))
    tensors = {layer.name: layer.input for layer in layers}
    return Candidates(target.name, used, shared, inputs, params, tensors)


def _activation_qparams(
    tensor: QuantizedTensor, statistics: Statistics, bits: int, target: Target, ranges: Ranges
) -> QuantParams:
    """The grid of a tensor, or of the one whose grid it keeps."""
    stats = statistics.tensors[tensor.same_qparams_as or tensor.name]
    scheme = target.activation_scheme(bits, positive=stats.low >= 0)
    method = RangeMethod.MINMAX if tensor.is_output else ranges.activations[bits]
    return within(make_qparams(*ESTIMATORS[method](stats, scheme), scheme), tensor.bounds, scheme)


def _round_layer(
    model: Model, layer: Layer, bits: int, activation: QuantParams | None, target: Target, ranges: Ranges
) -> LayerParams:
    """A layer's quantized values at a precision."""
    values = weights_of(model, [name for name in (layer.weight, layer.bias) if name])
    weight, bias = values[layer.weight], values[layer.bias] if layer.bias else None
    axis = layer.channel_axis if target.has_channels(layer.op) and layer.per_channel else None
    if ranges.block is not None and layer.has_sums:
        qparams = blockwise_qparams(
            weight, target.weight_scheme(bits), 1 - layer.channel_axis, ranges.block, ranges.weights
        )
    else:
        qparams = weight_qparams(weight, target.weight_scheme(bits), axis, ranges.weights)
    if bias is not None and activation is not None:
        qparams = with_least_scale(qparams, least_scale(layer, target, bias, activation, per_channel=axis is not None))
    return LayerParams(quantize(weight, qparams), qparams, None if bias is None else bias.astype(np.float32), weight)


def least_scale(
    layer: Layer, target: Target, bias: npt.NDArray[np.float32], activation: QuantParams | None, *, per_channel: bool
) -> npt.NDArray[np.float64]:
    """A channel of nearly zero weights would get a step too fine for its int32 bias."""
    if not target.integer_bias or layer.bias_node is not None or activation is None:
        return np.zeros(())
    least = np.abs(bias.astype(np.float64)) / (float(activation.scale) * BIAS_STEPS)
    least = least if per_channel else np.asarray(least.max())
    if target.power_of_two:
        return np.exp2(np.ceil(np.log2(least, where=least > 0, out=np.full(least.shape, -np.inf))))
    return least
