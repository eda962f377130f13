"""Bits for each layer by integer programming: the least loss within limits, or the least cost within a loss budget.

A measured loss below zero is noise and counts as zero, in the objective, in a loss budget and in the estimate.
Ties go to the lower cost, or to the lower loss where a cost is minimised: a second solve holds the first optimum.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import highspy
import numpy as np
from numpy.typing import NDArray

from onnxcalib.errors import OnnxcalibError, RecipeError, near
from onnxcalib.recipe import Precision
from onnxcalib.stages import greedy
from onnxcalib.stages.greedy import Bound, Choices, Group, Measure, Space, narrow, undominated
from onnxcalib.stages.sensitivity_table import SensitivityTable, check

# Column numbers and their values.
_Row = tuple[NDArray[np.intp], NDArray[np.float64]]
BYTES = {"size", "activation"}
OBJECTIVE_SCALE = 1e4
# An optimum below this share of the worst choice drowns in HiGHS's tolerances.
RESOLVED = 1e-5
TOLERANCE = 1e-9
ROUNDING = 1e-12
OPTIONS = {
    "output_flag": False,
    "threads": 1,
    "time_limit": 120.0,  # seconds; rare instances would otherwise go on for ever
    "random_seed": 1,
    "mip_rel_gap": 0.0,
    "mip_abs_gap": 0.0,
    "mip_feasibility_tolerance": TOLERANCE,
    "primal_feasibility_tolerance": TOLERANCE,
    "dual_feasibility_tolerance": TOLERANCE,
}
TRIES = 4


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


@dataclass(frozen=True)
class _Solution:
    choices: Choices
    optimal: bool
    gap: float


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


# Solving.


def _best(table: SensitivityTable, space: Space, aim: Measure, bounds: list[Bound], tie: Measure) -> Allocation:
    first = _solve(space, aim, bounds)
    if first is None:
        raise _unreachable(table, space, bounds)
    held = [*bounds, Bound(aim, aim.total(first.choices))]
    # Without the surrogate, which leaves few choices, the second solve would be the harder one.
    few = narrow(space, held)
    few = few and narrow(few, [_surrogate(few, aim, bounds, first.choices)])
    second = few and _solve(few, tie, held)
    # The second solve has an answer, the first one's, unless rounding hides it.
    return _result(table, replace(first, choices=(second or first).choices), "integer program")


def _solve(space: Space, aim: Measure, bounds: Sequence[Bound]) -> _Solution | None:
    """The assignment with the least aim within the bounds, each checked exactly; None if there is none."""
    drawn = list(bounds)
    for attempt in range(TRIES):
        solution = _solve_scaled(space, aim, drawn)
        if solution is None:
            return None
        over = [bound.measure.total(solution.choices) - bound.most for bound in bounds]
        if max(over, default=0.0) <= 0:
            return solution
        # The solver's tolerance let a bound be passed: draw it in by as much, then by the whole tolerance.
        drawn = [
            replace(bound, most=bound.most - max(excess, attempt * TOLERANCE * space.room(bound)))
            if excess > 0
            else bound
            for bound, excess in zip(drawn, over, strict=True)
        ]
    raise OnnxcalibError("the integer program could not be solved within its limits.", "Move a limit a little.")


def _surrogate(space: Space, aim: Measure, bounds: Sequence[Bound], best: Choices) -> Bound:
    """One bound that all assignments as good as the best obey: aim and bounds added up, weighted by the LP's duals."""
    relaxed = _model(space, aim, bounds)
    relaxed.integrality_ = []
    duals = np.asarray(_highs(relaxed).getSolution().row_dual)[len(relaxed.row_upper_) - len(bounds) :]
    values = _objective(space, aim)
    columns = space.columns()
    most = math.fsum(value for (layer, it), value in zip(columns, values, strict=True) if best[layer] == it)
    for bound, dual in zip(bounds, duals, strict=True):
        # Any weight that is not negative makes a valid bound, so the LP need not be solved exactly.
        weight = max(-float(dual), 0.0)
        values = values + weight * space.shares(bound)
        most += weight
    table: dict[str, dict[Precision, float]] = {layer: {} for layer in space.menus}
    for (layer, choice), value in zip(columns, values, strict=True):
        table[layer][choice] = float(value)
    return Bound(Measure("surrogate", table), most * (1 + 1e-9))


def _solve_scaled(space: Space, aim: Measure, bounds: Sequence[Bound]) -> _Solution | None:
    """Solve; if the optimum is tiny beside the worst choice, drop all that is worse than it and solve on its scale."""
    while True:
        narrowed = narrow(space, bounds)
        if narrowed is None:
            return None
        kept = undominated(narrowed, [aim, *(bound.measure for bound in bounds)])
        solution = _run(kept, aim, bounds)
        if solution is None:
            return None
        floor = kept.floor(aim)
        above = math.fsum(aim.values[layer][choice] - floor[layer] for layer, choice in solution.choices.items())
        better = narrow(narrowed, [Bound(aim, aim.total(solution.choices))])
        if above == 0 or above >= RESOLVED * kept.above_floor(aim).max() or better is None:
            return solution
        space = better


def _run(space: Space, aim: Measure, bounds: Sequence[Bound]) -> _Solution | None:
    highs = _highs(_model(space, aim, bounds))
    status = highs.getModelStatus()
    if status in {highspy.HighsModelStatus.kInfeasible, highspy.HighsModelStatus.kUnboundedOrInfeasible}:
        return None
    if status == highspy.HighsModelStatus.kTimeLimit:
        hint = "Offer fewer precisions, or give fewer limits."
        raise OnnxcalibError(f"the integer program was not solved within {OPTIONS['time_limit']:.0f} s.", hint)
    if status != highspy.HighsModelStatus.kOptimal:
        raise OnnxcalibError(f"the integer program ended with {highs.modelStatusToString(status)!r}.")
    values = highs.getSolution().col_value
    choices = {layer: choice for (layer, choice), value in zip(space.columns(), values, strict=False) if value > 0.5}
    gap = float(highs.getInfo().mip_gap)
    # What is left of a closed gap is rounding.
    return _Solution(choices, True, gap if ROUNDING < gap < math.inf else 0.0)


def _highs(model: highspy.HighsLp) -> highspy.Highs:
    highs = highspy.Highs()
    for name, value in OPTIONS.items():
        highs.setOptionValue(name, value)
    highs.passModel(model)
    highs.run()
    return highs


def _model(space: Space, aim: Measure, bounds: Sequence[Bound]) -> highspy.HighsLp:
    """One binary a layer and choice, then one a shared tensor and its bits; each bound's row is scaled to its room."""
    rows, right = _choice_rows(space)
    size = 1 + max(int(index.max()) for index, _ in rows)
    for bound in bounds:
        shares = space.shares(bound)
        rows.append((np.flatnonzero(shares), shares[np.flatnonzero(shares)]))
    objective = np.zeros(size)
    objective[: len(space.columns())] = _objective(space, aim)
    lp = highspy.HighsLp()
    lp.num_col_, lp.num_row_ = size, len(rows)
    lp.col_cost_, lp.col_lower_, lp.col_upper_ = objective, np.zeros(size), np.ones(size)
    lp.row_lower_ = np.array([*right, *(-highspy.kHighsInf for _ in bounds)])
    lp.row_upper_ = np.array([*right, *(1.0 for _ in bounds)])
    lp.integrality_ = [highspy.HighsVarType.kInteger] * size
    lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    lp.a_matrix_.start_ = np.cumsum([0, *(len(index) for index, _ in rows)], dtype=np.int32)
    lp.a_matrix_.index_ = np.concatenate([index for index, _ in rows]).astype(np.int32)
    lp.a_matrix_.value_ = np.concatenate([values for _, values in rows])
    return lp


def _objective(space: Space, aim: Measure) -> NDArray[np.float64]:
    above = space.above_floor(aim)
    return above / above.max() * OBJECTIVE_SCALE if above.max() > 0 else above


def _choice_rows(space: Space) -> tuple[list[_Row], list[float]]:
    """The rows by which each layer takes one choice and a group the same bits, and their right-hand sides."""
    number = {column: index for index, column in enumerate(space.columns())}
    rows: list[_Row] = []
    right: list[float] = []

    def equal(plus: list[int], minus: list[int], value: float) -> None:
        rows.append((np.array([*plus, *minus]), np.array([1.0] * len(plus) + [-1.0] * len(minus))))
        right.append(value)

    size = len(number)
    for group in space.groups:
        if len(group) == 1:
            equal([number[group[0], choice] for choice in space.menus[group[0]]], [], 1.0)
            continue
        shared = {bits: size + offset for offset, bits in enumerate(space.shared_bits(group))}
        size += len(shared)
        equal(list(shared.values()), [], 1.0)
        for layer in group:
            for bits, column in shared.items():
                equal([number[layer, choice] for choice in space.at_bits(layer, bits)], [column], 0.0)
    return rows, right


# What comes out.


def _result(table: SensitivityTable, solution: _Solution, method: str) -> Allocation:
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
    return _result(table, _Solution(choices, optimal=False, gap=math.inf), method)


def _least(space: Space, measure: Measure, bounds: Sequence[Bound]) -> float | None:
    solution = _solve(space, measure, bounds) if bounds else None
    if bounds and solution is None:
        return None
    return measure.total(solution.choices if solution else greedy.cheapest(space, measure, measure))


def _unreachable(table: SensitivityTable, space: Space, bounds: Sequence[Bound]) -> RecipeError:
    """Say which limits cannot be met and how low each can go, all other limits held if they can be."""
    alone = [greedy.cheapest(space, bound.measure, bound.measure) for bound in bounds]
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
