"""The integer program behind an allocation: dominated choices are dropped, HiGHS solves the rest.

One binary a layer and choice, one a shared tensor and its activation bits. Limits hold exactly: an answer that passes
one within HiGHS's tolerance is cut off, and the program solved again.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain

import highspy
import numpy as np
from numpy.typing import NDArray

from onnxcalib.errors import OnnxcalibError
from onnxcalib.mixed_precision.search_space import AdditiveMetric, Choices, Constraint, SearchSpace

TOLERANCE = 1e-9
LARGEST = 1e4  # the largest cost that HiGHS sees, for its tolerances are absolute
SPREAD = 1e4  # a cost that is so many times the whole answer hides its details behind these tolerances
FIXED_OPTIONS = {
    "output_flag": False,
    "threads": 1,
    "random_seed": 1,
    "presolve": "off",  # it cuts off optima where coefficients are near the tolerances, and saves no time here
    "mip_feasibility_tolerance": TOLERANCE,
    "primal_feasibility_tolerance": TOLERANCE,
    "dual_feasibility_tolerance": TOLERANCE,
}
STATUS = highspy.HighsModelStatus


@dataclass(frozen=True)
class SolveOptions:
    """When to stop: at this relative gap, after these seconds, or after these nodes of the search tree."""

    gap: float = 1e-4
    time_limit: float = 60.0
    max_nodes: int = highspy.kHighsIInf


DEFAULT = SolveOptions()


@dataclass(frozen=True)
class Solution:
    """An assignment, whether it is proven optimal within the gap asked for, and the gap that is left."""

    choices: Choices
    optimal: bool = True
    gap: float = 0.0


@dataclass(frozen=True)
class Row:
    """Lower <= the columns, each times its value, summed <= upper."""

    columns: Sequence[int]
    values: Sequence[float]
    lower: float
    upper: float


@dataclass(frozen=True)
class Outcome:
    """What HiGHS found: the columns that are one, if it has an answer, and what no answer can be below."""

    ones: NDArray[np.intp] | None
    bound: float
    optimal: bool


def best(
    space: SearchSpace,
    objective: AdditiveMetric,
    constraints: Sequence[Constraint],
    tie: AdditiveMetric,
    options: SolveOptions = DEFAULT,
) -> Solution | None:
    """The least objective within the constraints, up to the gap; None if nothing is within the constraints."""
    free = space.cheapest(objective, tie)
    if all(it.holds(free) for it in constraints):
        return Solution(free)
    if not all(it.holds(space.cheapest(it.metric, it.metric)) for it in constraints):
        return None
    space = space.undominated([objective, *(it.metric for it in constraints), tie])
    found = _solve(space, objective, constraints, options)
    return found and replace(found, choices=_settle_ties(space, objective, constraints, tie, found.choices))


def _solve(
    space: SearchSpace, objective: AdditiveMetric, constraints: Sequence[Constraint], options: SolveOptions
) -> Solution | None:
    """HiGHS until its answer keeps every constraint exactly and is not lost beside much larger costs."""
    end = time.monotonic() + options.time_limit
    columns, costs = space.columns(), space.above_floor(objective)
    rows = [*_choice_rows(space), *(_limit_row(space, it) for it in constraints)]
    found: Choices | None = None
    least, bound, most = math.inf, 0.0, float(costs.max()) or 1.0
    while True:
        left = replace(options, time_limit=max(end - time.monotonic(), 0.0))
        # No better answer has a cost above the most; shown as the most, it leaves HiGHS's bound a bound.
        outcome = minimise(np.minimum(costs, most) / most * LARGEST, rows, left)
        if outcome is None:
            return None
        bound = max(bound, outcome.bound / LARGEST * most)
        if outcome.ones is None:
            break
        ones = outcome.ones[outcome.ones < len(columns)]
        choices = dict(columns[one] for one in ones)
        if broken := [it for it in constraints if not it.holds(choices)]:
            rows += [_cover_cut(space, it.metric, choices) for it in broken]
            continue
        total = math.fsum(costs[ones])
        if total < least:
            found, least = choices, total
        if not outcome.optimal or not least or most <= SPREAD * least:
            break
        most = 2 * least
    if found is None:
        raise OnnxcalibError(
            f"no assignment within the limits was found in {options.time_limit:g} s.",
            "Offer fewer precisions, give fewer limits, or move a limit a little.",
        )
    gap = (least - bound) / max(objective.total(found), least) if bound < least else 0.0
    # What is left of a closed gap is rounding.
    return Solution(found, outcome.optimal, gap if gap > TOLERANCE else 0.0)


def _settle_ties(
    space: SearchSpace,
    objective: AdditiveMetric,
    constraints: Sequence[Constraint],
    tie: AdditiveMetric,
    choices: Choices,
) -> Choices:
    """Group by group, the least tie breaker that gives no layer more of the objective; of equals the higher bits."""
    values = objective.values
    no_worse = {
        layer: tuple(it for it in offered if values[layer][it] <= values[layer][choices[layer]])
        for layer, offered in space.candidates.items()
    }
    space = SearchSpace(no_worse, space.groups).shared_only()
    for group in space.groups:
        for bits in space.shared_bits(group):
            changed = choices | space.cheapest_at(group, bits, tie, objective)
            better = (tie.total(changed), -bits) < (tie.total(choices), -choices[group[0]].activation)
            if better and all(it.holds(changed) for it in constraints):
                choices = changed
    return choices


def _choice_rows(space: SearchSpace) -> list[Row]:
    """Each layer takes one choice, and a group the same activation bits."""
    number = {column: index for index, column in enumerate(space.columns())}
    rows: list[Row] = []
    size = len(number)
    for group in space.groups:
        if len(group) == 1:
            own = [number[group[0], choice] for choice in space.candidates[group[0]]]
            rows.append(Row(own, [1.0] * len(own), 1.0, 1.0))
            continue
        shared = {bits: size + offset for offset, bits in enumerate(space.shared_bits(group))}
        size += len(shared)
        rows.append(Row(list(shared.values()), [1.0] * len(shared), 1.0, 1.0))
        for layer in group:
            for bits, column in shared.items():
                own = [number[layer, choice] for choice in space.at_bits(layer, bits)]
                rows.append(Row([*own, column], [*[1.0] * len(own), -1.0], 0.0, 0.0))
    return rows


def _limit_row(space: SearchSpace, constraint: Constraint) -> Row:
    """The shares that choices take of what the limit leaves above every layer's least are at most one."""
    metric = constraint.metric
    spent = [-metric.fixed, *(-value for value in space.floor(metric).values())]
    room = math.fsum([constraint.most, *spent]) + 2 * math.ulp(constraint.most)
    above = space.above_floor(metric)
    used = np.flatnonzero(above)
    with np.errstate(over="ignore"):  # what does not fit alone is shown as two, however large it is
        shares = np.minimum(above[used] / room, 2.0)
    # Generous, as rounding must not rule anything out: what passes the limit by a hair is found and cut off.
    return Row(used.tolist(), shares.tolist(), -math.inf, 1 + TOLERANCE)


def _cover_cut(space: SearchSpace, metric: AdditiveMetric, choices: Choices) -> Row:
    """Forbids an assignment that passes its limit, and all with no less than it in the layers above their least."""
    floor = space.floor(metric)
    above = {layer: value for layer, it in choices.items() if (value := metric.values[layer][it]) > floor[layer]}
    cover = [
        index
        for index, (layer, choice) in enumerate(space.columns())
        if metric.values[layer][choice] >= above.get(layer, math.inf)
    ]
    return Row(cover, [1.0] * len(cover), -math.inf, len(above) - 1.0)


def minimise(costs: NDArray[np.float64], rows: Sequence[Row], options: SolveOptions) -> Outcome | None:
    """A binary program solved by HiGHS, None if it is infeasible; columns that only rows name cost nothing."""
    highs = highspy.Highs()
    stop = {
        "mip_rel_gap": options.gap,
        "mip_abs_gap": options.gap * LARGEST / SPREAD / 100,
        "time_limit": options.time_limit,
        "mip_max_nodes": options.max_nodes,
    }
    for name, value in (FIXED_OPTIONS | stop).items():
        highs.setOptionValue(name, value)
    highs.passModel(_model(costs, rows))
    highs.run()
    status, info = highs.getModelStatus(), highs.getInfo()
    if status in (STATUS.kInfeasible, STATUS.kUnboundedOrInfeasible):
        return None
    if status not in (STATUS.kOptimal, STATUS.kTimeLimit, STATUS.kSolutionLimit):
        raise OnnxcalibError(f"the integer program ended with {highs.modelStatusToString(status)!r}.")
    feasible = info.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible
    ones = np.flatnonzero(np.asarray(highs.getSolution().col_value) > 0.5) if feasible else None
    return Outcome(ones, float(info.mip_dual_bound), status == STATUS.kOptimal)


def _model(costs: NDArray[np.float64], rows: Sequence[Row]) -> highspy.HighsLp:
    size = 1 + max(chain.from_iterable(row.columns for row in rows))
    lp = highspy.HighsLp()
    lp.num_col_, lp.num_row_ = size, len(rows)
    lp.col_cost_ = np.concatenate([costs, np.zeros(size - len(costs))])
    lp.col_lower_, lp.col_upper_ = np.zeros(size), np.ones(size)
    lp.row_lower_, lp.row_upper_ = np.array([row.lower for row in rows]), np.array([row.upper for row in rows])
    lp.integrality_ = [highspy.HighsVarType.kInteger] * size
    lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    lp.a_matrix_.start_ = np.cumsum([0, *(len(row.columns) for row in rows)], dtype=np.int32)
    lp.a_matrix_.index_ = np.concatenate([row.columns for row in rows]).astype(np.int32)
    lp.a_matrix_.value_ = np.concatenate([row.values for row in rows])
    return lp
