"""Bits for each layer by integer programming: the least loss within limits, or the least cost within a loss budget.

A measured loss below zero is noise and counts as zero, in the objective, in a loss budget and in the estimate.
Ties go to the lower cost, or to the lower loss where a cost is minimised.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from onnxcalib.errors import RecipeError, near
from onnxcalib.mixed_precision import greedy
from onnxcalib.mixed_precision.search_space import Bound, Choices, Group, Measure, Space, cheapest
from onnxcalib.mixed_precision.solver import Solution, best
from onnxcalib.mixed_precision.table import SensitivityTable, check
from onnxcalib.recipe import Precision

BYTES = {"size", "activation"}


@dataclass(frozen=True)
class Limit:
    """One constraint: the named cost, summed over the layers plus what is fixed, is at most this value."""

    cost: str
    value: float


@dataclass(frozen=True)
class Allocation:
    """The precision of each layer, what it is estimated to lose and cost, and how it was found.

    The gap is what the search left between the result and its proven bound; greedy methods prove nothing: infinity.
    """

    choices: Mapping[str, Precision]
    estimated_loss: float
    costs: Mapping[str, float]
    optimal: bool
    gap: float
    method: str


def minimise_loss(table: SensitivityTable, limits: Sequence[Limit], pins: Mapping[str, Precision] = {}) -> Allocation:
    """The assignment with the least estimated loss among those within every limit."""
    space = _space(table, pins)
    bounds = _bounds(table, limits)
    names = {limit.cost for limit in limits} or set(table.cost_names())
    return _best(table, space, _loss(table), bounds, _blend(table, sorted(names)))


def maximise_gain(
    table: SensitivityTable,
    cost: str,
    max_loss: float,
    limits: Sequence[Limit] = (),
    pins: Mapping[str, Precision] = {},
) -> Allocation:
    """The assignment with the least total cost among those whose estimated loss, and every limit, holds."""
    space = _space(table, pins)
    loss = _loss(table)
    budget = _bound(loss, max_loss)
    bounds = [budget, *_bounds(table, limits)] if budget.most < math.inf else _bounds(table, limits)
    return _best(table, space, _cost(table, cost), bounds, loss)


def least_reachable(
    table: SensitivityTable, cost: str, limits: Sequence[Limit] = (), pins: Mapping[str, Precision] = {}
) -> float:
    """The least total of the cost that any assignment within the limits has."""
    space = _space(table, pins)
    bounds = _bounds(table, limits)
    measure = _cost(table, cost)
    least = _least(space, measure, bounds)
    if least is None:
        raise _unreachable(table, space, bounds)
    return least


def check_request(table: SensitivityTable, limits: Sequence[Limit], pins: Mapping[str, Precision], cost: str) -> None:
    """Raise a RecipeError for limits, pins or a cost to minimise that the table does not know, without solving."""
    _space(table, pins)
    _bounds(table, limits)
    _cost(table, cost)


def greedy_accuracy(table: SensitivityTable, limit: Limit, pins: Mapping[str, Precision] = {}) -> Allocation:
    """The baseline that lowers the most robust layers first until the limit is met."""
    space = _space(table, pins)
    bound = _bound(_cost(table, limit.cost), limit.value)
    choices = greedy.lower_most_robust(space, table.base, bound.measure, _loss(table), bound.most)
    return _greedy_result(table, space, bound, choices, "greedy-accuracy")


def greedy_compression(table: SensitivityTable, limit: Limit, pins: Mapping[str, Precision] = {}) -> Allocation:
    """The baseline that puts every layer at its cheapest and raises the smallest layers while the budget lasts."""
    space = _space(table, pins)
    bound = _bound(_cost(table, limit.cost), limit.value)
    choices = greedy.raise_smallest(space, table.base, bound.measure, _loss(table), bound.most)
    return _greedy_result(table, space, bound, choices, "greedy-compression")


# From the table and the wishes to a space of assignments and its measures.


def _space(table: SensitivityTable, pins: Mapping[str, Precision]) -> Space:
    check(table)
    menus = {row.layer: tuple(sorted(row.losses, reverse=True)) for row in table.layers}
    for layer, precision in pins.items():
        if layer not in menus:
            raise RecipeError(f"the pinned layer {layer!r} is unknown.", near(layer, menus))
        if precision not in menus[layer]:
            known = ", ".join(map(str, menus[layer]))
            raise RecipeError(
                f"layer {layer!r} is pinned to {precision}, which is not among its choices.", f"It has {known}."
            )
        menus[layer] = (precision,)
    space = Space(menus, table.groups())
    tensors = {row.layer: row.tensor for row in table.layers}
    for group in space.groups:
        if not space.shared_bits(group):
            raise _no_shared_bits(space, group, tensors[group[0]], pins)
    return space.shared_only()


def _no_shared_bits(space: Space, group: Group, tensor: str, pins: Mapping[str, Precision]) -> RecipeError:
    clash = [pair for pair in combinations(group, 2) if not space.shared_bits(pair)]
    names = [
        f"{layer!r}{f' (pinned to {pins[layer]})' if layer in pins else ''}" for layer in (clash[0] if clash else group)
    ]
    return RecipeError(
        f"layers {' and '.join(names)} read the same tensor {tensor!r} but have no activation bits in common.",
        "Pin them to the same activation bits.",
    )


def _loss(table: SensitivityTable) -> Measure:
    floored = {row.layer: {choice: max(loss, 0.0) for choice, loss in row.losses.items()} for row in table.layers}
    return Measure("estimated loss", floored)


def _cost(table: SensitivityTable, name: str) -> Measure:
    if name not in table.cost_names():
        raise RecipeError(f"the cost {name!r} is unknown.", near(name, table.cost_names()))
    return Measure(name, {row.layer: row.costs[name] for row in table.layers}, table.fixed.get(name, 0.0))


def _blend(table: SensitivityTable, names: Sequence[str]) -> Measure:
    """Several costs as one, each relative to the most that it can be."""
    if len(names) == 1:
        return _cost(table, names[0])
    scales = {name: math.fsum(max(row.costs[name].values()) for row in table.layers) or 1.0 for name in names}
    values = {
        row.layer: {it: math.fsum(row.costs[name][it] / scales[name] for name in names) for it in row.losses}
        for row in table.layers
    }
    return Measure("costs", values)


def _bounds(table: SensitivityTable, limits: Sequence[Limit]) -> list[Bound]:
    bounds = [_bound(_cost(table, limit.cost), limit.value) for limit in limits]
    return [bound for bound in bounds if bound.most < math.inf]


def _bound(measure: Measure, most: float) -> Bound:
    if math.isnan(most) or most == -math.inf:
        raise RecipeError(f"{most} is not a limit of {measure.label}.")
    return Bound(measure, most)


# What comes out.


def _best(table: SensitivityTable, space: Space, aim: Measure, bounds: list[Bound], tie: Measure) -> Allocation:
    found = best(space, aim, bounds, tie)
    if found is None:
        raise _unreachable(table, space, bounds)
    return _result(table, found, "integer program")


def _result(table: SensitivityTable, solution: Solution, method: str) -> Allocation:
    choices = {row.layer: solution.choices[row.layer] for row in table.layers}
    return Allocation(
        choices=choices,
        estimated_loss=_loss(table).total(choices),
        costs={name: _cost(table, name).total(choices) for name in table.cost_names()},
        optimal=solution.optimal,
        gap=solution.gap,
        method=method,
    )


def _greedy_result(
    table: SensitivityTable, space: Space, bound: Bound, choices: Choices | None, method: str
) -> Allocation:
    if choices is None:
        raise _unreachable(table, space, [bound])
    return _result(table, Solution(choices, optimal=False, gap=math.inf), method)


def _least(space: Space, measure: Measure, bounds: Sequence[Bound]) -> float | None:
    found = best(space, measure, bounds, measure)
    return None if found is None else measure.total(found.choices)


def _unreachable(table: SensitivityTable, space: Space, bounds: Sequence[Bound]) -> RecipeError:
    """Say which limits cannot be met and how low each can go, all other limits held if they can be."""
    alone = [cheapest(space, bound.measure, bound.measure) for bound in bounds]
    broken = [bound for bound, low in zip(bounds, alone, strict=True) if bound.measure.total(low) > bound.most]
    lows: list[tuple[Bound, float]] = []
    for bound in broken or bounds:
        low = _least(space, bound.measure, [other for other in bounds if other is not bound])
        if low is None and broken:
            low = _least(space, bound.measure, [])
        if low is not None:
            lows.append((bound, low))
    hint = "Raise the limit, offer lower bits, or pin fewer layers."
    if broken:
        said = [
            f"no assignment reaches {_stated(it)}; the least reachable is {_shown(table, it, low)}" for it, low in lows
        ]
        return RecipeError(f"{'; '.join(said)}.", hint)
    said = [f"the least reachable {it.measure.label} is {_shown(table, it, low)}" for it, low in lows]
    together = " and ".join(map(_stated, bounds))
    tail = f"; with the other limits held, {', '.join(said)}" if said else ""
    return RecipeError(f"{together} are each reachable alone, but no assignment reaches them together{tail}.", hint)


def _stated(bound: Bound) -> str:
    unit = " bytes" if bound.measure.label in BYTES else ""
    return f"{bound.measure.label} <= {bound.most:,.15g}{unit}"


def _shown(table: SensitivityTable, bound: Bound, low: float) -> str:
    whole = table.float_costs.get(bound.measure.label, 0.0)
    if whole <= 0:
        return _rounded_up(low)
    ratio = f"{math.ceil(low / whole * 1000) / 1000:.3f}"
    name = bound.measure.label
    return f"{_rounded_up(low)} ({f'compression {ratio}' if name == 'size' else f'{ratio} of the float model'})"


def _rounded_up(value: float) -> str:
    """A short text whose value is not below the given one, so that it can be typed back as a limit."""
    if abs(value) >= 1000 and math.isfinite(value):
        return f"{math.ceil(value):,}"
    text = f"{value:.6g}"
    return text if float(text) >= value else repr(value)
