"""Round to nearest: from statistics and bit-widths to a plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from onnxcalib.model.layers import Layer, weights_of
from onnxcalib.model.placement import Places, QuantizedTensor
from onnxcalib.model.prepare import Model
from onnxcalib.numerics.grid import Grid, make_grid, quantize, with_least_scale
from onnxcalib.numerics.ranges import ESTIMATORS, weight_grid
from onnxcalib.plan import LayerParams, QuantPlan
from onnxcalib.recipe import MAX_BITS, Precision, RangeMethod
from onnxcalib.stages.calibrate import Statistics
from onnxcalib.targets import Target

# An int32 bias saturates beyond this many steps; half of int32 leaves room for the products added to it.
_BIAS_STEPS = 2.0**30


def round_to_nearest(
    model: Model,
    layers: Sequence[Layer],
    places: Places,
    statistics: Statistics,
    precisions: Mapping[str, Precision],
    target: Target,
    ranges: RangeMethod,
) -> QuantPlan:
    """The plan at fixed precisions; layers that read one tensor must agree on its bits."""
    carried, inputs = {}, {}
    for tensor in places.tensors.values():
        if tensor.carried or not tensor.layers:
            carried[tensor.name] = activation_grid(tensor, statistics, MAX_BITS, target, ranges)
        if tensor.layers:
            bits = _shared_bits(tensor, precisions)
            if tensor.name not in carried or bits < MAX_BITS:
                inputs[tensor.name] = activation_grid(tensor, statistics, bits, target, ranges)
    plan = QuantPlan(target.name, ranges.value, dict(precisions), {}, carried, inputs)
    params = {
        layer.name: round_layer(model, layer, precisions[layer.name], plan.layer_input(layer.input), target, ranges)
        for layer in layers
    }
    return QuantPlan(target.name, ranges.value, dict(precisions), params, carried, inputs)


def activation_grid(
    tensor: QuantizedTensor, statistics: Statistics, bits: int, target: Target, ranges: RangeMethod
) -> Grid:
    """The grid of a tensor, or of the one whose grid it keeps."""
    stats = statistics.tensors[tensor.same_grid_as or tensor.name]
    kind = target.activation_kind(bits)
    return make_grid(*ESTIMATORS[ranges](stats, kind), kind)


def round_layer(
    model: Model, layer: Layer, precision: Precision, activation: Grid, target: Target, ranges: RangeMethod
) -> LayerParams:
    """A layer's codes at a precision."""
    values = weights_of(model, [name for name in (layer.weight, layer.bias) if name])
    weight, bias = values[layer.weight], values[layer.bias] if layer.bias else None
    axis = layer.channel_axis if target.per_channel and layer.per_channel else None
    grid = weight_grid(weight, target.weight_kind(precision.weight), axis, ranges)
    if target.integer_bias and bias is not None and layer.bias_node is None:
        # A channel of nearly zero weights would get a step too fine for its int32 bias.
        least = np.abs(bias) / (float(activation.scale) * _BIAS_STEPS)
        grid = with_least_scale(grid, least if axis is not None else least.max())
    return LayerParams(quantize(weight, grid), grid, None if bias is None else bias.astype(np.float32))


def _shared_bits(tensor: QuantizedTensor, precisions: Mapping[str, Precision]) -> int:
    bits = {precisions[layer].activation for layer in tensor.layers}
    assert len(bits) == 1, f"layers that read {tensor.name} disagree on its bits: {sorted(bits)}"
    return bits.pop()
