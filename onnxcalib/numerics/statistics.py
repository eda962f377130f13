"""Streamed statistics of a tensor: extremes, averaged extremes and a histogram, in constant memory."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from onnxcalib.numerics.quant_params import Array

BINS = 4096
# Values that enter a histogram, of all samples and of one: a shape needs no more, and the extremes are exact anyway.
VALUES, VALUES_OF_A_SAMPLE = 2**19, 8192


@dataclass(frozen=True)
class TensorStatistics:
    """What calibration learned of one tensor."""

    low: float
    high: float
    mean_low: float  # the smallest value of a sample, averaged over samples
    mean_high: float
    counts: npt.NDArray[np.int32]  # histogram over low..high; exact zeros are left out, every grid holds them
    relative: npt.NDArray[np.float32]  # the same, each sample weighted by one over its mean square


class Extremes:
    """First pass: smallest and largest values."""

    def __init__(self) -> None:
        self.low = np.inf
        self.high = -np.inf
        self.samples: dict[str, int] = {}  # that have the smallest value, and the largest
        self._sums = np.zeros(2)
        self._samples = 0
        self.is_finite = True

    def update(self, values: Array, samples: int, first: int = 0) -> None:
        """Takes a batch of so many samples, counted on from the first."""
        if values.size == 0:
            return
        rows = _rows(values, samples)
        lows, highs = rows.min(axis=1), rows.max(axis=1)
        self.is_finite &= bool(np.isfinite(lows).all() and np.isfinite(highs).all())
        if lows.min() < self.low:
            self.low, self.samples["low"] = float(lows.min()), first + int(lows.argmin())
        if highs.max() > self.high:
            self.high, self.samples["high"] = float(highs.max()), first + int(highs.argmax())
        self._sums += (lows.sum(dtype=np.float64), highs.sum(dtype=np.float64))
        self._samples += len(rows)

    @property
    def means(self) -> tuple[float, float]:
        """Averaged smallest and largest value."""
        low, high = self._sums / max(self._samples, 1)
        return float(low), float(high)


class Histogram:
    """Second pass: counts between the extremes that the first pass found."""

    def __init__(self, extremes: Extremes) -> None:
        self._extremes = extremes
        self._counts = np.zeros(BINS, np.int64)
        self._relative = np.zeros(BINS)

    def take(self, rows: Array) -> None:
        """Takes a batch, a row a sample."""
        low, high = self._extremes.low, self._extremes.high
        if rows.size == 0 or not high > low:
            return
        energy = np.einsum("ij,ij->i", rows, rows, dtype=np.float64) / rows.shape[1]
        nonzero = rows != 0
        flat = rows[nonzero]
        where = ((flat - np.float32(low)) * np.float32(BINS / (high - low))).astype(np.int32)
        np.clip(where, 0, BINS - 1, out=where)
        self._counts += np.bincount(where, minlength=BINS)
        weights = np.repeat(1.0 / np.maximum(energy, 1e-30), nonzero.sum(axis=1))
        self._relative += np.bincount(where, weights=weights, minlength=BINS)

    def statistics(self) -> TensorStatistics:
        """The finished statistics."""
        low, high = self._extremes.low, self._extremes.high
        mean_low, mean_high = self._extremes.means
        if not np.isfinite(low):  # the tensor was never computed, or always empty
            low = high = mean_low = mean_high = 0.0
        found = self._counts.astype(np.int32), self._relative.astype(np.float32)
        return TensorStatistics(low, high, mean_low, mean_high, *found)


def thinned(values: Array, samples: int, of_all: int) -> Array:
    """One row a sample, of which a histogram takes some values, evenly: fewer where many samples share it."""
    rows = _rows(values, samples)
    wanted = min(max(VALUES // of_all, 1), VALUES_OF_A_SAMPLE)
    # An odd stride does not fall in step with rows or channels of even length.
    return rows[:, :: max(rows.shape[1] // wanted, 1) | 1]


def _rows(values: Array, samples: int) -> Array:
    """One row a sample; a tensor whose first axis does not count samples is one sample."""
    return values.reshape(samples, -1) if values.shape[:1] == (samples,) else values.reshape(1, -1)
