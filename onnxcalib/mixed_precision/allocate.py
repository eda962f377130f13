"""Bits for each layer by integer programming: the least loss within limits, or the least cost within a loss budget.

A measured loss below zero is noise and counts as zero, in the objective, in a loss budget and in the estimate.
Of a layer's choices that tie, the one of lower cost is taken, or of lower loss where a cost is minimised.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from onnxcalib.errors import RecipeError, near
from onnxcalib.mixed_precision import greedy
from onnxcalib.mixed_precision.search_space import AdditiveMetric, Constraint, Group, SearchSpace
from onnxcalib.mixed_precision.solver import DEFAULT, Solution, SolveOptions, best
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

    The gap is how much of the result may lie above the optimum; greedy methods prove nothing: infinity.
    """

    choices: Mapping[str, Precision]
    estimated_loss: float
    costs: Mapping[str, float]
    optimal: bool
    gap: float
    method: str


def proof(optimal: bool, gap: float) -> str:
    """How good an assignment is known to be, in words."""
    if optimal:
        return f"optimal within {100 * gap:.2g} %" if gap else "optimal"
    return f"stopped at the time limit, gap {100 * gap:.2g} %" if gap < math.inf else "not proven optimal"


def minimise_loss(
    table: SensitivityTable,
    limits: Sequence[Limit],
    overrides: Mapping[str, Precision] = {},
    options: SolveOptions = DEFAULT,
) -> Allocation:
    """The assignment with the least estimated loss among those within every limit."""
    space = _space(table, overrides)
    constraints = _constraints(table, limits)
    names = {limit.cost for limit in limits} or set(table.cost_names())
    return _best(table, space, _loss(table), constraints, _blend(table, sorted(names)), options)


def maximise_gain(
    table: SensitivityTable,
    cost: str,
    max_loss: float,
    limits: Sequence[Limit] = (),
    overrides: Mapping[str, Precision] = {},
    options: SolveOptions = DEFAULT,
) -> Allocation:
    """The assignment with the least total cost among those whose estimated loss, and every limit, holds."""
    space = _space(table, overrides)
    loss = _loss(table)
    budget = _constraint(loss, max_loss)
    constraints = [budget, *_constraints(table, limits)] if budget.most < math.inf else _constraints(table, limits)
    return _best(table, space, _cost(table, cost), constraints, loss, options)


def least_reachable(
    table: SensitivityTable, cost: str, limits: Sequence[Limit] = (), overrides: Mapping[str, Precision] = {}
) -> float:
    """The least total of the cost that any assignment within the limits has."""
    space = _space(table, overrides)
    constraints = _constraints(table, limits)
    least = _least(space, _cost(table, cost), constraints)
    if least is None:
        raise _unreachable(table, space, constraints)
    return least


def check_request(
    table: SensitivityTable, limits: Sequence[Limit], overrides: Mapping[str, Precision], cost: str
) -> None:
    """Raise a RecipeError for limits, overrides or a cost to minimise that the table does not know, without solving."""
    _space(table, overrides)
    _constraints(table, limits)
    _cost(table, cost)


def greedy_accuracy(table: SensitivityTable, limit: Limit, overrides: Mapping[str, Precision] = {}) -> Allocation:
    """The baseline that lowers the most robust layers first until the limit is met."""
    return _greedy(table, limit, overrides, greedy.lower_most_robust, "greedy-accuracy")


def greedy_compression(table: SensitivityTable, limit: Limit, overrides: Mapping[str, Precision] = {}) -> Allocation:
    """The baseline that puts every layer at its cheapest and raises the smallest layers while the budget lasts."""
    return _greedy(table, limit, overrides, greedy.raise_smallest, "greedy-compression")


GREEDY = {"greedy-accuracy": greedy_accuracy, "greedy-compression": greedy_compression}


# From the table and the request to a search space and its metrics.


def _space(table: SensitivityTable, overrides: Mapping[str, Precision]) -> SearchSpace:
    check(table)
    candidates = {row.layer: tuple(sorted(row.losses, reverse=True)) for row in table.layers}
    for layer, precision in overrides.items():
        if layer not in candidates:
            raise RecipeError(f"the pinned layer {layer!r} is unknown.", near(layer, candidates))
        if precision not in candidates[layer]:
            known = ", ".join(map(str, candidates[layer]))
            raise RecipeError(
                f"layer {layer!r} is pinned to {precision}, which is not among its choices.", f"It has {known}."
            )
        candidates[layer] = (precision,)
    space = SearchSpace(candidates, table.groups())
    tensors = {row.layer: row.tensor for row in table.layers}
    for group in space.groups:
        if not space.shared_bits(group):
            raise _no_shared_bits(space, group, tensors[group[0]], overrides)
    return space.shared_only()


def _no_shared_bits(space: SearchSpace, group: Group, tensor: str, overrides: Mapping[str, Precision]) -> RecipeError:
    clash = [pair for pair in combinations(group, 2) if not space.shared_bits(pair)]
    names = [
        f"{layer!r} (pinned to {overrides[layer]})" if layer in overrides else repr(layer)
        for layer in (clash[0] if clash else group)
    ]
    return RecipeError(
        f"layers {' and '.join(names)} read the same tensor {tensor!r} but have no activation bits in common.",
        "Pin them to the same activation bits.",
    )


def _loss(table: SensitivityTable) -> AdditiveMetric:
    floored = {row.layer: {choice: max(loss, 0.0) for choice, loss in row.losses.items()} for row in table.layers}
    return AdditiveMetric("estimated loss", floored)


def _cost(table: SensitivityTable, name: str) -> AdditiveMetric:
    if name not in table.cost_names():
        raise RecipeError(f"the cost {name!r} is unknown.", near(name, table.cost_names()))
    return AdditiveMetric(name, {row.layer: row.costs[name] for row in table.layers}, table.fixed.get(name, 0.0))


def _blend(table: SensitivityTable, names: Sequence[str]) -> AdditiveMetric:
    """Several costs as one, each relative to the most that it can be."""
    if len(names) == 1:
        return _cost(table, names[0])
    scales = {name: math.fsum(max(row.costs[name].values()) for row in table.layers) or 1.0 for name in names}
    values = {
        row.layer: {it: math.fsum(row.costs[name][it] / scales[name] for name in names) for it in row.losses}
        for row in table.layers
    }
    return AdditiveMetric("costs", values)


def _constraints(table: SensitivityTable, limits: Sequence[Limit]) -> list[Constraint]:
    constraints = [_constraint(_cost(table, limit.cost), limit.value) for limit in limits]
    return [constraint for constraint in constraints if constraint.most < math.inf]


def _constraint(metric: AdditiveMetric, most: float) -> Constraint:
    if math.isnan(most) or most == -math.inf:
        raise RecipeError(f"{most} is not a limit of {metric.label}.")
    return Constraint(metric, most)


# What comes out.


def _best(
    table: SensitivityTable,
    space: SearchSpace,
    objective: AdditiveMetric,
    constraints: Sequence[Constraint],
    tie: AdditiveMetric,
    options: SolveOptions,
) -> Allocation:
    found = best(space, objective, constraints, tie, options)
    if found is None:
        raise _unreachable(table, space, constraints)
    return _result(table, found, "integer program")


def _greedy(
    table: SensitivityTable, limit: Limit, overrides: Mapping[str, Precision], rule: greedy.Rule, method: str
) -> Allocation:
    space = _space(table, overrides)
    constraint = _constraint(_cost(table, limit.cost), limit.value)
    choices = rule(space, table.base, constraint, _loss(table))
    if choices is None:
        raise _unreachable(table, space, [constraint])
    return _result(table, Solution(choices, optimal=False, gap=math.inf), method)


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


def _least(space: SearchSpace, metric: AdditiveMetric, constraints: Sequence[Constraint]) -> float | None:
    """The least that the metric can total, with no gap: it is told to the user; None if nothing is within them."""
    found = best(space, metric, constraints, metric, SolveOptions(gap=0.0))
    return None if found is None else metric.total(found.choices)


def _unreachable(table: SensitivityTable, space: SearchSpace, constraints: Sequence[Constraint]) -> RecipeError:
    """Say which limits cannot be met and how low each can go, all other limits held if they can be."""
    broken = [it for it in constraints if not it.holds(space.cheapest(it.metric, it.metric))]
    lows: list[tuple[Constraint, float]] = []
    for constraint in broken or constraints:
        low = _least(space, constraint.metric, [other for other in constraints if other is not constraint])
        if low is None and broken:
            low = _least(space, constraint.metric, [])
        if low is not None:
            lows.append((constraint, low))
    hint = "Raise the limit, offer lower bits, or override fewer layers."
    if broken:
        said = [
            f"no assignment reaches {_stated(it)}; the least reachable is {_shown(table, it, low)}" for it, low in lows
        ]
        return RecipeError(f"{'; '.join(said)}.", hint)
    said = [f"the least reachable {it.metric.label} is {_shown(table, it, low)}" for it, low in lows]
    together = " and ".join(map(_stated, constraints))
    tail = f"; with the other limits held, {', '.join(said)}" if said else ""
    return RecipeError(f"{together} are each reachable alone, but no assignment reaches them together{tail}.", hint)


def _stated(constraint: Constraint) -> str:
    unit = " bytes" if constraint.metric.label in BYTES else ""
    return f"{constraint.metric.label} <= {constraint.most:,.15g}{unit}"


def _shown(table: SensitivityTable, constraint: Constraint, low: float) -> str:
    name = constraint.metric.label
    whole = table.float_costs.get(name, 0.0)
    if whole <= 0:
        return _rounded_up(low)
    ratio = f"{math.ceil(low / whole * 1000) / 1000:.3f}"
    return f"{_rounded_up(low)} ({f'compression {ratio}' if name == 'size' else f'{ratio} of the float model'})"


def _rounded_up(value: float) -> str:
    """A short text whose value is not below the given one, so that it can be typed back as a limit."""
    if abs(value) >= 1000 and math.isfinite(value):
        return f"{math.ceil(value):,}"
    text = f"{value:.6g}"
    return text if float(text) >= value else repr(value)
