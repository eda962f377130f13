"""How the integer program is solved: large tables, limits of time, and odd numbers beside each other."""

from __future__ import annotations

import pytest
from allocation_tables import (
    ALL,
    BASE,
    GAP,
    W4A4,
    W4A8,
    W8A4,
    assert_least_loss,
    assert_sound,
    assert_within_gap,
    assignments,
    cost_of,
    loss_of,
    realistic,
    small_table,
    within,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from onnxcalib.errors import OnnxcalibError
from onnxcalib.mixed_precision.allocate import (
    Limit,
    maximise_gain,
    minimise_loss,
    proof,
)
from onnxcalib.mixed_precision.solver import SolveOptions
from onnxcalib.mixed_precision.table import LayerChoices, SensitivityTable

COSTS = ("size", "bops")


@pytest.mark.parametrize("shared", [False, True])
def test_five_hundred_layers_of_49_choices(shared: bool) -> None:
    table = realistic(7, 500, ALL, shared)
    limit = Limit("size", 0.15 * table.float_costs["size"])
    best = minimise_loss(table, [limit])
    assert_sound(table, [limit], {}, best)
    assert best.optimal
    assert best.gap <= GAP
    gain = maximise_gain(table, "size", best.estimated_loss)
    assert gain.costs["size"] <= best.costs["size"] / (1 - GAP)
    assert gain.estimated_loss <= best.estimated_loss


def test_same_answer_each_time() -> None:
    table = realistic(3, 80, [BASE, W4A8, W8A4, W4A4], shared=True)
    limits = [Limit("size", 0.2 * table.float_costs["size"])]
    assert minimise_loss(table, limits) == minimise_loss(table, limits)


def test_where_it_is_stopped_the_incumbent_is_taken_and_its_gap_told() -> None:
    table = realistic(5, 120, ALL, shared=True)
    limits = [Limit(name, 0.5 * cost_of(table, name, {row.layer: BASE for row in table.layers})) for name in COSTS]
    stopped = minimise_loss(table, limits, options=SolveOptions(gap=0.0, max_nodes=1))
    assert_sound(table, limits, {}, stopped)
    assert not stopped.optimal
    assert stopped.gap > 0
    solved = minimise_loss(table, limits, options=SolveOptions(gap=1e-6))
    assert solved.optimal
    assert stopped.estimated_loss * (1 - stopped.gap) <= solved.estimated_loss <= stopped.estimated_loss
    assert f"{100 * stopped.gap:.2g} %" in proof(stopped.optimal, stopped.gap)


def test_without_an_incumbent_at_the_limit_there_is_a_sentence() -> None:
    table = realistic(5, 60, ALL, shared=True)
    limits = [Limit(name, 0.5 * cost_of(table, name, {row.layer: BASE for row in table.layers})) for name in COSTS]
    with pytest.raises(OnnxcalibError) as caught:
        minimise_loss(table, limits, options=SolveOptions(time_limit=0.0))
    assert "0 s" in caught.value.message
    assert "limits" in caught.value.hint


def test_small_losses_are_told_apart_beside_a_huge_one() -> None:
    menu = {BASE: (0.0, 100.0), W4A8: (1e4, 0.0), W8A4: (2e-10, 50.0)}
    other = {BASE: (0.0, 100.0), W4A8: (1e4, 0.0), W8A4: (1e-10, 50.0)}
    table = small_table({"a": ("x", menu), "b": ("y", other)})
    got = minimise_loss(table, [Limit("size", 150)])
    assert got.choices == {"a": BASE, "b": W8A4}
    assert got.estimated_loss == 1e-10


def test_a_limit_is_kept_where_the_solver_would_pass_it_by_a_hair() -> None:
    """The best pair of layers is over the limit by a billionth of it, which is within the tolerance of HiGHS."""
    sizes = [1e9 + 1.0, 1e9, 1e9 - 2.0, 1e9 - 2.0]
    rows = {f"l{i}": (f"t{i}", {BASE: (0.0, size), W4A8: (4.0 - i, 0.0)}) for i, size in enumerate(sizes)}
    table, limit = small_table(rows), Limit("size", 2e9)
    assert_least_loss(table, [limit], {})
    assert cost_of(table, "size", minimise_loss(table, [limit]).choices) <= limit.value


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
    assert_within_gap(got.estimated_loss, [loss_of(table, it) for it in fitting])
    budget = loss_of(table, data.draw(st.sampled_from(every)))
    gain = maximise_gain(table, "size", budget)
    assert gain.estimated_loss <= budget
    assert_within_gap(gain.costs["size"], [cost_of(table, "size", it) for it in every if loss_of(table, it) <= budget])


def test_what_breaks_a_budget_by_rounding_drives_nothing_out() -> None:
    rows = {
        "a": ("x", {BASE: (0.0, 0.75), W4A8: (1.0000000000000002, 0.25), W4A4: (0.9510770952693589, 0.0)}),
        "b": ("y", {BASE: (0.0, 0.5), W4A8: (1 / 3, 0.3), W4A4: (2.5e-121, 1.6e-253)}),
        "c": ("x", {BASE: (0.0, 16.0), W4A8: (1.1e-16, 8.0), W4A4: (0.5, 4.0)}),
    }
    table = small_table(rows, fixed=5)
    every = list(assignments(table, {}))
    for budget in (loss_of(table, it) for it in every):
        sizes = [cost_of(table, "size", it) for it in every if loss_of(table, it) <= budget]
        assert_within_gap(maximise_gain(table, "size", budget).costs["size"], sizes)
