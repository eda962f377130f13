"""How the integer program is solved: by search and by HiGHS, on large tables and beside odd numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from allocation_tables import (
    ALL,
    BASE,
    W4A4,
    W4A8,
    W8A4,
    assert_least_loss,
    assert_sound,
    assignments,
    cost_of,
    loss_of,
    pinned,
    realistic,
    small_table,
    some_limits,
    within,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from onnxcalib.mixed_precision import search
from onnxcalib.mixed_precision import solver as program
from onnxcalib.mixed_precision.allocate import (
    Limit,
    maximise_gain,
    minimise_loss,
)
from onnxcalib.mixed_precision.search_space import Bound, Measure, Space
from onnxcalib.mixed_precision.table import LayerChoices, SensitivityTable
from onnxcalib.recipe import Precision


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
    solve = program._run

    def careless(space: Space, aim: Measure, bounds: Sequence[Bound]) -> object:
        return solve(space, aim, [replace(bound, most=bound.most + 0.6) for bound in bounds])

    monkeypatch.setattr(program, "_run", careless)
    monkeypatch.setattr(search, "STATES", 0)
    table = small_table({f"l{i}": (f"t{i}", {BASE: (0.0, 1000.0 + i), W4A8: (1.0 + i, 0.0)}) for i in range(4)})
    got = minimise_loss(table, [Limit("size", 2004.5)])
    assert got.choices == {"l0": W4A8, "l1": BASE, "l2": W4A8, "l3": BASE}


@settings(max_examples=80)
@given(pinned(), st.data())
def test_highs_alone_finds_what_brute_force_does(
    case: tuple[SensitivityTable, dict[str, Precision]], data: st.DataObject
) -> None:
    table, pins = case
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(search, "STATES", 0)
        assert_least_loss(table, some_limits(data, table, pins), pins)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("limits", [("size",), ("size", "bops")])
def test_search_and_highs_agree(limits: tuple[str, ...], seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    table = realistic(seed, 25, [BASE, Precision(6, 6), W4A8, W4A4, Precision(2, 4)], shared=True)
    at_base = dict.fromkeys((row.layer for row in table.layers), BASE)
    asked = [Limit(name, 0.55 * cost_of(table, name, at_base)) for name in limits]
    searched = minimise_loss(table, asked)
    monkeypatch.setattr(search, "STATES", 0)
    solved = minimise_loss(table, asked)
    assert searched.estimated_loss == pytest.approx(solved.estimated_loss, rel=1e-9)
    assert searched.costs == pytest.approx(solved.costs)


odd_numbers = st.sampled_from([0.0, 5e-324, 1e-300, 1e-45, 1e-17, 2.2e-16, 1e-10, 1e-5, 1.0]) | st.floats(0, 1)


@st.composite
def odd_tables(draw: st.DrawFn) -> SensitivityTable:
    """Losses and sizes of any magnitude, beside each other."""
    rows = []
    for index in range(draw(st.integers(1, 4))):
        menu = [BASE, W4A8, W8A4, W4A4]
        losses = {**{it: draw(odd_numbers) for it in menu}, BASE: 0.0}
        size = {it: draw(odd_numbers | st.integers(0, 5000).map(float)) for it in menu}
        rows.append(LayerChoices(f"l{index}", f"t{draw(st.integers(0, index))}", losses, {"size": size}))
    return SensitivityTable(BASE, "kl", 0.0, 1, {"size": float(draw(st.integers(0, 99)))}, {}, tuple(rows))


@settings(max_examples=150)
@given(odd_tables(), st.data())
def test_numbers_of_any_magnitude(table: SensitivityTable, data: st.DataObject) -> None:
    every = list(assignments(table, {}))
    limit = Limit("size", cost_of(table, "size", data.draw(st.sampled_from(every))))
    fitting = [it for it in every if within(table, [limit], it)]
    got = minimise_loss(table, [limit])
    assert_sound(table, [limit], {}, got)
    assert got.estimated_loss == pytest.approx(min(loss_of(table, it) for it in fitting), rel=1e-12)
    ties = [it for it in fitting if loss_of(table, it) <= got.estimated_loss]
    assert got.costs["size"] == pytest.approx(min(cost_of(table, "size", it) for it in ties), rel=1e-12)
    budget = loss_of(table, data.draw(st.sampled_from(every)))
    gain = maximise_gain(table, "size", budget)
    assert gain.estimated_loss <= budget
    cheapest = min(cost_of(table, "size", it) for it in every if loss_of(table, it) <= budget)
    assert gain.costs["size"] == pytest.approx(cheapest, rel=1e-12)


def test_what_breaks_a_budget_by_rounding_drives_nothing_out() -> None:
    rows = {
        "a": ("x", {BASE: (0.0, 0.75), W4A8: (1.0000000000000002, 0.25), W4A4: (0.9510770952693589, 0.0)}),
        "b": ("y", {BASE: (0.0, 0.5), W4A8: (1 / 3, 0.3), W4A4: (2.5e-121, 1.6e-253)}),
        "c": ("x", {BASE: (0.0, 16.0), W4A8: (1.1e-16, 8.0), W4A4: (0.5, 4.0)}),
    }
    table = small_table(rows, fixed=5)
    every = list(assignments(table, {}))
    for budget in (loss_of(table, it) for it in every):
        cheapest = min(cost_of(table, "size", it) for it in every if loss_of(table, it) <= budget)
        assert maximise_gain(table, "size", budget).costs["size"] == cheapest
