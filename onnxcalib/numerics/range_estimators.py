"""Range estimators: from statistics of an activation, or from a weight itself, to the range of its grid."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import numpy.typing as npt

from onnxcalib.numerics.quant_params import Array, QuantParams, QuantScheme, make_qparams, rounding_errors
from onnxcalib.numerics.range_search import least_error_ranges
from onnxcalib.numerics.statistics import TensorStatistics

Range = tuple[float, float]
FloatArray = npt.NDArray[np.float64]

PERCENTILE = 99.99
# What clipping counts at eight bits: rounding errors of many values average out, those of a few clipped ones do not. By
# `mse` alone 2 left 22 % less loss on unseen samples than 1 on ResNet-50, and 15, 6, 2, -1, -2 % less on five others.
CLIPPING, CLIPPING_BITS = 2.0, 8
_CANDIDATES = 96
_BLOCK = 2**15  # values that are rounded at a time
_SHARES = np.linspace(1.0, 0.25, 76)  # of the range between the extremes of a weight
_LONGEST = 8192  # values that are added up at a time


def minmax(stats: TensorStatistics, _scheme: QuantScheme) -> Range:
    """The extremes."""
    return stats.low, stats.high


def averaged(stats: TensorStatistics, _scheme: QuantScheme) -> Range:
    """The extremes of a sample, averaged over samples (the paper's choice)."""
    return stats.mean_low, stats.mean_high


def percentile(stats: TensorStatistics, _scheme: QuantScheme) -> Range:
    """The range that leaves out the outermost 0.01 % on either side."""
    centres, counts = _values(stats)
    if counts.sum() == 0:
        return stats.low, stats.high
    share = np.cumsum(counts) / counts.sum()
    half_bin = (stats.high - stats.low) / len(stats.counts) / 2
    first = int(np.searchsorted(share, 1 - PERCENTILE / 100))
    last = int(np.searchsorted(share, PERCENTILE / 100))
    low = stats.low if first == 0 else float(centres[first]) - half_bin
    return low, float(centres[min(last, len(centres) - 1)]) + half_bin


def mse(stats: TensorStatistics, scheme: QuantScheme) -> Range:
    """The range with the least squared rounding and clipping error, each sample's relative to its own energy.

    At eight bits clipping counts double. Absolute errors would let the few samples with the largest values decide for
    all the others.
    """
    centres = _values(stats)[0]
    used = stats.relative > 0
    if not used.any():  # a constant tensor has no histogram, and every range would look as good as any other
        return stats.low, stats.high
    centres, counts = centres[used], stats.relative[used].astype(np.float64)
    least, most = min(stats.low, 0.0), max(stats.high, 0.0)

    errors = partial(_histogram_errors, centres, counts, scheme)
    # Both ends shrink together first: at few bits, searching one end at a time sticks far from the best.
    parts = np.linspace(1.0, 1 / _CANDIDATES, _CANDIDATES)
    together = float(parts[errors(least * parts, most * parts).argmin()])
    low, high = least * together, most * together
    for _ in range(2):
        before, high = low, _best(partial(errors, low), most)
        low = _best(partial(errors, highs=high), least)
        if low == before:  # searched again, both ends would be found where they are
            break
    return low, high


def entropy(stats: TensorStatistics, scheme: QuantScheme) -> Range:
    """The range whose quantized histogram diverges least (Kullback-Leibler) from the clipped one."""
    counts = stats.counts.astype(np.float64)
    edges = np.linspace(stats.low, stats.high, len(counts) + 1)
    if counts.sum() == 0 or stats.high <= stats.low:
        return stats.low, stats.high
    reach = max(-stats.low, stats.high)
    levels = 2 ** (scheme.bits - 1) if stats.low < 0 else 2**scheme.bits
    best = (np.inf, reach)
    for limit in np.linspace(reach / _CANDIDATES, reach, _CANDIDATES):
        inside = (edges[1:] > -limit) & (edges[:-1] < limit)
        best = min(best, (_divergence(counts, inside, levels), float(limit)))
    return max(stats.low, -best[1]), min(stats.high, best[1])


ESTIMATORS: dict[str, Callable[[TensorStatistics, QuantScheme], Range]] = {
    "minmax": minmax,
    "averaged": averaged,
    "percentile": percentile,
    "mse": mse,
    "entropy": entropy,
}


def weight_qparams(weight: Array, scheme: QuantScheme, axis: int | None, method: str) -> QuantParams:
    """The weight's own grid: its extremes for minmax and averaged, else the least squared error, channel by channel."""
    rows = np.moveaxis(weight, axis, 0).reshape(weight.shape[axis], -1) if axis is not None else weight.reshape(1, -1)
    low, high = _row_ranges(rows, scheme, method)
    if axis is None:
        return make_qparams(low[0], high[0], scheme)
    return make_qparams(low, high, scheme, axis)


def blockwise_qparams(weight: Array, scheme: QuantScheme, axis: int, block: int, method: str) -> QuantParams:
    """The same for blocks along an axis; what the last one lacks counts as zero, which every grid holds."""
    last = np.moveaxis(weight, axis, -1)
    padded = np.pad(last, [(0, 0)] * (weight.ndim - 1) + [(0, -weight.shape[axis] % block)])
    ranges = _row_ranges(padded.reshape(-1, block), scheme, method)
    low, high = (np.moveaxis(ends.reshape(*last.shape[:-1], -1), -1, axis) for ends in ranges)
    return replace(make_qparams(low, high, scheme, axis), block=block)


def _row_ranges(rows: Array, scheme: QuantScheme, method: str) -> tuple[FloatArray, FloatArray]:
    low, high = rows.min(axis=1).astype(np.float64), rows.max(axis=1).astype(np.float64)
    return _least_error(rows, low, high, scheme) if method in ("mse", "percentile", "entropy") else (low, high)


def _least_error(rows: Array, low: FloatArray, high: FloatArray, scheme: QuantScheme) -> tuple[FloatArray, FloatArray]:
    step = max(_BLOCK // rows.shape[1], 1)  # few rows at a time stay in the processor's cache
    for start in range(0, len(rows), step):
        part = slice(start, start + step)

        def errors(qparams: QuantParams, part: slice = part) -> FloatArray:
            return _squares(rounding_errors(rows[part], qparams))

        low[part], high[part] = least_error_ranges(errors, low[part], high[part], scheme, _SHARES)
    return low, high


def _squares(rows: Array) -> FloatArray:
    """The sum of squares of each row; of longer parts BLAS would add up in an order that depends on the machine."""
    total = np.zeros(len(rows))
    for start in range(0, rows.shape[1], _LONGEST):
        part = rows[:, start : start + _LONGEST].astype(np.float64)
        total += np.matmul(part[:, np.newaxis, :], part[:, :, np.newaxis])[:, 0, 0]
    return total


def _histogram_errors(
    centres: Array, counts: FloatArray, scheme: QuantScheme, lows: npt.ArrayLike, highs: npt.ArrayLike
) -> FloatArray:
    """The squared errors of a histogram on the grids of many ranges."""
    lows, highs = np.broadcast_arrays(lows, highs)
    found = np.empty(len(lows))
    step = max(_BLOCK // len(centres), 1)
    for start in range(0, len(lows), step):
        part = slice(start, start + step)
        off = rounding_errors(centres.reshape(1, -1), make_qparams(lows[part], highs[part], scheme, 0))
        np.multiply(off, off, out=off)
        if scheme.bits >= CLIPPING_BITS:
            outside = (centres < np.reshape(lows[part], (-1, 1))) | (centres > np.reshape(highs[part], (-1, 1)))
            np.multiply(off, CLIPPING, out=off, where=outside)
        found[part] = [np.dot(counts, row) for row in off]
    return found


def _best(errors: Callable[[FloatArray], FloatArray], end: float) -> float:
    if end == 0.0:
        return end
    coarse = np.linspace(end / _CANDIDATES, end, _CANDIDATES)
    around = coarse[errors(coarse).argmin()]
    fine = np.linspace(max(around - end / _CANDIDATES, end / _CANDIDATES, key=abs), around, 8)
    ends = np.array([around, *fine])
    return float(ends[errors(ends).argmin()])


def _values(stats: TensorStatistics) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int32]]:
    edges = np.linspace(stats.low, stats.high, len(stats.counts) + 1)
    return ((edges[1:] + edges[:-1]) / 2).astype(np.float32), stats.counts


def _divergence(counts: FloatArray, inside: npt.NDArray[np.bool_], levels: int) -> float:
    kept = counts[inside].copy()
    if len(kept) < levels or kept.sum() == 0:
        return np.inf
    where = np.flatnonzero(inside)
    reference = kept.copy()
    reference[0] += counts[: where[0]].sum()
    reference[-1] += counts[where[-1] + 1 :].sum()
    level = np.arange(len(kept)) * levels // len(kept)
    filled = np.bincount(level, weights=kept > 0, minlength=levels)
    total = np.bincount(level, weights=kept, minlength=levels)
    spread = np.where(kept > 0, (total / np.maximum(filled, 1))[level], 0.0)
    p, q = reference / reference.sum(), spread / spread.sum()
    both = (p > 0) & (q > 0)
    # Mass clipped into an end bin that was empty has no counterpart; a floor keeps its cost finite.
    lost = p[(p > 0) & (q == 0)]
    return float((p[both] * np.log(p[both] / q[both])).sum() + (lost * np.log(np.maximum(lost, 1e-12) / 1e-9)).sum())
