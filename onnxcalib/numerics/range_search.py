"""The search for the range of each row of a weight that leaves the least error."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from onnxcalib.numerics.quant_params import QuantParams, QuantScheme, make_qparams

FloatArray = npt.NDArray[np.float64]
Errors = Callable[[QuantParams], FloatArray]  # of each row on its grid

HOPELESS = 4.0  # times the least error: narrower ranges are not tried then
NEIGHBOURS = 5  # bits up to which zero points beside that of the extremes are tried; at more they change little
SCALES = np.linspace(0.7, 1.4, 15)  # of the best one so far, with each of these zero points


def least_error_ranges(
    errors: Errors, low: FloatArray, high: FloatArray, scheme: QuantScheme, shares: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """The ends of each row's range: shares of what lies between its extremes, and zero points beside theirs."""
    best, share = np.full(len(low), np.inf), np.ones(len(low))
    for each in shares:
        error = errors(make_qparams(low * each, high * each, scheme, 0))
        better = error < best
        best[better], share[better] = error[better], each
        if (error > HOPELESS * best).all():  # what is cut off only grows
            break
    low, high = low * share, high * share
    if not scheme.symmetric and scheme.bits <= NEIGHBOURS:
        low, high = _moved(errors, scheme, best, low, high)
    return low, high


def _moved(
    errors: Errors, scheme: QuantScheme, best: FloatArray, low: FloatArray, high: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """The same with zero points one off, where that is better: of few steps one is much."""
    found = make_qparams(low, high, scheme, 0)
    steps, low, high, best = found.scale.astype(np.float64), low.copy(), high.copy(), best.copy()
    for off in (-1, 1):
        zero = np.clip(found.zero_point + off, found.low, found.high)
        for scale in SCALES:
            lows, highs = (found.low - zero) * steps * scale, (found.high - zero) * steps * scale
            error = errors(make_qparams(lows, highs, scheme, 0))
            better = error < best
            best[better], low[better], high[better] = error[better], lows[better], highs[better]
    return low, high
