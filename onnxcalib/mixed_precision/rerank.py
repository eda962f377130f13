"""Re-ranking of the program's optimum among others: losses do not quite add up, so the assembled models are measured.

The others are both greedy baselines and, for layers that the optimum lowers, the program's optimum without that choice.
All keep the limits. They are measured on mixup samples, which resemble unseen ones; what fits the calibration samples
themselves best is often not the best for others, for a network may know these by heart.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from onnxcalib.errors import RecipeError
from onnxcalib.mixed_precision.allocate import GREEDY, Allocation, Limit, minimise_loss
from onnxcalib.mixed_precision.table import SensitivityTable
from onnxcalib.recipe import Precision

Choices = Mapping[str, Precision]
# The scores of assignments on sets of samples, which are given by number.
Ask = Callable[[Sequence[tuple[int, Choices]]], Sequence[float]]
Overrides = Mapping[str, Precision]

ROUNDS = 2  # the second looks around the best other one of the first
ROUND = 6  # other assignments of the program in each
FINALISTS = 3  # of them


@dataclass(frozen=True)
class Reranking:
    """What measuring found: the program's optimum, and the losses on mixup samples."""

    optimum: Allocation
    optimum_measured: float  # the optimum's loss on the calibration samples
    losses: Mapping[str, float]  # of the optimum and the baselines, by method
    least: float  # of what was taken
    models: int


def most_measurements(sets: int) -> int:
    """The most that a contest asks of so many sets of samples together."""
    known = 3  # the optimum and both baselines
    return known + ROUNDS * ROUND + (sets - 1) * (known + FINALISTS)


def rerank(
    table: SensitivityTable,
    limits: Sequence[Limit],
    overrides: Overrides,
    optimum: Allocation,
    ask: Ask,
    sets: int,
    keeps: Callable[[Choices], bool],
) -> tuple[Allocation, Mapping[str, float], float, int]:
    """The assignment with the least mean score, the mean scores of the optimum and the baselines, and the models run.

    The first set of samples judges all, the others judge those that it puts first, the optimum and the baselines.
    """
    judge = _Judge(ask)
    own = [_Entrant(optimum, {})]
    known = [_Entrant(each, {}) for each in _baselines(table, limits, overrides)]
    asked = [each.allocation.choices for each in (*own, *known)]
    own, known = judge.judged(own), judge.judged(known)
    for turn in range(ROUNDS):
        # Around the optimum first, then around the best other one, even if that does not beat the optimum.
        best = min(own[min(turn, len(own) - 1) :], key=lambda each: each.score)
        others = []
        for allocation, barred in islice(_around(table, limits, overrides, best, asked), ROUND):
            asked.append(allocation.choices)
            others.append(_Entrant(allocation, barred))
        own += judge.judged(others)
    first = sorted(own[1:], key=lambda each: each.score)[:FINALISTS]
    finalists = judge.judged([own[0], *known, *first], sets)
    ranked = sorted(finalists, key=lambda each: each.score)
    winner = next((it for it in ranked if it.allocation is optimum or keeps(it.allocation.choices)), finalists[0])
    losses = {each.allocation.method: each.score for each in finalists[: 1 + len(known)]}
    return _with_gap(winner.allocation, optimum), losses, winner.score, len({_key(it) for it in asked})


@dataclass(frozen=True)
class _Entrant:
    allocation: Allocation
    barred: Mapping[str, frozenset[Precision]]  # the choices that the program went without
    score: float = math.inf


class _Judge:
    """Asks only once of assignments that are the same, and of all that can be asked together at once."""

    def __init__(self, ask: Ask) -> None:
        self._ask = ask
        self._known: dict[tuple[int, tuple[tuple[str, Precision], ...]], float] = {}

    def judged(self, entrants: Sequence[_Entrant], sets: int = 1) -> list[_Entrant]:
        """The same, with the mean of their scores on the first sets of samples."""
        questions = {
            (part, _key(each.allocation.choices)): (part, each.allocation.choices)
            for part in range(sets)
            for each in entrants
        }
        new = [key for key in questions if key not in self._known]
        self._known |= zip(new, self._ask([questions[key] for key in new]), strict=True)
        return [
            replace(each, score=sum(self._known[part, _key(each.allocation.choices)] for part in range(sets)) / sets)
            for each in entrants
        ]


def _key(choices: Choices) -> tuple[tuple[str, Precision], ...]:
    return tuple(choices.items())


def _baselines(table: SensitivityTable, limits: Sequence[Limit], overrides: Overrides) -> Iterator[Allocation]:
    """Both greedy assignments, where they reach the one limit that they know."""
    if len(limits) != 1:
        return
    for solve in GREEDY.values():
        try:
            yield solve(table, limits[0], overrides)
        except RecipeError:
            continue


def _around(
    table: SensitivityTable, limits: Sequence[Limit], overrides: Overrides, best: _Entrant, asked: Sequence[Choices]
) -> Iterator[tuple[Allocation, Mapping[str, frozenset[Precision]]]]:
    """The program without one more choice of the best, in turn, first without those that are to lose most."""
    choices = best.allocation.choices
    lowered = [row for row in table.layers if row.layer not in overrides and choices[row.layer] != table.base]
    for row in sorted(lowered, key=lambda row: -row.losses[choices[row.layer]]):
        barred = {**best.barred, row.layer: best.barred.get(row.layer, frozenset()) | {choices[row.layer]}}
        try:
            found = minimise_loss(_without(table, barred), limits, overrides)
        except RecipeError:
            continue  # no assignment reaches the limits without that choice
        if all(found.choices != other for other in asked):
            yield replace(found, method="integer program without " + _named(barred)), barred


def _without(table: SensitivityTable, barred: Mapping[str, frozenset[Precision]]) -> SensitivityTable:
    """The table with fewer choices; the base stays."""
    rows = []
    for row in table.layers:
        left = [choice for choice in row.losses if choice not in barred.get(row.layer, ())]
        costs = {name: {choice: cost[choice] for choice in left} for name, cost in row.costs.items()}
        rows.append(replace(row, losses={choice: row.losses[choice] for choice in left}, costs=costs))
    return replace(table, layers=tuple(rows))


def _named(barred: Mapping[str, frozenset[Precision]]) -> str:
    return ", ".join(f"{layer} at {choice}" for layer, choices in barred.items() for choice in sorted(choices))


def _with_gap(allocation: Allocation, optimum: Allocation) -> Allocation:
    """What was taken, with how far its estimate is from the program's optimum."""
    if allocation is optimum:
        return optimum
    # Within the solver's gap, a rival may even be estimated to lose less.
    above = max(allocation.estimated_loss - optimum.estimated_loss, 0.0)
    return replace(allocation, optimal=False, gap=above / max(allocation.estimated_loss, 1e-300))
