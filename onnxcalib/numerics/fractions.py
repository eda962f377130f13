"""Fractions with an odd denominator: whole multiples of one are never halfway between two quantized values."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
# Multiples stay 1 / (2 * MOST) of a step away from ties; sums in float32 err by less.
MOST = 4095
# What meets a bound but for the rounding of float64 meets it.
NEARLY = 1 - 1e-9
_AT_ONCE = 32  # denominators


def common_fractions(
    ratios: npt.ArrayLike, within: float, least: float = 0.0, most: npt.ArrayLike = np.inf
) -> tuple[int, Floats] | None:
    """The smallest odd number by which all ratios are nearly whole, as seen from each, and the numerators over it.

    The first fraction is at least `least`, the others are at most `most` times the first; None if there are none.
    """
    wanted, limits = np.asarray(ratios, np.float64), np.asarray(most, np.float64)
    for denominator in range(1, MOST + 1, 2):
        numerators = np.rint(wanted * denominator)
        numerators[0] = max(numerators[0], np.ceil(NEARLY * least * denominator), 1)
        numerators[1:] = np.minimum(numerators[1:], np.floor(limits * numerators[0] / NEARLY))
        if (_misses(numerators, wanted * denominator) <= within).all():
            return denominator, numerators
    return None


def near_fractions(ratios: npt.NDArray[Any], base: int, within: float, at_most: float) -> Floats:
    """Each ratio as the first fraction near enough, over odd multiples of the base; itself where none is near.

    Where all are farther than `within` but one is nearer than `at_most`, the nearest is taken.
    """
    found = np.array(ratios, np.float64).reshape(-1)
    best, left = np.full(found.shape, at_most), np.arange(found.size if at_most > within else 0)
    wanted, denominators = found.copy(), np.arange(base, MOST + 1, 2 * base, dtype=np.float64)
    for start in range(0, len(denominators), _AT_ONCE):
        if not left.size:
            break
        tried = denominators[start : start + _AT_ONCE, np.newaxis]
        numerators = np.rint(wanted[left] * tried)
        misses = np.nan_to_num(_misses(numerators, wanted[left] * tried), nan=np.inf)
        near = misses <= within
        reached = near.any(axis=0)
        chosen, each = np.where(reached, near.argmax(axis=0), misses.argmin(axis=0)), np.arange(left.size)
        better = misses[chosen, each] < best[left]
        where, who = chosen[better], left[better]
        found[who], best[who] = numerators[where, each[better]] / tried[where, 0], misses[where, each[better]]
        left = left[~reached]
    return found.reshape(np.shape(ratios))


def _misses(numerators: Floats, wanted: Floats) -> Floats:
    """How far numerators are from the wanted ones, as seen from these."""
    misses: Floats = np.abs(numerators / wanted - 1)
    return misses
