"""Positions of sequences that count: what stands at padding is nobody's, and is left out."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Counts = npt.NDArray[np.bool_]  # [batch, positions]


def counts_for(values: Array, counts: Counts | None) -> Counts | None:
    """What counts along the leading axes of a tensor; None where all of it does, as it has no positions.

    They are its first two axes, or both in one as [batch * positions, channels].
    """
    if counts is None or values.ndim < 2:
        return None
    if values.ndim == 2:
        return counts.reshape(-1) if len(values) == counts.size and counts.shape[1] > 1 else None
    # With as many heads as positions, nobody can tell [batch, heads, positions, ...] from [batch, positions, ...].
    either_way = values.ndim > 3 and values.shape[2] == counts.shape[1]
    return counts if values.shape[:2] == counts.shape and not either_way else None


def counted(values: Array, counts: Counts | None) -> Array:
    """The rows of a tensor at positions that count, one after another; the tensor itself where all of it does."""
    own = counts_for(values, counts)
    return values if own is None else values[own]


def repeated(values: Array, counts: Counts | None) -> Array:
    """The tensor with each sample's positions that count over and over in place of padding: the shape stays.

    What has positions behind heads, as [batch, heads, positions, ...], is told by its sizes.
    """
    own = counts_for(values, counts)
    if own is None or counts is None:
        if counts is None or values.ndim < 4 or values.shape[1] == counts.shape[1]:
            return values
        heads = np.swapaxes(values, 1, 2)
        return np.swapaxes(repeated(heads, counts), 1, 2) if heads.shape[:2] == counts.shape else values
    chosen = np.tile(np.arange(counts.shape[1]), (len(counts), 1))
    for sample, mask in zip(chosen, counts, strict=True):
        if mask.any():
            sample[:] = np.resize(np.flatnonzero(mask), len(mask))
    rows = values.reshape(*counts.shape, *values.shape[own.ndim :])
    return rows[np.arange(len(counts))[:, None], chosen].reshape(values.shape)
