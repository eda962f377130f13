"""Histograms of what layers weigh and read, with the ranges of their grids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from onnxcalib.algorithms.calibration import calibrate
from onnxcalib.analysis.diagnose import SAMPLES
from onnxcalib.data import Dataset, first
from onnxcalib.model.layers import Layer, weights_of
from onnxcalib.model.placement import Places, QuantizedTensor
from onnxcalib.model.prepare import Model
from onnxcalib.model.quantized import QuantizedFile, QuantizedLayer
from onnxcalib.numerics.quant_params import Array, Grid, dequantize
from onnxcalib.numerics.statistics import TensorStatistics
from onnxcalib.progress import silent

BINS = 64


@dataclass(frozen=True)
class Spread:
    """A histogram, and the range of the grid over it."""

    low: float  # of the values
    high: float
    counts: npt.NDArray[np.int64]
    grid_low: float
    grid_high: float

    @property
    def clipped(self) -> float:
        """The share of values outside the range, as far as the bins can tell."""
        step = (self.high - self.low) / len(self.counts)
        middles = self.low + step * (np.arange(len(self.counts)) + 0.5)
        outside = (middles < self.grid_low - step) | (middles > self.grid_high + step)
        return float(self.counts[outside].sum() / max(self.counts.sum(), 1))


@dataclass(frozen=True)
class LayerSpreads:
    """What a layer weighs, in steps of its channels' grids, and what it reads; exact zeros of that are left out."""

    layer: str
    weight: Spread
    input: Spread | None


def spreads(model: Model, layers: Sequence[Layer], file: QuantizedFile, data: Dataset) -> list[LayerSpreads]:
    """Requires layers that the file has quantized."""
    wanted = {layer.input: QuantizedTensor(layer.input, (), carried=False) for layer in layers}
    read = calibrate(model, Places(wanted), first(data, SAMPLES), silent).tensors
    quantized = {layer.name: layer for layer in file.layers}
    weights = weights_of(model, [layer.weight for layer in layers])
    return [
        LayerSpreads(
            layer.name,
            _weight_spread(layer, quantized[layer.name], weights[layer.weight]),
            _input_spread(quantized[layer.name].input, read[layer.input]),
        )
        for layer in layers
    ]


def _weight_spread(layer: Layer, quantized: QuantizedLayer, weight: Array) -> Spread:
    grid = quantized.weight
    stored = dequantize(quantized.codes, grid).reshape(weight.shape)
    rows, written = (np.moveaxis(each, layer.channel_axis, -1).astype(np.float64) for each in (weight, stored))
    axes = tuple(range(rows.ndim - 1))
    # Tuning multiplies whole channels; undone here, for what matters is the shape within the range.
    factor = (rows * written).sum(axis=axes) / np.maximum((rows * rows).sum(axis=axes), 1e-30)
    steps = rows * np.where(factor > 0, factor, 1.0) / grid.scale + grid.zero_point
    counts, edges = np.histogram(steps, BINS)
    return Spread(float(edges[0]), float(edges[-1]), counts.astype(np.int64), float(grid.low), float(grid.high))


def _input_spread(grid: Grid | None, read: TensorStatistics) -> Spread | None:
    if grid is None or not read.high > read.low:
        return None
    low, high = (float(bound) for bound in grid.range)
    return Spread(read.low, read.high, read.counts.reshape(BINS, -1).sum(axis=1), low, high)
