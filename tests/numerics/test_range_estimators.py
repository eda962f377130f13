"""Range estimators on tensors whose best range is known."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from onnxcalib.numerics.quant_params import QuantParams, QuantScheme, fake_quantize, make_qparams
from onnxcalib.numerics.range_estimators import ESTIMATORS, averaged, entropy, minmax, mse, percentile, weight_qparams
from onnxcalib.numerics.statistics import BINS, Extremes, Histogram, TensorStatistics, thinned

UNSIGNED = [QuantScheme(bits, signed=False, symmetric=False) for bits in range(2, 9)]
SYMMETRIC = [QuantScheme(bits, signed=True, symmetric=True) for bits in range(2, 9)]
EIGHT = UNSIGNED[-1]


def observed(values: np.ndarray) -> TensorStatistics:
    extremes = Extremes()
    extremes.update(values, len(values))
    histogram = Histogram(extremes)
    histogram.take(thinned(values, len(values), len(values)))
    return histogram.statistics()


def gaussian(samples: int = 8, size: int = 4000, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0.3, 1.0, (samples, size)).astype(np.float32)


def with_outlier() -> np.ndarray:
    values = gaussian()
    values[3, 7] = 80.0
    return values


def with_loud_sample() -> np.ndarray:
    """Absolute errors would let it decide for all the others."""
    return gaussian(4, 1000) * np.array([20, 1, 1, 1], np.float32).reshape(4, 1)


def error(values: np.ndarray, qparams: QuantParams) -> float:
    """Each sample's squared error, relative to its own mean square."""
    off = (fake_quantize(values, qparams) - values.astype(np.float64)) ** 2
    return float((off.sum(axis=1) / (values.astype(np.float64) ** 2).mean(axis=1)).sum())


def test_minmax_is_exact() -> None:
    values = gaussian()
    assert minmax(observed(values), EIGHT) == (values.min(), values.max())


def test_averaged_is_the_mean_of_each_samples_extremes() -> None:
    values = gaussian()
    exact = values.astype(np.float64)
    assert averaged(observed(values), EIGHT) == pytest.approx((exact.min(axis=1).mean(), exact.max(axis=1).mean()))


@pytest.mark.parametrize("values", [gaussian(20, 4990), np.abs(gaussian(20, 4990)), -np.exp(gaussian(20, 4990))])
def test_percentile_is_numpys_within_a_bin(values: np.ndarray) -> None:
    low, high = percentile(observed(values), EIGHT)
    width = float(values.max() - values.min()) / BINS
    expected = np.percentile(values.astype(np.float64), [0.01, 99.99], method="inverted_cdf")
    assert (low, high) == pytest.approx(tuple(expected), abs=1.5 * width)


def test_percentile_clips_a_far_outlier() -> None:
    values = gaussian(20, 4990)
    values[0, 0] = 1000.0
    assert percentile(observed(values), EIGHT)[1] < 10


@pytest.mark.parametrize(
    "values", [gaussian(), with_outlier(), np.maximum(gaussian(), 0), np.exp(gaussian()), -np.abs(gaussian())]
)
@pytest.mark.parametrize("kind", [*UNSIGNED, *SYMMETRIC], ids=str)
def test_mse_is_not_worse_than_minmax(values: np.ndarray, kind: QuantScheme) -> None:
    stats = observed(values)
    best, widest = (
        error(values, make_qparams(*mse(stats, kind), kind)),
        error(values, make_qparams(*minmax(stats, kind), kind)),
    )
    assert best <= 1.01 * widest


SMALL = {"both signs": gaussian(4, 1000), "relu": np.maximum(gaussian(4, 1000), 0), "skewed": np.exp(gaussian(4, 1000))}


@pytest.mark.parametrize(
    ("values", "bits"),
    [
        *((values, bits) for values in SMALL.values() for bits in (3, 4, 8)),
        (with_loud_sample(), 3),
        (with_loud_sample(), 4),
        (with_loud_sample(), 8),
    ],
)
def test_mse_is_near_a_brute_force_search(values: np.ndarray, bits: int) -> None:
    kind = QuantScheme(bits, signed=False, symmetric=False)
    stats = observed(values)
    parts = np.linspace(0.05, 1.0, 40)
    lows = parts * stats.low if stats.low < 0 else [0.0]
    brute = min(error(values, make_qparams(low, high, kind)) for low in lows for high in parts * stats.high)
    assert error(values, make_qparams(*mse(stats, kind), kind)) <= 1.1 * brute


def test_what_is_clipped_counts_double_at_eight_bits() -> None:
    values = np.exp(1.5 * gaussian(4, 4000))  # a long tail
    relative = values.astype(np.float64) ** 2 / (values.astype(np.float64) ** 2).mean(axis=1, keepdims=True)

    def best(kind: QuantScheme, cut: float) -> float:
        """The top with the least error, values above it counting so many times."""
        tops = np.linspace(0.02, 1.0, 400) * values.max()
        losses = []
        for top in tops:
            off = fake_quantize(values, make_qparams(0.0, top, kind)).astype(np.float64) - values
            weights = np.where(values > top, cut, 1.0) * relative / np.maximum(values.astype(np.float64) ** 2, 1e-30)
            losses.append((weights * off**2).sum())
        return float(tops[np.argmin(losses)])

    for bits, cut in ((8, 2.0), (6, 1.0)):
        kind = QuantScheme(bits, signed=False, symmetric=False)
        found, other = mse(observed(values), kind)[1], best(kind, 3.0 - cut)
        assert abs(found - best(kind, cut)) < abs(found - other), "which is what the other weight leads to"


@pytest.mark.parametrize("values", [gaussian(), with_outlier(), np.maximum(gaussian(), 0), -np.abs(gaussian())])
@pytest.mark.parametrize("kind", UNSIGNED, ids=str)
def test_entropy_stays_within_the_extremes(values: np.ndarray, kind: QuantScheme) -> None:
    stats = observed(values)
    low, high = entropy(stats, kind)
    assert stats.low <= low <= high <= stats.high


def test_entropy_clips_a_far_outlier() -> None:
    values = with_outlier()
    low, high = entropy(observed(values), EIGHT)
    assert high < 0.3 * 80.0
    assert high > 2.0
    assert low == pytest.approx(float(values.min()), abs=0.5)


@pytest.mark.parametrize("kind", [EIGHT, UNSIGNED[2], SYMMETRIC[-1]], ids=str)
@pytest.mark.parametrize("value", [0.0, 5.0, -3.0, 1e-20, 1e20])
@pytest.mark.parametrize("method", ESTIMATORS)
def test_constant_tensors_lie_on_their_grid(method: str, value: float, kind: QuantScheme) -> None:
    values = np.full((3, 10), value, np.float32)
    qparams = make_qparams(*ESTIMATORS[method](observed(values), kind), kind)
    assert np.isfinite(qparams.scale)
    assert np.abs(fake_quantize(values, qparams) - values).max() <= 0.51 * float(qparams.scale)


@pytest.mark.parametrize("method", ESTIMATORS)
def test_two_values_lie_near_their_grid(method: str) -> None:
    values = np.tile(np.array([-1.0, 0.0, 2.0], np.float32), (4, 5))
    qparams = make_qparams(*ESTIMATORS[method](observed(values), EIGHT), EIGHT)
    assert np.abs(fake_quantize(values, qparams) - values).max() <= 1.5 * float(qparams.scale)


WEIGHTS = hnp.arrays(np.float32, (3, 4, 2), elements=st.floats(-100, 100, width=32))


@settings(max_examples=60)
@given(WEIGHTS, st.sampled_from([*UNSIGNED, *SYMMETRIC]), st.sampled_from([None, 0, 1]))
def test_the_least_error_of_a_weight_is_not_worse_than_that_of_its_extremes(
    weight: np.ndarray, kind: QuantScheme, axis: int | None
) -> None:
    def errors(method: str) -> np.ndarray:
        off = (fake_quantize(weight, weight_qparams(weight, kind, axis, method)) - weight).astype(np.float64) ** 2
        return off.sum() if axis is None else off.sum(axis=tuple({0, 1, 2} - {axis}))

    assert (errors("mse") <= errors("minmax") * (1 + 1e-5) + 1e-12).all()


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_zero_points_of_weights_are_searched_and_never_do_worse(bits: int) -> None:
    """Beside the best of a fine search of scales and all zero points, row by row; and beside a symmetric grid."""
    rows = (gaussian(20, 9).reshape(20, 9) ** 2).astype(np.float32) - np.float32(0.4)
    kind, plain = QuantScheme(bits, True, False), QuantScheme(bits, True, True)

    def errors(qparams: QuantParams) -> np.ndarray:
        return ((fake_quantize(rows, qparams) - rows).astype(np.float64) ** 2).sum(axis=1)

    found = weight_qparams(rows, kind, 0, "mse")
    spans = np.abs(rows).max(axis=1) / 2 ** (bits - 1)
    grids = (
        dataclasses.replace(found, scale=(spans * share).astype(np.float32), zero_point=np.full(len(rows), zero))
        for zero in range(found.low, found.high + 1)
        for share in np.linspace(0.2, 1.2, 60)
    )
    least = np.min([errors(each) for each in grids], axis=0)
    assert errors(found).sum() < 1.15 * least.sum()
    assert errors(found).sum() < 0.8 * errors(weight_qparams(rows, plain, 0, "mse")).sum()


def test_weight_grids_have_a_scale_a_channel() -> None:
    weight = gaussian(3, 20).reshape(3, 5, 4) * np.array([1, 10, 100], np.float32).reshape(3, 1, 1)
    qparams = weight_qparams(weight, SYMMETRIC[-1], 0, "minmax")
    np.testing.assert_allclose(qparams.scale, np.abs(weight).max(axis=(1, 2)) / 127, rtol=1e-6)
    assert weight_qparams(weight, SYMMETRIC[-1], 1, "minmax").scale.shape == (5,)
    assert weight_qparams(weight, SYMMETRIC[-1], None, "minmax").scale.shape == ()


def test_averaged_weights_keep_their_extremes() -> None:
    weight = gaussian(3, 20)
    for kind in (UNSIGNED[2], SYMMETRIC[2]):
        one, other = weight_qparams(weight, kind, 0, "averaged"), weight_qparams(weight, kind, 0, "minmax")
        np.testing.assert_array_equal(one.scale, other.scale)
