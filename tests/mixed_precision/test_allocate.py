"""The integer program against brute force, and how ties are broken."""

from __future__ import annotations

import math

import pytest
from allocation_tables import (
    BASE,
    W4A4,
    W4A8,
    W8A4,
    assert_least_loss,
    assert_sound,
    assert_within_gap,
    assignments,
    cost_of,
    loss_of,
    pinned,
    small_table,
    some_limits,
    two_layers,
    within,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from onnxcalib.errors import RecipeError
from onnxcalib.mixed_precision.allocate import (
    Limit,
    greedy_accuracy,
    least_reachable,
    maximise_gain,
    minimise_loss,
)
from onnxcalib.mixed_precision.table import SensitivityTable
from onnxcalib.recipe import Precision


@settings(max_examples=150, deadline=None)
@given(pinned(), st.data())
def test_least_loss_is_that_of_brute_force(
    case: tuple[SensitivityTable, dict[str, Precision]], data: st.DataObject
) -> None:
    table, pins = case
    assert_least_loss(table, some_limits(data, table, pins), pins)


@settings(max_examples=150, deadline=None)
@given(pinned(), st.data())
def test_least_cost_is_that_of_brute_force(
    case: tuple[SensitivityTable, dict[str, Precision]], data: st.DataObject
) -> None:
    table, pins = case
    limits = some_limits(data, table, pins)
    every = list(assignments(table, pins))
    budget = loss_of(table, data.draw(st.sampled_from(every))) + data.draw(st.sampled_from([0.0, -0.5, 0.5]))
    fitting = [it for it in every if within(table, limits, it) and loss_of(table, it) <= budget]
    if not fitting:
        with pytest.raises(RecipeError, match="no assignment reaches"):
            maximise_gain(table, "size", budget, limits, pins)
        return
    got = maximise_gain(table, "size", budget, limits, pins)
    assert_sound(table, limits, pins, got)
    assert got.estimated_loss <= budget
    assert_within_gap(got.costs["size"], [cost_of(table, "size", it) for it in fitting])


@settings(max_examples=80, deadline=None)
@given(pinned(), st.data())
def test_least_reachable_is_that_of_brute_force(
    case: tuple[SensitivityTable, dict[str, Precision]], data: st.DataObject
) -> None:
    table, pins = case
    limits = [limit for limit in some_limits(data, table, pins) if limit.cost == "bops"]
    fitting = [it for it in assignments(table, pins) if within(table, limits, it)]
    if fitting:
        least = min(cost_of(table, "size", it) for it in fitting)
        assert least_reachable(table, "size", limits, pins) == pytest.approx(least, rel=1e-9, abs=1e-9)


def test_negative_losses_count_as_zero_and_ties_go_to_the_lower_cost() -> None:
    rows = {"a": ("x", {BASE: (0.0, 80), W4A8: (-0.5, 60), Precision(2, 8): (0.0, 20)}), "b": ("y", {BASE: (0.0, 10)})}
    got = minimise_loss(small_table(rows), [])
    assert got.choices["a"] == Precision(2, 8)
    assert got.estimated_loss == 0.0


@pytest.mark.parametrize("better", [W4A8, W4A4])
def test_a_group_takes_the_bits_of_lower_loss_where_the_size_is_the_same(better: Precision) -> None:
    """Of the shared bits neither is better for both layers, so that no choice is dominated."""
    worse = W4A4 if better == W4A8 else W4A8
    rows = {
        "q": ("x", {BASE: (0.0, 9.0), better: (0.2, 4.0), worse: (0.1, 4.0)}),
        "k": ("x", {BASE: (0.0, 9.0), better: (0.1, 4.0), worse: (0.5, 4.0)}),
        "v": ("y", {BASE: (0.0, 9.0), W4A8: (9.0, 4.0)}),
    }
    got = maximise_gain(small_table(rows), "size", 1.0)
    assert got.choices == {"q": better, "k": better, "v": BASE}


def test_equal_choices_keep_the_higher_precision() -> None:
    table = small_table({"a": ("x", {W8A4: (0.0, 80), BASE: (0.0, 80)})})
    assert minimise_loss(table, []).choices == {"a": BASE}


def test_equal_activation_bits_of_a_group_keep_the_higher() -> None:
    menu = {W8A4: (0.0, 80), BASE: (0.0, 80)}
    assert minimise_loss(small_table({"q": ("x", menu), "k": ("x", menu)}), []).choices == {"q": BASE, "k": BASE}


def test_no_limit_and_an_infinite_one_are_the_same() -> None:
    table = two_layers()
    assert minimise_loss(table, []).choices == minimise_loss(table, [Limit("size", math.inf)]).choices
    assert maximise_gain(table, "size", math.inf).costs["size"] == 8500
    assert greedy_accuracy(table, Limit("size", math.inf)).choices == {"conv": BASE, "gemm": BASE}
