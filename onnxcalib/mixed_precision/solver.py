"""The integer program behind an allocation: what can be ruled out is, the rest is searched or given to HiGHS."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import highspy
import numpy as np
from numpy.typing import NDArray

from onnxcalib.errors import OnnxcalibError
from onnxcalib.mixed_precision.search import Relaxed, search
from onnxcalib.mixed_precision.search_space import Bound, Choices, Measure, Space, cheapest, narrow, undominated
from onnxcalib.recipe import Precision

# Column numbers and their values.
_Row = tuple[NDArray[np.intp], NDArray[np.float64]]
OBJECTIVE_SCALE = 1e4
# The part of the relaxation's optimum by which the best assignment is first supposed to exceed it.
FIRST_GAP = 1e-5
TOLERANCE = 1e-9
ROUNDING = 1e-12
OPTIONS = {
    "output_flag": False,
    "threads": 1,
    "time_limit": 120.0,  # seconds
    "random_seed": 1,
    "mip_rel_gap": 0.0,
    "mip_abs_gap": 0.0,
    "mip_feasibility_tolerance": TOLERANCE,
    "primal_feasibility_tolerance": TOLERANCE,
    "dual_feasibility_tolerance": TOLERANCE,
}
TRIES = 4


@dataclass(frozen=True)
class Solution:
    """An assignment, and what its proof left open."""

    choices: Choices
    optimal: bool = True
    gap: float = 0.0


def best(space: Space, aim: Measure, bounds: Sequence[Bound], tie: Measure) -> Solution | None:
    """The least aim within the bounds, of these the least of the tie breaker; None if nothing is within the bounds."""
    if not bounds:
        return Solution(cheapest(space, aim, tie))
    narrowed = narrow(space, bounds)
    if narrowed is None:
        return None
    space = undominated(narrowed, [aim, *(bound.measure for bound in bounds), tie])
    relaxed = _relax(space, aim, bounds)
    widest = _widest(space, relaxed)
    gap = FIRST_GAP * max(relaxed.least - relaxed.pay, 1.0)
    while True:
        core = narrow(space, [*bounds, relaxed.within(gap)])
        found = _best_of(core, aim, bounds, tie, relaxed, gap) if core else None
        above = relaxed.above(aim.total(found.choices)) if found else math.inf
        # All assignments that lie no further above were searched, so none is better.
        if above <= gap + relaxed.rounding or gap > widest:
            return found
        gap = min(above, 2 * gap)


def _best_of(
    core: Space, aim: Measure, bounds: Sequence[Bound], tie: Measure, relaxed: Relaxed, gap: float
) -> Solution | None:
    found = search(core, aim, bounds, tie, relaxed, gap)
    if found.complete:
        return Solution(found.choices) if found.choices else None
    first = _solve(core, aim, bounds)
    if first is None or relaxed.above(aim.total(first.choices)) > gap:
        return first
    # The tie breaker's answer is at hand, the first one's, unless rounding hides it.
    held = [*bounds, Bound(aim, aim.total(first.choices))]
    few = narrow(core, held)
    second = few and _solve(few, tie, held)
    return replace(first, choices=(second or first).choices)


def _relax(space: Space, aim: Measure, bounds: Sequence[Bound]) -> Relaxed:
    """The bounds at the prices that the linear relaxation puts on them."""
    linear = _model(space, aim, bounds)
    linear.integrality_ = []
    duals = np.asarray(_highs(linear).getSolution().row_dual)[len(linear.row_upper_) - len(bounds) :]
    # Any price that is not negative makes a valid bound, so the relaxation need not be solved exactly.
    shares = [max(-float(dual), 0.0) if math.isfinite(dual) else 0.0 for dual in duals] or [0.0] * len(bounds)
    values, scale = _objective(space, aim)
    for bound, price in zip(bounds, shares, strict=True):
        values = values + price * space.shares(bound)
    table: dict[str, dict[Precision, float]] = {layer: {} for layer in space.menus}
    for (layer, choice), value in zip(space.columns(), values, strict=True):
        table[layer][choice] = float(value)
    priced = Measure("priced", table)
    prices = tuple(price / space.room(bound) for bound, price in zip(bounds, shares, strict=True))
    least = priced.total(cheapest(space, priced, priced))
    floor = math.fsum([aim.fixed, *space.floor(aim).values()])
    return Relaxed(priced, least, prices, math.fsum(shares), scale, floor)


def _widest(space: Space, relaxed: Relaxed) -> float:
    """The gap that rules nothing out."""
    return math.fsum(max(relaxed.priced.values[layer][it] for it in menu) for layer, menu in space.menus.items())


def _solve(space: Space, aim: Measure, bounds: Sequence[Bound]) -> Solution | None:
    """HiGHS's assignment with the least aim within the bounds, each checked exactly; None if there is none."""
    drawn = list(bounds)
    for attempt in range(TRIES):
        solution = _run(space, aim, drawn)
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


def _run(space: Space, aim: Measure, bounds: Sequence[Bound]) -> Solution | None:
    narrowed = narrow(space, bounds)
    if narrowed is None:
        return None
    space = undominated(narrowed, [aim, *(bound.measure for bound in bounds)])
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
    return Solution(choices, True, gap if ROUNDING < gap < math.inf else 0.0)


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
    objective[: len(space.columns())], _ = _objective(space, aim)
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


def _objective(space: Space, aim: Measure) -> tuple[NDArray[np.float64], float]:
    """The aim of every column above its layer's least, on a scale that suits the solver, and that scale."""
    above = space.above_floor(aim)
    # A scale beyond all numbers would turn nothing into no number.
    scale = OBJECTIVE_SCALE / max(float(above.max()), 1e-300)
    return above * scale, scale


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
