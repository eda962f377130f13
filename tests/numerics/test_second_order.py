"""Second-order rounding against a reference that solves anew at each step, and against all roundings there are."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from onnxcalib.numerics.moments import Moments
from onnxcalib.numerics.quant_params import QuantParams, QuantScheme, fake_quantize, make_qparams
from onnxcalib.numerics.range_estimators import weight_qparams
from onnxcalib.numerics.second_order import Grid, arriving_move, damped, inverse_factor, round_columns
from onnxcalib.numerics.weighted_ranges import weighted_qparams


def moments_of(groups: int, columns: int, seed: int = 0) -> np.ndarray:
    """Second moments of inputs that rise and fall together."""
    rng = np.random.default_rng([seed, groups, columns])
    rows = rng.normal(size=(groups, 3 * columns, columns)) + 2 * rng.normal(size=(groups, 3 * columns, 1))
    rows *= rng.uniform(0.2, 2, columns)
    return damped(rows.swapaxes(1, 2) @ rows / (3 * columns))


def grid_of(weight: np.ndarray, bits: int = 4) -> Grid:
    """A grid a row, with a zero point in its middle."""
    half = 2 ** (bits - 1)
    scale = np.abs(weight).max(axis=-1, keepdims=True) * 0.8 / half
    return Grid(scale, np.full(scale.shape, half), 0, 2 * half - 1)


def values(quantized: np.ndarray, grid: Grid) -> np.ndarray:
    return grid.scale * (quantized - grid.zero_point)


def nearest(weight: np.ndarray, grid: Grid) -> np.ndarray:
    return np.clip(np.rint(weight / grid.scale) + grid.zero_point, grid.low, grid.high)


def error(weight: np.ndarray, quantized: np.ndarray, moments: np.ndarray, grid: Grid) -> float:
    off = values(quantized, grid) - weight
    return float(np.einsum("gri,gij,grj->", off, moments, off))


def solved_anew(weight: np.ndarray, moments: np.ndarray, grid: Grid) -> np.ndarray:
    """The same rule without any factor: what is not rounded yet moves to the least error, found by an inverse each."""
    scale, zero = (np.broadcast_to(each, weight.shape) for each in (grid.scale, grid.zero_point))
    quantized = np.zeros(weight.shape, int)
    for group, left in enumerate(weight.copy()):
        rest = sorted(range(weight.shape[-1]), key=lambda column: -moments[group, column, column])
        while rest:
            column, inverse = rest[0], np.linalg.inv(moments[group][np.ix_(rest, rest)])
            steps = np.rint(left[:, column] / scale[group, :, column]) + zero[group, :, column]
            quantized[group, :, column] = np.clip(steps, grid.low, grid.high)
            real = scale[group, :, column] * (quantized[group, :, column] - zero[group, :, column])
            left[:, rest] -= np.outer((left[:, column] - real) / inverse[0, 0], inverse[0])
            rest = rest[1:]
    return quantized


@pytest.mark.parametrize(("groups", "rows", "columns"), [(1, 5, 3), (4, 1, 9), (2, 3, 40), (1, 2, 150)])
def test_it_rounds_as_if_it_were_solved_anew_at_each_step(groups: int, rows: int, columns: int) -> None:
    weight = np.random.default_rng([1, columns]).normal(size=(groups, rows, columns))
    moments, grid = moments_of(groups, columns), grid_of(weight)
    quantized, source = round_columns(weight, moments, grid)
    np.testing.assert_array_equal(quantized, solved_anew(weight, moments, grid))
    np.testing.assert_array_equal(nearest(source, grid), quantized)


def test_the_factor_is_that_of_the_inverse() -> None:
    moments = moments_of(2, 150)
    factor = inverse_factor(moments)
    assert not np.tril(factor, -1).any()
    np.testing.assert_allclose(factor.swapaxes(1, 2) @ factor, np.linalg.inv(moments), rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("columns", [2, 3, 4])
def test_between_the_best_of_all_roundings_and_the_nearest(columns: int) -> None:
    least, found, plain = 0.0, 0.0, 0.0
    for seed in range(60):
        weight = np.random.default_rng([seed, columns]).normal(size=(1, 1, columns))
        moments, grid = moments_of(1, columns, seed), grid_of(weight, 2)
        every = itertools.product(range(4), repeat=columns)
        best = min(error(weight, np.array(codes).reshape(1, 1, -1), moments, grid) for codes in every)
        own = error(weight, round_columns(weight, moments, grid)[0], moments, grid)
        assert own >= best * (1 - 1e-12)
        least, found, plain = least + best, found + own, plain + error(weight, nearest(weight, grid), moments, grid)
    # Clipping is what it cannot foresee; still it gets most of the way from nearest to best.
    assert found - least < 0.5 * (plain - least)


def test_blocks_of_columns_have_scales_of_their_own() -> None:
    weight = np.random.default_rng(3).normal(size=(1, 6, 64)) * np.repeat([1.0, 8.0], 32)
    moments = moments_of(1, 64)
    scale = np.repeat(np.abs(weight).reshape(1, 6, 2, 32).max(-1) / 7, 32, axis=-1)
    grid = Grid(scale, np.zeros(scale.shape), -8, 7)
    quantized, _ = round_columns(weight, moments, grid)
    np.testing.assert_array_equal(quantized, solved_anew(weight, moments, grid))
    assert error(weight, quantized, moments, grid) < 0.7 * error(weight, nearest(weight, grid), moments, grid)


def test_inputs_that_never_vary_are_no_trouble() -> None:
    weight = np.random.default_rng(4).normal(size=(2, 3, 5))
    moments = np.zeros((2, 5, 5))
    moments[0, 1, 1] = 2.0
    grid = grid_of(weight)
    np.testing.assert_array_equal(round_columns(weight, damped(moments), grid)[0], nearest(weight, grid))


def paired_rows() -> tuple[np.ndarray, np.ndarray]:
    """What two networks give a layer: the second has lost something, and both lie far from zero."""
    rng = np.random.default_rng(5)
    wanted = rng.normal(size=(2, 400, 6)) @ rng.normal(size=(2, 6, 6)) + 30
    return wanted, 0.9 * wanted + 0.3 * rng.normal(size=wanted.shape)


def gathered(wanted: np.ndarray, read: np.ndarray) -> Moments:
    moments = Moments()
    for start in range(0, wanted.shape[1], 150):
        part = slice(start, start + 150)
        moments.update(wanted[:, part].astype(np.float32), read[:, part].astype(np.float32))
    return moments


@pytest.mark.parametrize("centred", [True, False])
def test_moments_are_those_of_all_rows_at_once(centred: bool) -> None:
    wanted, read = paired_rows()
    found = gathered(wanted, read)
    for mean, rows in zip(found.means, (wanted, read), strict=True):
        np.testing.assert_allclose(mean, rows.mean(axis=1, keepdims=True), rtol=1e-5)
    lost = wanted - read
    if centred:
        read, lost = (rows - rows.mean(axis=1, keepdims=True) for rows in (read, lost))
    squares, products = found.squares(centred=centred), found.lost(centred=centred)
    rows = read.shape[1]
    np.testing.assert_allclose(squares, read.swapaxes(1, 2) @ read / rows, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(products, lost.swapaxes(1, 2) @ read / rows, rtol=1e-4, atol=1e-4)


def test_the_move_is_the_least_squares_answer_to_what_was_lost() -> None:
    wanted, read = paired_rows()
    weight = np.random.default_rng(6).normal(size=(2, 3, 6))
    found = gathered(wanted, read)
    squares, lost = found.squares(centred=False), found.lost(centred=False)
    moved = weight + arriving_move(weight, lost, squares)
    for group in range(2):
        best = np.linalg.lstsq(read[group], wanted[group] @ weight[group].T, rcond=None)[0].T
        np.testing.assert_allclose(moved[group], best, rtol=1e-2, atol=1e-2)


def test_ranges_count_errors_by_what_they_are_multiplied_with() -> None:
    """Against a search over every share of the range, row by row."""
    scheme = QuantScheme(3, signed=True, symmetric=True)
    weight = np.random.default_rng(7).normal(size=(4, 32)).astype(np.float32)
    importance = np.random.default_rng(8).uniform(0, 1, weight.shape).astype(np.float32) ** 4

    def weighted(qparams: QuantParams, row: int) -> float:
        off = fake_quantize(weight, qparams)[row] - weight[row]
        return float((off**2 * importance[row]).sum())

    found = weighted_qparams(weight, importance, scheme, make_qparams(-np.ones(4), np.ones(4), scheme, 0))
    shares = [make_qparams(part * weight.min(1), part * weight.max(1), scheme, 0) for part in np.linspace(0.25, 1, 31)]
    plain = weight_qparams(weight, scheme, 0, "mse")
    for row in range(4):
        assert weighted(found, row) <= min(weighted(each, row) for each in shares) * (1 + 1e-5)
    assert sum(weighted(found, row) for row in range(4)) < sum(weighted(plain, row) for row in range(4))
    blocks = weighted_qparams(weight.T, importance.T, scheme, replace(found, axis=0, block=16))
    assert blocks.scale.shape == (2, 4)
    half = weighted_qparams(weight[:, :16], importance[:, :16], scheme, found)
    np.testing.assert_array_equal(blocks.scale[0], half.scale)
