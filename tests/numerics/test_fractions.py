"""Fractions with odd denominators."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onnxcalib.numerics.fractions import MOST, common_fractions, near_fractions


@pytest.mark.parametrize("base", [1, 11])
def test_fractions_are_near_and_odd_below(base: int) -> None:
    ratios = np.exp(np.random.default_rng(3).uniform(np.log(1e-3), np.log(2), 200))
    found = near_fractions(ratios, base, 1e-3, 1e-2)
    near = np.abs(found / ratios - 1)
    assert near.max() <= 1e-2
    assert near.max() > 0
    below = [Fraction(value).limit_denominator(MOST).denominator for value in found[near > 0]]
    assert all(number % 2 for number in below)
    # What is added over the base keeps an odd denominator in common with these.
    assert all(number * base <= MOST or number % base == 0 for number in below)


def test_a_ratio_with_nothing_near_stays() -> None:
    found = near_fractions(np.array([1e-6, 0.2501]), 1, 1e-3, 1e-2)
    assert found[0] == 1e-6
    assert found[1] != 0.2501


@pytest.mark.parametrize("bounds", [(1e-3, 1e-2), (2.0**-11, 2.0**-8), (1e-2, 1e-2)])
def test_the_first_fraction_near_enough_is_taken_else_the_nearest(bounds: tuple[float, float]) -> None:
    ratios = np.exp(np.random.default_rng(5).uniform(np.log(1e-4), np.log(3), 100))
    for ratio, found in zip(ratios, near_fractions(ratios, 3, *bounds), strict=True):
        tried = [round(ratio * below) / below for below in range(3, MOST + 1, 6)]
        misses = [abs(value / ratio - 1) for value in tried]
        near = [value for value, miss in zip(tried, misses, strict=True) if miss <= bounds[0]]
        best = near[0] if near else tried[int(np.argmin(misses))]
        taken = bounds[0] < bounds[1] and min(misses) < bounds[1]
        assert found == pytest.approx(best if taken else ratio, rel=1e-12)


def test_the_smallest_common_denominator_is_odd() -> None:
    assert common_fractions([0.5, 0.25], 0.0) is None
    denominator, numerators = common_fractions([0.334, 0.8], 0.01) or (0, [])
    assert (denominator, *numerators) == (15, 5, 12)


@settings(max_examples=300)
@given(st.lists(st.floats(0.05, 20), min_size=1, max_size=3), st.data())
def test_common_fractions_keep_their_bounds(ratios: list[float], data: st.DataObject) -> None:
    """Bounds that the ratios themselves keep, some of them barely."""
    room = st.sampled_from([1.0, 1.0001, 1.003, 2.0, np.inf])
    least = ratios[0] / data.draw(room)
    most = [ratio / ratios[0] * data.draw(room) for ratio in ratios[1:]]
    found = common_fractions(ratios, 0.01, least, most)
    assert found is not None
    denominator, numerators = found
    assert denominator % 2 == 1
    assert (np.abs(numerators / denominator / ratios - 1) <= 0.01).all()
    assert numerators[0] / denominator >= least * (1 - 1e-8)
    assert (numerators[1:] / numerators[0] <= np.array(most) * (1 + 1e-8)).all()
