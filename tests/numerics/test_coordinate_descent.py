"""Coordinate descent and fitted scales against plain loops, and what they promise."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onnxcalib.numerics.coordinate_descent import PASSES, descended, fitted_scales
from onnxcalib.numerics.second_order import Grid, damped, round_columns


def problem(groups: int, rows: int, columns: int, block: int, seed: int) -> tuple[np.ndarray, np.ndarray, Grid]:
    """Weights, moments of inputs that rise and fall together, and a grid with a scale a block."""
    rng = np.random.default_rng([seed, groups, columns])
    read = rng.normal(size=(groups, 2 * columns, columns)) + rng.normal(size=(groups, 2 * columns, 1))
    read *= rng.uniform(0.2, 2, columns)
    weight = rng.normal(size=(groups, rows, columns))
    blocks = np.arange(columns) // block
    scale = np.stack([np.abs(weight[..., blocks == each]).max(-1) for each in range(blocks[-1] + 1)], -1) / 7
    return (
        weight,
        damped(read.swapaxes(1, 2) @ read / (2 * columns)),
        Grid(scale[..., blocks], np.full((1, 1, 1), 3), -5, 10),
    )


def error(weight: np.ndarray, quantized: np.ndarray, moments: np.ndarray, grid: Grid) -> float:
    off = weight - grid.scale * (quantized - grid.zero_point)
    return float(np.einsum("gri,gij,grj->", off, moments, off))


def one_by_one(weight: np.ndarray, quantized: np.ndarray, moments: np.ndarray, grid: Grid) -> np.ndarray:
    """Every code of every row tried, one column after the other: the first of the least errors stays."""
    found = quantized.astype(float)
    for _ in range(PASSES):
        for group, row, column in np.ndindex(weight.shape):
            tries = []
            for code in range(grid.low, grid.high + 1):
                found[group, row, column] = code
                off = weight[group, row] - grid.scale[group, row] * (found[group, row] - 3)
                tries.append(off @ moments[group] @ off)
            found[group, row, column] = grid.low + int(np.argmin(tries))
    return found


@pytest.mark.parametrize(("groups", "rows", "columns", "block"), [(1, 3, 5, 2), (3, 1, 9, 9), (1, 2, 40, 16)])
def test_every_code_is_the_best_with_all_others_as_they_are(groups: int, rows: int, columns: int, block: int) -> None:
    weight, moments, grid = problem(groups, rows, columns, block, 0)
    start = np.clip(np.rint(weight / grid.scale) + 3, grid.low, grid.high)
    found, source = descended(weight, start, moments, grid)
    np.testing.assert_array_equal(found, one_by_one(weight, start, moments, grid))
    np.testing.assert_array_equal(np.clip(np.rint(source / grid.scale) + 3, grid.low, grid.high), found)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([(1, 4, 70, 16), (5, 1, 9, 9), (2, 3, 33, 32)]))
def test_the_error_never_grows(seed: int, shape: tuple[int, int, int, int]) -> None:
    weight, moments, grid = problem(*shape, seed)
    first = round_columns(weight, moments, grid)[0]
    second = descended(weight, first, moments, grid)[0]
    scale = fitted_scales(weight, second, moments, grid, shape[3])
    fitted = Grid(scale[..., np.arange(shape[2]) // shape[3]], grid.zero_point, grid.low, grid.high)
    third = descended(weight, second, moments, fitted)[0]
    errors = [
        error(weight, codes, moments, each)
        for codes, each in ((first, grid), (second, grid), (second, fitted), (third, fitted))
    ]
    assert all(later <= earlier * (1 + 1e-9) for earlier, later in itertools.pairwise(errors))
    assert (scale > 0).all()


@pytest.mark.parametrize("block", [8, 24])
def test_scales_are_those_of_least_squares(block: int) -> None:
    weight, moments, grid = problem(1, 4, 24, block, 1)
    codes = round_columns(weight, moments, grid)[0]
    scale = fitted_scales(weight, codes, moments, grid, block)
    for row in range(4):
        parts = np.stack([(np.arange(24) // block == each) * (codes[0, row] - 3) for each in range(24 // block)], -1)
        root = np.linalg.cholesky(moments[0]).T
        best = np.linalg.lstsq(root @ parts, root @ weight[0, row], rcond=None)[0]
        left, least = (float(np.sum((root @ (weight[0, row] - parts @ it)) ** 2)) for it in (scale[0, row], best))
        assert left <= least * 1.01  # a few sweeps come this near
        if block == 24:
            np.testing.assert_allclose(scale[0, row], best, rtol=1e-9)


def test_a_block_of_nothing_keeps_its_scale() -> None:
    weight, moments, grid = problem(1, 2, 8, 4, 2)
    codes = np.full((1, 2, 8), 3)
    np.testing.assert_array_equal(fitted_scales(weight, codes, moments, grid, 4), grid.scale[..., ::4])
