"""Ranges of weights that count the error of each by what it is multiplied with."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from onnxcalib.numerics.quant_params import Array, QuantParams, QuantScheme, make_qparams, rounding_errors
from onnxcalib.numerics.range_search import least_error_ranges

FloatArray = npt.NDArray[np.float64]

SHARES = np.linspace(1.0, 0.25, 31)  # of the range between the extremes; what is left to find fitted scales find
VALUES = 2**15  # that are rounded at a time


def weighted_qparams(weight: Array, importance: Array, scheme: QuantScheme, like: QuantParams) -> QuantParams:
    """A grid of the same kind as another, with the least squared error, each weighted by its importance."""
    axis, block = like.axis, like.block
    if axis is None:
        low, high = _least_error(weight.reshape(1, -1), importance.reshape(1, -1), scheme)
        return make_qparams(low[0], high[0], scheme)
    if block is None:
        rows = [np.moveaxis(each, axis, 0).reshape(weight.shape[axis], -1) for each in (weight, importance)]
        return make_qparams(*_least_error(rows[0], rows[1], scheme), scheme, axis)
    # What the last block lacks counts as zero, which every grid holds.
    last = [np.moveaxis(each, axis, -1) for each in (weight, importance)]
    room = [(0, 0)] * (weight.ndim - 1) + [(0, -weight.shape[axis] % block)]
    rows = [np.pad(each, room).reshape(-1, block) for each in last]
    ends = _least_error(rows[0], rows[1], scheme)
    low, high = (np.moveaxis(each.reshape(*last[0].shape[:-1], -1), -1, axis) for each in ends)
    return replace(make_qparams(low, high, scheme, axis), block=block)


def _least_error(rows: Array, importance: Array, scheme: QuantScheme) -> tuple[FloatArray, FloatArray]:
    low, high = rows.min(axis=1).astype(np.float64), rows.max(axis=1).astype(np.float64)
    step = max(VALUES // rows.shape[1], 1)
    for start in range(0, len(rows), step):
        part = slice(start, start + step)

        def errors(qparams: QuantParams, part: slice = part) -> FloatArray:
            off = rounding_errors(rows[part], qparams)
            found: FloatArray = np.einsum("ij,ij,ij->i", off, off, importance[part], dtype=np.float64)
            return found

        low[part], high[part] = least_error_ranges(errors, low[part], high[part], scheme, SHARES)
    return low, high
