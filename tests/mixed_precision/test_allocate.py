"""The integer program against brute force, and how ties are broken."""

from __future__ import annotations

import math

import pytest
from allocation_tables import (
    BASE,
    W4A8,
    W8A4,
    assert_least_loss,
    assert_sound,
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
    least = min(cost_of(table, "size", it) for it in fitting)
    assert got.costs["size"] == pytest.approx(least, rel=1e-9, abs=1e-9)
    ties = [it for it in fitting if cost_of(table, "size", it) <= got.costs["size"]]
    assert got.estimated_loss == pytest.approx(min(loss_of(table, it) for it in ties), rel=1e-9, abs=1e-9)


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


def test_ties_between_layers_go_to_the_lower_cost() -> None:
    menu = {BASE: (0.0, 800), W4A8: (0.1, 400)}
    table = small_table({"a": ("x", menu), "b": ("y", {BASE: (0.0, 800), W4A8: (0.1, 300)})})
    assert minimise_loss(table, [Limit("size", 1200)]).choices == {"a": BASE, "b": W4A8}


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
