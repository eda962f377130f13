"""Sensitivity tables for tests of the allocation, and every assignment of the small ones."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Mapping, Sequence

import pytest
from hypothesis import strategies as st

from onnxcalib.errors import RecipeError
from onnxcalib.mixed_precision.allocate import Allocation, Limit, minimise_loss
from onnxcalib.mixed_precision.table import LayerChoices, SensitivityTable
from onnxcalib.recipe import Precision

BASE = Precision(8, 8)
W4A4, W4A8, W8A4 = Precision(4, 4), Precision(4, 8), Precision(8, 4)
GAP = 1e-4  # what the solver may leave by default
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


def assert_least_loss(table: SensitivityTable, limits: Sequence[Limit], pins: Mapping[str, Precision]) -> None:
    """Brute force finds nothing better, and nothing where nothing is found."""
    fitting = [it for it in assignments(table, pins) if within(table, limits, it)]
    if not fitting:
        with pytest.raises(RecipeError, match="no assignment reaches"):
            minimise_loss(table, limits, pins)
        return
    got = minimise_loss(table, limits, pins)
    assert_sound(table, limits, pins, got)
    assert_within_gap(got.estimated_loss, [loss_of(table, it) for it in fitting])
    assert got.optimal
    assert got.gap <= GAP
    assert got.method == "integer program"


def assert_within_gap(found: float, every: Sequence[float]) -> None:
    """Nothing is better by more than the gap; rounding is that of the sums."""
    assert min(every) <= found <= min(every) / (1 - GAP)
