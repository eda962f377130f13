"""The integer program against brute force and against the greedy baselines, and what it says when it cannot."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onnxcalib.errors import RecipeError
from onnxcalib.recipe import Precision
from onnxcalib.stages import allocate
from onnxcalib.stages.allocate import (
    Allocation,
    Limit,
    greedy_accuracy,
    greedy_compression,
    least_reachable,
    maximise_gain,
    minimise_loss,
)
from onnxcalib.stages.greedy import Bound, Measure, Space
from onnxcalib.stages.sensitivity_table import LayerChoices, SensitivityTable

BASE = Precision(8, 8)
W4A4, W4A8, W8A4 = Precision(4, 4), Precision(4, 8), Precision(8, 4)
ALL = [Precision(weight, activation) for weight in range(2, 9) for activation in range(2, 9)]


def small_table(rows: Mapping[str, tuple[str, Mapping[Precision, tuple[float, float]]]], fixed: float = 0.0):
    """A table with one cost, size, from {layer: (tensor, {choice: (loss, size)})}."""
    layers = tuple(
        LayerChoices(
            layer,
            tensor,
            {choice: loss for choice, (loss, _) in choices.items()},
            {"size": {choice: size for choice, (_, size) in choices.items()}},
        )
        for layer, (tensor, choices) in rows.items()
    )
    whole = 4 * math.fsum(row.costs["size"][BASE] for row in layers)
    return SensitivityTable(BASE, "kl", 0.5, 64, {"size": fixed}, {"size": whole}, layers)


def two_layers() -> SensitivityTable:
    return small_table(
        {
            "conv": ("x", {BASE: (0.0, 8000), W4A8: (0.3, 4000)}),
            "gemm": ("y", {BASE: (0.0, 8000), W4A8: (0.1, 4000)}),
        },
        fixed=500,
    )


def realistic(seed: int, layers: int, choices: Sequence[Precision], shared: bool) -> SensitivityTable:
    """Sizes from 100 to 2 million, losses that grow with size and with 4 to the bits taken away, with noise."""
    rng = random.Random(seed)
    rows = []
    tensor, left = 0, 0
    for index in range(layers):
        tensor, left = (tensor, left - 1) if shared and left else (tensor + 1, rng.randrange(4))
        size = int(math.exp(rng.uniform(math.log(1e2), math.log(2e6))))
        factor = math.exp(rng.gauss(-3, 1.5)) * math.sqrt(size / 1e4)
        macs = size * rng.randrange(1, 2000)
        losses = {
            it: factor * ((4.0**-it.weight + 4.0**-it.activation / 2) * math.exp(rng.gauss(0, 0.3)) - 1.5 * 4.0**-8)
            for it in choices
        }
        costs = {
            "size": {it: float(math.ceil(size * it.weight / 8)) for it in choices},
            "bops": {it: float(macs * it.weight * it.activation) for it in choices},
        }
        rows.append(LayerChoices(f"layer{index}", f"tensor{tensor}", {**losses, BASE: 0.0}, costs))
    whole = {"size": 4 * math.fsum(row.costs["size"][BASE] for row in rows)}
    return SensitivityTable(BASE, "kl", 0.1, 256, {"size": 4321.0}, whole, tuple(rows))


@st.composite
def tables(draw: st.DrawFn) -> SensitivityTable:
    """Up to five layers with up to four choices, some on shared tensors, often with few values so that ties occur."""
    coarse = draw(st.booleans())
    losses = st.integers(-2, 6).map(float) if coarse else st.integers(-1000, 10**7).map(lambda n: n / 1e6)
    costs = st.integers(0, 40).map(float) if coarse else st.integers(0, 10**9).map(lambda n: n / 1e3)
    rows = []
    for index in range(draw(st.sampled_from([5, 4, 3, 2, 1]))):
        left_out = draw(st.sets(st.sampled_from([Precision(2, 8), W4A8, W4A4, W8A4]), min_size=1))
        menu = [BASE, *(it for it in (Precision(2, 8), W4A8, W4A4, W8A4) if it not in left_out)]
        per_cost = {name: {it: draw(costs) for it in menu} for name in ("size", "bops")}
        tensor = draw(st.sampled_from(["s", "s", "t", f"own{index}"]))
        rows.append(LayerChoices(f"l{index}", tensor, {**{it: draw(losses) for it in menu}, BASE: 0.0}, per_cost))
    return SensitivityTable(BASE, "kl", 0.0, 1, {"size": float(draw(st.integers(0, 5)))}, {}, tuple(rows))


@st.composite
def pinned(draw: st.DrawFn) -> tuple[SensitivityTable, dict[str, Precision]]:
    table = draw(tables())
    assignment = draw(st.sampled_from(list(assignments(table, {}))))
    names = draw(st.lists(st.sampled_from(list(assignment)), max_size=2, unique=True))
    return table, {name: assignment[name] for name in names}


def assignments(table: SensitivityTable, pins: Mapping[str, Precision]) -> Iterator[dict[str, Precision]]:
    """Every assignment that keeps the pins and shares activation bits."""
    menus = [[pins[row.layer]] if row.layer in pins else list(row.losses) for row in table.layers]
    for combination in itertools.product(*menus):
        bits: dict[str, int] = {}
        pairs = list(zip(table.layers, combination, strict=True))
        if all(bits.setdefault(row.tensor, it.activation) == it.activation for row, it in pairs):
            yield {row.layer: it for row, it in pairs}


def loss_of(table: SensitivityTable, choices: Mapping[str, Precision]) -> float:
    return math.fsum(max(row.losses[choices[row.layer]], 0.0) for row in table.layers)


def cost_of(table: SensitivityTable, name: str, choices: Mapping[str, Precision]) -> float:
    return math.fsum([table.fixed.get(name, 0.0), *(row.costs[name][choices[row.layer]] for row in table.layers)])


def within(table: SensitivityTable, limits: Sequence[Limit], choices: Mapping[str, Precision]) -> bool:
    return all(cost_of(table, limit.cost, choices) <= limit.value for limit in limits)


def assert_sound(
    table: SensitivityTable, limits: Sequence[Limit], pins: Mapping[str, Precision], got: Allocation
) -> None:
    assert within(table, limits, got.choices)
    assert got.estimated_loss == loss_of(table, got.choices)
    assert got.costs == {name: cost_of(table, name, got.choices) for name in table.cost_names()}
    assert all(got.choices[layer] == it for layer, it in pins.items())
    bits: dict[str, set[int]] = {}
    for row in table.layers:
        bits.setdefault(row.tensor, set()).add(got.choices[row.layer].activation)
    assert all(len(found) == 1 for found in bits.values())


def some_limits(data: st.DataObject, table: SensitivityTable, pins: Mapping[str, Precision]) -> list[Limit]:
    """Limits at, or a little off, what some assignment costs."""
    every = list(assignments(table, pins))
    limits = []
    for name in data.draw(st.lists(st.sampled_from(["size", "bops"]), max_size=2, unique=True)):
        mark = cost_of(table, name, data.draw(st.sampled_from(every)))
        limits.append(Limit(name, mark + data.draw(st.sampled_from([0.0, -1.0, 2.5]))))
    return limits


@settings(max_examples=150, deadline=None)
@given(pinned(), st.data())
def test_least_loss_is_that_of_brute_force(
    case: tuple[SensitivityTable, dict[str, Precision]], data: st.DataObject
) -> None:
    table, pins = case
    limits = some_limits(data, table, pins)
    fitting = [it for it in assignments(table, pins) if within(table, limits, it)]
    if not fitting:
        with pytest.raises(RecipeError, match="no assignment reaches"):
            minimise_loss(table, limits, pins)
        return
    got = minimise_loss(table, limits, pins)
    assert_sound(table, limits, pins, got)
    least = min(loss_of(table, it) for it in fitting)
    assert got.estimated_loss == pytest.approx(least, rel=1e-9, abs=1e-12)
    assert (got.optimal, got.gap, got.method) == (True, 0.0, "integer program")
    if len(limits) == 1:
        ties = [it for it in fitting if loss_of(table, it) <= got.estimated_loss]
        cheapest = min(cost_of(table, limits[0].cost, it) for it in ties)
        assert got.costs[limits[0].cost] == pytest.approx(cheapest, rel=1e-9, abs=1e-6)


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


@settings(max_examples=100, deadline=None)
@given(pinned(), st.data())
def test_greedy_keeps_limit_pins_and_shared_bits(
    case: tuple[SensitivityTable, dict[str, Precision]], data: st.DataObject
) -> None:
    table, pins = case
    mark = data.draw(st.sampled_from([cost_of(table, "size", it) for it in assignments(table, pins)]))
    limit = Limit("size", mark)
    best = minimise_loss(table, [limit], pins)
    for greedy in (greedy_accuracy, greedy_compression):
        got = greedy(table, limit, pins)
        assert_sound(table, [limit], pins, got)
        assert not got.optimal
        assert best.estimated_loss <= got.estimated_loss * (1 + 1e-9) + 1e-12


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10**6), st.integers(20, 60), st.booleans(), st.floats(0.1, 0.24))
def test_never_worse_than_greedy_at_the_same_size(seed: int, layers: int, shared: bool, ratio: float) -> None:
    table = realistic(seed, layers, [BASE, Precision(6, 6), W4A8, W4A4, Precision(2, 4)], shared)
    least = least_reachable(table, "size")
    limit = Limit("size", max(ratio * table.float_costs["size"], least))
    best = minimise_loss(table, [limit])
    assert_sound(table, [limit], {}, best)
    for greedy in (greedy_accuracy, greedy_compression):
        other = greedy(table, limit)
        assert_sound(table, [limit], {}, other)
        assert best.estimated_loss <= other.estimated_loss * (1 + 1e-9)


@pytest.mark.parametrize("shared", [False, True])
def test_five_hundred_layers_of_49_choices_are_solved_to_optimality(shared: bool) -> None:
    table = realistic(7, 500, ALL, shared)
    limit = Limit("size", 0.15 * table.float_costs["size"])
    best = minimise_loss(table, [limit])
    assert_sound(table, [limit], {}, best)
    assert (best.optimal, best.gap) == (True, 0.0)
    gain = maximise_gain(table, "size", best.estimated_loss)
    assert gain.costs["size"] <= best.costs["size"]
    assert gain.estimated_loss <= best.estimated_loss


def test_same_answer_each_time() -> None:
    table = realistic(3, 80, [BASE, W4A8, W8A4, W4A4], shared=True)
    limits = [Limit("size", 0.2 * table.float_costs["size"])]
    assert minimise_loss(table, limits) == minimise_loss(table, limits)


def test_small_losses_are_told_apart_beside_a_huge_one() -> None:
    menu = {BASE: (0.0, 100.0), W4A8: (1e4, 0.0), W8A4: (2e-10, 50.0)}
    other = {BASE: (0.0, 100.0), W4A8: (1e4, 0.0), W8A4: (1e-10, 50.0)}
    table = small_table({"a": ("x", menu), "b": ("y", other)})
    got = minimise_loss(table, [Limit("size", 150)])
    assert got.choices == {"a": BASE, "b": W8A4}
    assert got.estimated_loss == 1e-10


def test_a_limit_that_the_solver_passes_by_a_hair_is_solved_again(monkeypatch: pytest.MonkeyPatch) -> None:
    solve = allocate._solve_scaled

    def careless(space: Space, aim: Measure, bounds: Sequence[Bound]) -> object:
        return solve(space, aim, [replace(bound, most=bound.most + 0.6) for bound in bounds])

    monkeypatch.setattr(allocate, "_solve_scaled", careless)
    table = small_table({f"l{i}": (f"t{i}", {BASE: (0.0, 1000.0 + i), W4A8: (1.0 + i, 0.0)}) for i in range(4)})
    got = minimise_loss(table, [Limit("size", 2004.5)])
    assert got.choices == {"l0": W4A8, "l1": BASE, "l2": W4A8, "l3": BASE}


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


def test_greedy_accuracy_lowers_the_most_robust_first() -> None:
    got = greedy_accuracy(two_layers(), Limit("size", 12500))
    assert got.choices == {"conv": BASE, "gemm": W4A8}
    assert got.method == "greedy-accuracy"


def test_greedy_compression_raises_the_smallest_first() -> None:
    menu = {BASE: (0.0, 80), W4A8: (0.5, 40)}
    table = small_table({"big": ("x", {BASE: (0.0, 800), W4A8: (9.0, 400)}), "small": ("y", menu)})
    got = greedy_compression(table, Limit("size", 500))
    assert got.choices == {"big": W4A8, "small": BASE}
    assert got.method == "greedy-compression"


def test_a_group_moves_its_activation_bits_together() -> None:
    menu = {BASE: (0.0, 8.0), W8A4: (0.1, 4.0)}
    table = small_table({"q": ("x", menu), "k": ("x", menu)})
    for solve in (lambda limit: minimise_loss(table, [limit]), lambda limit: greedy_accuracy(table, limit)):
        assert solve(Limit("size", 12)).choices == {"q": W8A4, "k": W8A4}
    assert greedy_compression(table, Limit("size", 12)).choices == {"q": W8A4, "k": W8A4}
    assert greedy_compression(table, Limit("size", 16)).choices == {"q": BASE, "k": BASE}


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
