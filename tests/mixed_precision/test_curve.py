"""The compression-loss curve: the exact solution below both greedy rules, and where the curve begins and ends."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import pytest
from allocation_tables import GAP
from hypothesis import given, settings
from hypothesis import strategies as st

from models import conv_net, feed_for
from onnxcalib.mixed_precision.curve import Point, curve, ratios_between
from onnxcalib.mixed_precision.table import LayerChoices, SensitivityTable
from onnxcalib.pipeline.sweep import compression_curve
from onnxcalib.recipe import Pipeline, Precision, RangeMethod, Recipe, parse_bits

MENU = (Precision(2, 4), Precision(4, 4), Precision(4, 8), Precision(8, 8))
BASE = MENU[-1]
EXACT = "integer program"


@st.composite
def tables(draw: st.DrawFn) -> SensitivityTable:
    rows = []
    for index in range(draw(st.integers(1, 5))):
        losses = {it: draw(st.floats(-0.01, 1.0)) for it in MENU[:-1]} | {BASE: 0.0}
        parameters = draw(st.integers(1, 5000))
        size = {it: float(parameters * it.weight) for it in MENU}
        tensor = f"t{draw(st.integers(0, index))}"
        rows.append(LayerChoices(f"layer{index}", tensor, losses, {"size": size}))
    whole = 4.0 * sum(row.costs["size"][BASE] for row in rows) + 100
    fixed = {"size": float(draw(st.integers(0, 100)))}
    return SensitivityTable(BASE, "mse", draw(st.floats(0, 1)), 8, fixed, {"size": whole}, tuple(rows))


def by_method(points: list[Point], method: str) -> dict[float, Point]:
    return {point.ratio: point for point in points if point.method == method}


def smallest(table: SensitivityTable, pins: Mapping[str, Precision] = {}) -> float:
    """By trying every assignment in which layers that read one tensor agree on its bits."""
    names = [row.layer for row in table.layers]
    sizes = []
    for choices in itertools.product(*([pins[name]] if name in pins else MENU for name in names)):
        chosen = dict(zip(names, choices, strict=True))
        if all(len({chosen[name].activation for name in group}) == 1 for group in table.groups()):
            sizes.append(sum(row.costs["size"][chosen[row.layer]] for row in table.layers))
    return (table.fixed["size"] + min(sizes)) / table.float_costs["size"]


@settings(max_examples=40)
@given(tables(), st.integers(2, 6))
def test_the_exact_curve_lies_below_both_greedy_ones(table: SensitivityTable, count: int) -> None:
    ratios = ratios_between(table, count, {})
    points = list(curve(table, ratios, {}))
    exact = by_method(points, EXACT)
    assert list(exact) == list(dict.fromkeys(ratios))
    for point in points:
        assert point.estimated_loss / (1 - GAP) >= exact[point.ratio].estimated_loss
        assert point.size <= point.ratio * (1 + 1e-9)
        assert point.measured_loss is None
        assert point.size == pytest.approx(point.allocation.costs["size"] / table.float_costs["size"])
    losses = [point.estimated_loss for point in exact.values()]
    assert all(later <= earlier / (1 - GAP) for earlier, later in itertools.pairwise(losses))
    # At the largest ratio the base fits, and floored losses have nothing below it.
    assert losses[-1] == pytest.approx(table.base_loss)


@settings(max_examples=40)
@given(tables(), st.integers(2, 6))
def test_the_curve_goes_from_the_least_reachable_size_to_the_base(table: SensitivityTable, count: int) -> None:
    ratios = ratios_between(table, count, {})
    assert len(ratios) == count
    assert ratios == sorted(ratios)
    assert ratios[0] == pytest.approx(smallest(table))
    base = table.fixed["size"] + sum(row.costs["size"][BASE] for row in table.layers)
    assert ratios[-1] == pytest.approx(base / table.float_costs["size"])


@settings(max_examples=25)
@given(tables(), st.sampled_from(MENU))
def test_pins_hold_along_the_curve(table: SensitivityTable, pinned: Precision) -> None:
    pins = {"layer0": pinned}
    ratios = ratios_between(table, 3, pins)
    assert ratios[0] == pytest.approx(smallest(table, pins))
    highest = table.fixed["size"] + sum(row.costs["size"][pins.get(row.layer, BASE)] for row in table.layers)
    assert ratios[-1] == pytest.approx(highest / table.float_costs["size"])
    points = list(curve(table, ratios, pins))
    assert {point.allocation.choices["layer0"] for point in points} == {pinned}


def test_every_method_at_every_size() -> None:
    rows = tuple(
        LayerChoices(name, name, {MENU[1]: 0.1, BASE: 0.0}, {"size": {MENU[1]: 4.0, BASE: 8.0}}) for name in "ab"
    )
    table = SensitivityTable(BASE, "mse", 0.0, 8, {"size": 0.0}, {"size": 64.0}, rows)
    points = list(curve(table, [0.125, 0.25], {}))
    assert [point.measured_loss for point in points] == [None] * 6
    assert [point.method for point in points] == [EXACT, "greedy-accuracy", "greedy-compression"] * 2
    assert [point.estimated_loss for point in points] == pytest.approx([0.2] * 3 + [0.0] * 3)


def test_the_curve_of_a_model() -> None:
    model = conv_net()
    recipe = Recipe(Pipeline.LIGHT, parse_bits("w3a4,w8a8"), ranges=RangeMethod.MINMAX, compression=2.0)
    seen: list[tuple[str, int, int]] = []
    points = compression_curve(
        model, feed_for(model, 24), recipe, 3, measure=True, progress=lambda *step: seen.append(step)
    )
    exact = by_method(points, EXACT)
    assert len(exact) == 3
    first, *_, last = exact.values()
    # A very small weight takes fewer bytes at eight bits, which need no unpacking.
    assert list(first.allocation.choices.values()).count(Precision(3, 4)) >= 3
    assert set(last.allocation.choices.values()) == {BASE}
    assert last.measured_loss == pytest.approx(last.estimated_loss, rel=1e-3)
    assert all(point.measured_loss is not None and point.measured_loss > 0 for point in points)
    for point in points:
        assert point.estimated_loss / (1 - GAP) >= exact[point.ratio].estimated_loss
    different = {tuple(sorted(point.allocation.choices.items())) for point in points}
    assert [done for stage, done, _ in seen if stage == "curve"] == list(range(1, len(different) + 1))
    for point in points:
        twins = [it for it in points if it.allocation.choices == point.allocation.choices]
        assert {it.measured_loss for it in twins} == {point.measured_loss}
