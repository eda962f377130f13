"""What the allocation says of limits and pins that cannot be kept."""

from __future__ import annotations

import math

import pytest
from allocation_tables import (
    BASE,
    W4A4,
    W4A8,
    W8A4,
    assignments,
    cost_of,
    pinned,
    small_table,
    two_layers,
)
from hypothesis import given, settings

from onnxcalib.errors import RecipeError
from onnxcalib.mixed_precision.allocate import (
    Limit,
    greedy_accuracy,
    greedy_compression,
    least_reachable,
    maximise_gain,
    minimise_loss,
)
from onnxcalib.mixed_precision.table import LayerChoices, SensitivityTable
from onnxcalib.recipe import Precision


@pytest.mark.parametrize("solve", [lambda t, it: minimise_loss(t, [it]), greedy_accuracy, greedy_compression])
def test_too_small_a_size_names_the_least_reachable(solve) -> None:
    with pytest.raises(RecipeError) as caught:
        solve(two_layers(), Limit("size", 8000))
    assert caught.value.message == (
        "no assignment reaches size <= 8,000 bytes; the least reachable is 8,500 (compression 0.133)."
    )


@settings(max_examples=60, deadline=None)
@given(pinned())
def test_the_least_reachable_in_the_message_is_that_of_brute_force(
    case: tuple[SensitivityTable, dict[str, Precision]],
) -> None:
    table, pins = case
    least = min(cost_of(table, "size", it) for it in assignments(table, pins))
    with pytest.raises(RecipeError) as caught:
        minimise_loss(table, [Limit("size", least - 1)], pins)
    said = float(caught.value.message.rsplit(" is ")[-1].rstrip(".").replace(",", ""))
    assert least <= said <= least + 1
    assert minimise_loss(table, [Limit("size", said)], pins).costs["size"] == pytest.approx(least, abs=1)


def test_a_pinned_floor_is_counted() -> None:
    with pytest.raises(RecipeError, match=r"least reachable is 12,500"):
        minimise_loss(two_layers(), [Limit("size", 12000)], {"conv": BASE})


def test_a_loss_budget_that_a_limit_forbids() -> None:
    with pytest.raises(RecipeError) as caught:
        maximise_gain(two_layers(), "size", 0.2, [Limit("size", 8500)])
    assert "estimated loss <= 0.2 and size <= 8,500 bytes are each reachable alone" in caught.value.message
    assert "the least reachable estimated loss is 0.4" in caught.value.message
    assert "the least reachable size is 12,500" in caught.value.message


def test_a_negative_loss_budget() -> None:
    with pytest.raises(RecipeError, match=r"estimated loss <= -1; the least reachable is 0\."):
        maximise_gain(two_layers(), "size", -1)


def test_limits_that_conflict_only_together() -> None:
    choices = {BASE: 0.0, W4A8: 0.1}
    costs = {"size": {BASE: 8.0, W4A8: 4.0}, "latency": {BASE: 4.0, W4A8: 8.0}}
    table = SensitivityTable(BASE, "kl", 0.0, 1, {}, {"latency": 10.0}, (LayerChoices("a", "x", choices, costs),))
    limits = [Limit("size", 5), Limit("latency", 5)]
    with pytest.raises(RecipeError) as caught:
        minimise_loss(table, limits)
    assert caught.value.message == (
        "size <= 5 bytes and latency <= 5 are each reachable alone, but no assignment reaches them together; with the "
        "other limits held, the least reachable size is 8, the least reachable latency is 8 (0.800 of the float model)."
    )
    with pytest.raises(RecipeError, match="together"):
        least_reachable(table, "size", limits)


def test_a_pin_must_be_among_the_choices() -> None:
    with pytest.raises(RecipeError, match=r"'conv' is pinned to w4a4.*It has w8a8, w4a8"):
        minimise_loss(two_layers(), [], {"conv": W4A4})


def test_a_pin_must_name_a_layer() -> None:
    with pytest.raises(RecipeError, match=r"'conf' is unknown. Near names: conv"):
        minimise_loss(two_layers(), [], {"conf": BASE})


def test_pins_of_one_tensor_must_agree() -> None:
    menu = {BASE: (0.0, 8.0), W8A4: (0.1, 4.0)}
    table = small_table({"q": ("x", menu), "k": ("x", menu)})
    with pytest.raises(RecipeError, match=r"'q' \(pinned to w8a8\) and 'k' \(pinned to w8a4\) read .* tensor 'x'"):
        minimise_loss(table, [], {"q": BASE, "k": W8A4})


def test_a_pin_that_leaves_another_layer_nothing() -> None:
    table = small_table({"q": ("x", {BASE: (0.0, 8.0), W8A4: (0.1, 4.0)}), "k": ("x", {BASE: (0.0, 8.0)})})
    with pytest.raises(RecipeError, match=r"'q' \(pinned to w8a4\) and 'k' read the same tensor 'x'"):
        minimise_loss(table, [], {"q": W8A4})


def test_an_unknown_cost() -> None:
    with pytest.raises(RecipeError, match=r"'sise' is unknown. Near names: size"):
        minimise_loss(two_layers(), [Limit("sise", 1)])
    with pytest.raises(RecipeError, match="unknown"):
        maximise_gain(two_layers(), "bops", 1.0)


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_a_limit_that_is_no_number(value: float) -> None:
    with pytest.raises(RecipeError, match="is not a limit of"):
        minimise_loss(two_layers(), [Limit("size", value)])
    with pytest.raises(RecipeError, match="is not a limit of"):
        maximise_gain(two_layers(), "size", value)


def test_an_empty_table() -> None:
    with pytest.raises(RecipeError, match="no layers"):
        minimise_loss(SensitivityTable(BASE, "kl", 0.0, 1, {}, {}, ()), [])
