"""Fractions with an odd denominator: whole multiples of one are never halfway between two codes."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
# Multiples stay 1 / (2 * MOST) of a step away from ties; sums in float32 err by less.
MOST = 4095


def common_denominator(ratios: npt.ArrayLike, within: float) -> int | None:
    """The smallest odd number by which all ratios are nearly whole, as seen from each; None if there is none."""
    wanted = np.asarray(ratios, np.float64)
    for denominator in range(1, MOST + 1, 2):
        if (_misses(wanted, denominator) <= within).all():
            return denominator
    return None


def near_fractions(ratios: npt.NDArray[Any], base: int, within: float, at_most: float) -> Floats:
    """Each ratio as the first fraction near enough, over odd multiples of the base; itself where none is near."""
    found = np.asarray(ratios, np.float64)
    wanted, best = found.copy(), np.full(found.shape, at_most)
    for denominator in range(base, MOST + 1, 2 * base):
        misses = _misses(wanted, denominator)
        better = (misses < best) & (best > within)
        found = np.where(better, np.rint(wanted * denominator) / denominator, found)
        best = np.where(better, misses, best)
        if (best <= within).all():
            break
    return found


def _misses(wanted: Floats, denominator: int) -> Floats:
    """How far the nearest fraction over the denominator is, as seen from what is wanted."""
    misses: Floats = np.abs(np.rint(wanted * denominator) / (wanted * denominator) - 1)
    return misses
