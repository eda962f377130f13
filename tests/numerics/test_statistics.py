"""Streamed statistics: the same whatever the batches, complete, and alert."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from onnxcalib.numerics.statistics import (
    BINS,
    VALUES,
    VALUES_OF_A_SAMPLE,
    Extremes,
    Histogram,
    TensorStatistics,
    thinned,
)


def observed(batches: list[np.ndarray]) -> TensorStatistics:
    extremes = Extremes()
    for batch in batches:
        extremes.update(batch, len(batch))
    histogram = Histogram(extremes)
    for batch in batches:
        histogram.take(thinned(batch, len(batch), sum(map(len, batches))))
    return histogram.statistics()


SAMPLES = hnp.arrays(
    np.float32,
    st.tuples(st.integers(2, 12), st.integers(1, 20)),
    elements=st.integers(-8000, 8000).map(lambda n: n / 8),
)


@settings(max_examples=80)
@given(SAMPLES, st.data())
def test_batching_does_not_matter(values: np.ndarray, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(1, len(values) - 1))))
    whole, pieces = observed([values]), observed(np.split(values, cuts))
    assert (pieces.low, pieces.high) == (whole.low, whole.high) == (values.min(), values.max())
    np.testing.assert_array_equal(pieces.counts, whole.counts)
    np.testing.assert_allclose(pieces.relative, whole.relative, rtol=1e-9)
    np.testing.assert_allclose(
        (pieces.mean_low, pieces.mean_high), (whole.mean_low, whole.mean_high), rtol=1e-9, atol=1e-9
    )


@given(SAMPLES)
def test_means_are_those_of_each_samples_extremes(values: np.ndarray) -> None:
    stats = observed([values])
    exact = values.astype(np.float64)
    assert stats.mean_low == pytest.approx(exact.min(axis=1).mean(), rel=1e-9, abs=1e-9)
    assert stats.mean_high == pytest.approx(exact.max(axis=1).mean(), rel=1e-9, abs=1e-9)


@given(SAMPLES)
def test_every_value_but_zero_is_counted(values: np.ndarray) -> None:
    stats = observed([values])
    expected = np.count_nonzero(values) if values.max() > values.min() else 0
    assert stats.counts.sum() == expected
    assert stats.counts.shape == (BINS,)
    assert (stats.counts >= 0).all()


def test_counts_are_those_of_a_histogram() -> None:
    values = np.random.default_rng(0).normal(size=(10, 500)).astype(np.float32)
    stats = observed([values])
    expected, _ = np.histogram(values.astype(np.float64), BINS, (stats.low, stats.high))
    # A value on the border of two bins may fall into either.
    assert np.abs(np.cumsum(stats.counts) - np.cumsum(expected)).max() <= 1


def test_each_sample_weighs_the_same_in_the_relative_histogram() -> None:
    values = np.random.default_rng(0).normal(size=(2, 3, 100)).astype(np.float32)
    values[1] *= 20
    stats = observed([values])
    centres = np.linspace(stats.low, stats.high, BINS + 1)[:-1] + (stats.high - stats.low) / BINS / 2
    # The energy of each sample, relative to its own mean square, is its number of values.
    assert np.dot(stats.relative, centres**2) == pytest.approx(600, rel=0.01)


def test_large_samples_are_thinned_evenly_but_their_extremes_are_exact() -> None:
    values = np.random.default_rng(0).normal(size=(2, 5 * VALUES_OF_A_SAMPLE)).astype(np.float32)
    values[1, 12345] = 99.0
    stats = observed([values])
    assert stats.high == 99.0
    assert 2 * VALUES_OF_A_SAMPLE * 0.9 <= stats.counts.sum() <= 2 * VALUES_OF_A_SAMPLE * 1.1


def test_many_samples_share_the_values_that_a_histogram_takes() -> None:
    batches = [np.random.default_rng(seed).normal(size=(8, 1024 * 7)).astype(np.float32) for seed in range(64)]
    assert VALUES * 0.9 <= observed(batches).counts.sum() <= VALUES * 1.1


def test_a_tensor_without_a_batch_axis_is_one_sample() -> None:
    extremes = Extremes()
    extremes.update(np.array([[1.0, 5.0], [2.0, 3.0]], np.float32), 4)
    extremes.update(np.array(-7.0, np.float32), 4)
    assert (extremes.low, extremes.high) == (-7.0, 5.0)
    assert extremes.means == (-3.0, -1.0)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [(0, 0), (1, 2)])
def test_what_is_not_finite_is_noticed(value: float, place: tuple[int, int]) -> None:
    values = np.ones((3, 4), np.float32)
    extremes = Extremes()
    extremes.update(values, 3)
    assert extremes.is_finite
    values[place] = value
    extremes.update(values, 3)
    extremes.update(np.ones((3, 4), np.float32), 3)
    assert not extremes.is_finite


def test_the_samples_with_the_extremes_are_remembered() -> None:
    values = np.zeros((6, 3), np.float32)
    values[1, 2], values[4, 0] = -3.0, 8.0
    extremes = Extremes()
    for first in (0, 2, 4):
        extremes.update(values[first : first + 2], 2, first)
    assert extremes.samples == {"low": 1, "high": 4}


def test_empty_tensors_are_no_statistics() -> None:
    stats = observed([np.zeros((2, 0), np.float32)])
    assert (stats.low, stats.high, stats.mean_low, stats.mean_high) == (0, 0, 0, 0)
    assert stats.counts.sum() == 0
