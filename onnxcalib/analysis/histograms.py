"""Histograms of what layers weigh and read, with the ranges of their grids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from onnxcalib.algorithms.calibration import calibrate
from onnxcalib.analysis.diagnose import SAMPLES
from onnxcalib.data import Dataset, first
from onnxcalib.model.layers import Layer, weights_of
from onnxcalib.model.placement import InsertionPoints, QuantizedTensor
from onnxcalib.model.prepare import Model
from onnxcalib.model.quantized import QuantizedFile, QuantizedLayer
from onnxcalib.model.shapes import typed
from onnxcalib.model.subgraph import upstream
from onnxcalib.numerics.quant_params import Array, QuantParams, dequantize
from onnxcalib.numerics.statistics import TensorStatistics
from onnxcalib.progress import silent

BINS = 64


@dataclass(frozen=True)
class RangeHistogram:
    """A histogram, and the range of the grid over it."""

    low: float  # of the values
    high: float
    counts: npt.NDArray[np.int64]
    range_low: float
    range_high: float

    @property
    def clipped(self) -> float:
        """The share of values outside the range, as far as the bins can tell."""
        step = (self.high - self.low) / len(self.counts)
        middles = self.low + step * (np.arange(len(self.counts)) + 0.5)
        outside = (middles < self.range_low - step) | (middles > self.range_high + step)
        return float(self.counts[outside].sum() / max(self.counts.sum(), 1))


@dataclass(frozen=True)
class LayerHistograms:
    """What a layer weighs, in steps of its channels' grids, and what it reads; exact zeros of that are left out."""

    layer: str
    weight: RangeHistogram
    input: RangeHistogram | None


def layer_histograms(
    model: Model, layers: Sequence[Layer], file: QuantizedFile, data: Dataset
) -> list[LayerHistograms]:
    """Requires layers that the file has quantized."""
    wanted = {layer.input: QuantizedTensor(layer.input, (), shared=False) for layer in layers}
    before = replace(model, proto=upstream(typed(model.proto), list(wanted))[0])
    read = calibrate(before, InsertionPoints(wanted), first(data, SAMPLES), silent).tensors
    quantized = {layer.name: layer for layer in file.layers}
    weights = weights_of(model, [layer.weight for layer in layers])
    return [
        LayerHistograms(
            layer.name,
            _weight_spread(layer, quantized[layer.name], weights[layer.weight]),
            _input_spread(quantized[layer.name].input, read[layer.input]),
        )
        for layer in layers
    ]


def _weight_spread(layer: Layer, quantized: QuantizedLayer, weight: Array) -> RangeHistogram:
    qparams = quantized.weight
    stored = dequantize(quantized.quantized, qparams).reshape(weight.shape)
    rows, written = (np.moveaxis(each, layer.channel_axis, -1).astype(np.float64) for each in (weight, stored))
    axes = tuple(range(rows.ndim - 1))
    # Tuning multiplies whole channels; undone here, for what matters is the shape within the range.
    factor = (rows * written).sum(axis=axes) / np.maximum((rows * rows).sum(axis=axes), 1e-30)
    steps = rows * np.where(factor > 0, factor, 1.0) / qparams.scale + qparams.zero_point
    counts, edges = np.histogram(steps, BINS)
    return RangeHistogram(
        float(edges[0]), float(edges[-1]), counts.astype(np.int64), float(qparams.low), float(qparams.high)
    )


def _input_spread(qparams: QuantParams | None, read: TensorStatistics) -> RangeHistogram | None:
    if qparams is None or not read.high > read.low:
        return None
    low, high = (float(bound) for bound in qparams.range)
    return RangeHistogram(read.low, read.high, read.counts.reshape(BINS, -1).sum(axis=1), low, high)
