"""Second-order rounding: a weight at a time, its error made good by the weights that are not rounded yet.

Rows of weights are multiplied with inputs whose second moments H are known. Rounding the columns one by one, largest
diagonal of H first, and moving the others by the Cholesky factor of the inverse of H keeps the error of the products
small (GPTQ). What the inputs have lost before they arrive is a move of the weights before that (GPTAQ). Every array has
groups as its first axis: a depthwise layer has a small H for each channel.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]

# Of the mean of the diagonal, added to it: few samples leave directions of which H knows nothing.
DAMPING = 0.01
# Columns that are rounded before the others hear of it, and the width below which an inverse is taken at once.
BATCH, SMALL = 32, 64
# Weights that are worked on at a time.
VALUES = 2**20
# How far a weight may lie from its grid point, in steps, and surely be rounded to it again.
HALF = 0.49


@dataclass(frozen=True)
class Grid:
    """The grid of each weight: arrays in the shape of the weights, or ones that broadcast to it."""

    scale: npt.NDArray[Any]
    zero_point: npt.NDArray[Any]
    low: int
    high: int


def damped(moments: FloatArray, damping: float = DAMPING) -> FloatArray:
    """Second moments with a share of the mean of their diagonal added to it; never singular."""
    size = moments.shape[-1]
    mean = np.trace(moments, axis1=-2, axis2=-1)[..., None, None] / size
    return moments + np.where(mean > 0, damping * mean, 1.0) * np.eye(size)


def inverse_factor(moments: FloatArray) -> FloatArray:
    """The upper triangular U with U^T U the inverse of the damped second moments."""
    lower = np.linalg.cholesky(moments[..., ::-1, ::-1])
    return _inverse_upper(np.asarray(lower[..., ::-1, ::-1], np.float64))


def arriving_move(weight: FloatArray, lost: FloatArray, moments: FloatArray) -> FloatArray:
    """What the weights should move by for what their inputs have lost: W (X - Xq) Xq^T by the inverse of H."""
    moved = np.linalg.solve(moments, (weight @ lost).swapaxes(1, 2))
    return np.asarray(moved.swapaxes(1, 2), np.float64)


def round_columns(weight: FloatArray, moments: FloatArray, grid: Grid) -> tuple[npt.NDArray[Any], FloatArray]:
    """Quantized values of weights [groups, rows, columns] for damped moments [groups, columns, columns].

    Also gives what each was rounded from, within half a step of it.
    """
    order = np.argsort(-np.diagonal(moments, axis1=-2, axis2=-1), axis=-1, kind="stable")
    ranked = np.take_along_axis(np.take_along_axis(moments, order[:, :, None], 1), order[:, None, :], 2)
    factor, columns, back = inverse_factor(ranked), order[:, None, :], np.argsort(order, axis=-1)[:, None, :]
    quantized, source = np.empty(weight.shape, np.int32), np.empty(weight.shape)
    # Rows do not hear of each other: some at a time keep what lies in memory small.
    some = max(VALUES // (weight.shape[0] * weight.shape[2]), 1)
    for start in range(0, weight.shape[1], some):
        rows = slice(start, start + some)
        given, scale, zero = (
            columns_first(np.take_along_axis(np.broadcast_to(each, weight.shape)[:, rows], columns, 2))
            for each in (weight, grid.scale, grid.zero_point)
        )
        found = _rounded(given, factor, Grid(scale, zero, grid.low, grid.high))
        quantized[:, rows], source[:, rows] = (np.take_along_axis(each.transpose(1, 2, 0), back, 2) for each in found)
    return quantized, source


def columns_first(values: npt.NDArray[Any]) -> FloatArray:
    """Values [groups, rows, columns] as [columns, groups, rows]: what is worked on a column at a time lies together."""
    return np.ascontiguousarray(values.transpose(2, 0, 1), np.float64)


def _rounded(weight: FloatArray, factor: FloatArray, grid: Grid) -> tuple[FloatArray, FloatArray]:
    """The columns [columns, groups, rows] in the order given; those of later batches are moved once a batch."""
    left, quantized, source = weight.copy(), np.empty_like(weight), np.empty_like(weight)
    for start in range(0, len(weight), BATCH):
        end = min(start + BATCH, len(weight))
        part, errors = left[start:end], np.empty((end - start, *weight.shape[1:]))
        for place, column in enumerate(range(start, end)):
            scale, zero = grid.scale[column], grid.zero_point[column]
            steps = np.clip(np.rint(part[place] / scale) + zero, grid.low, grid.high)
            value = scale * (steps - zero)
            off = part[place] - value
            quantized[column], source[column] = steps, value + np.clip(off, -HALF * scale, HALF * scale)
            errors[place] = off / factor[:, column, column, None]
            part[place + 1 :] -= factor[:, column, column + 1 : end].T[:, :, None] * errors[place]
        left[end:] -= products(factor[:, start:end, end:], errors)
    return quantized, source


def products(matrices: FloatArray, values: FloatArray) -> FloatArray:
    """Columns [columns, groups, rows] times the transposed matrix of each group."""
    return (matrices.swapaxes(1, 2) @ values.transpose(1, 0, 2)).transpose(1, 0, 2)


def _inverse_upper(upper: FloatArray) -> FloatArray:
    """The inverse of upper triangular matrices, by halves."""
    size = upper.shape[-1]
    if size <= SMALL:
        return np.triu(np.linalg.inv(upper))
    half = size // 2
    inverse = np.zeros_like(upper)
    first, last = _inverse_upper(upper[..., :half, :half]), _inverse_upper(upper[..., half:, half:])
    inverse[..., :half, :half], inverse[..., half:, half:] = first, last
    inverse[..., :half, half:] = -first @ upper[..., :half, half:] @ last
    return inverse
