"""Mixed precision: from a sensitivity table and what was asked for to an assignment whose measured loss keeps it."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from onnxcalib.errors import RecipeError, near
from onnxcalib.recipe import Precision, Recipe, parse_pair
from onnxcalib.stages.allocate import (
    Allocation,
    Limit,
    greedy_accuracy,
    greedy_compression,
    maximise_gain,
    minimise_loss,
)
from onnxcalib.stages.rivals import Contest, Score, contest
from onnxcalib.stages.sensitivity_files import with_costs
from onnxcalib.stages.sensitivity_table import SensitivityTable

TRIES = 12
METHODS = ("integer-program", "greedy-accuracy", "greedy-compression")


@dataclass(frozen=True)
class Assigned:
    """An allocation, and how its estimate compares with the assembled model."""

    allocation: Allocation
    estimated_loss: float  # of the whole model: the base model's loss and the sum of the increases
    measured_loss: float
    tries: int
    contest: Contest | None = None  # with its rivals, where there were any


def add_cost_tables(table: SensitivityTable, recipe: Recipe) -> SensitivityTable:
    """The table with the user's own costs."""
    for text in recipe.costs:
        name, path = parse_pair("cost", text)
        table = with_costs(table, name, Path(path))
    return table


def assign(table: SensitivityTable, recipe: Recipe, measure: Callable[[Mapping[str, Precision]], float]) -> Assigned:
    """Solves, measures the assembled model, and with a loss budget tightens until the measurement keeps it."""
    limits, pins = limits_of(table, recipe), pins_of(table, recipe)
    if recipe.max_loss is None:
        allocation = minimise_loss(table, limits, pins)
        return Assigned(allocation, table.base_loss + allocation.estimated_loss, measure(allocation.choices), 1)
    budget = recipe.max_loss - table.base_loss
    if budget < 0:
        raise RecipeError(
            f"--max-loss {recipe.max_loss:.6g} cannot be kept: with every layer at {table.base} the loss is already "
            f"{table.base_loss:.6g}.",
            "Ask for at least that much, or for more bits.",
        )
    for tries in range(1, TRIES + 1):
        allocation = maximise_gain(table, recipe.minimise or "size", budget, limits, pins)
        measured = measure(allocation.choices)
        if measured <= recipe.max_loss:
            return Assigned(allocation, table.base_loss + allocation.estimated_loss, measured, tries)
        # Losses add up to more than their sum: shrink the budget by as much as it was overrun, and a little more.
        overrun = (measured - table.base_loss) / max(recipe.max_loss - table.base_loss, 1e-12)
        budget = min(allocation.estimated_loss, budget) / max(1.1 * overrun, 1.25)
        if budget == 0.0:  # estimates of nothing at all cannot shrink: only the base precision is left
            last = _at_base(table, recipe, measure, tries)
            measured = last.measured_loss
            if measured <= recipe.max_loss:
                return last
            break
    raise RecipeError(
        f"--max-loss {recipe.max_loss:.6g} could not be kept in {tries} tries; the last lost {measured:.6g}.",
        "Allow more loss, or offer more bits.",
    )


def contested(
    table: SensitivityTable, recipe: Recipe, assigned: Assigned, measure: Score, scores: Sequence[Score]
) -> Assigned:
    """What the scores put first among the program's optimum and its rivals; none costs more or breaks a loss budget."""
    limits, pins = limits_of(table, recipe), pins_of(table, recipe)
    optimum = assigned.allocation
    if all(optimum.choices[row.layer] == table.base for row in table.layers if row.layer not in pins):
        return assigned
    if recipe.max_loss is not None:
        cost = recipe.minimise or "size"
        limits = [*(limit for limit in limits if limit.cost != cost), Limit(cost, optimum.costs[cost])]
    most = recipe.max_loss
    taken, losses, least, models = contest(
        table, limits, pins, optimum, scores, lambda choices: most is None or measure(choices) <= most
    )
    told = Contest(optimum, assigned.measured_loss, losses, least, models)
    if taken is optimum:
        return replace(assigned, contest=told)
    estimate = table.base_loss + taken.estimated_loss
    return Assigned(taken, estimate, measure(taken.choices), assigned.tries, told)


def _at_base(
    table: SensitivityTable, recipe: Recipe, measure: Callable[[Mapping[str, Precision]], float], tries: int
) -> Assigned:
    pins = pins_of(table, recipe)
    at_base = {row.layer: table.base for row in table.layers if row.layer not in pins}
    allocation = minimise_loss(table, limits_of(table, recipe), {**at_base, **pins})
    return Assigned(allocation, table.base_loss + allocation.estimated_loss, measure(allocation.choices), tries + 1)


def solve(table: SensitivityTable, recipe: Recipe, method: str) -> Allocation:
    """An assignment from the table alone, unmeasured; the greedy rules know one limit and no loss budget."""
    table = add_cost_tables(table, recipe)
    limits, pins = limits_of(table, recipe), pins_of(table, recipe)
    if method == METHODS[0]:
        if recipe.max_loss is None:
            return minimise_loss(table, limits, pins)
        return maximise_gain(table, recipe.minimise or "size", recipe.max_loss - table.base_loss, limits, pins)
    if recipe.max_loss is not None or len(limits) != 1:
        raise RecipeError(f"--method {method} takes one limit and no --max-loss.", "Give --compression alone.")
    return (greedy_accuracy if method == METHODS[1] else greedy_compression)(table, limits[0], pins)


def limits_of(table: SensitivityTable, recipe: Recipe) -> list[Limit]:
    """The limits in the table's units: built-in costs are asked for relative to float, a user's own as they are."""
    limits = []
    if recipe.compression is not None:
        if "size" not in table.float_costs:
            raise RecipeError("--compression needs the float size, which the table lacks.", "Measure the table again.")
        limits.append(Limit("size", recipe.compression * table.float_costs["size"]))
    for text in recipe.limits:
        name, value = parse_pair("limit", text)
        if name not in table.cost_names():
            raise RecipeError(f"--limit '{text}' names no cost.", near(name, table.cost_names()))
        try:
            number = float(value)
        except ValueError as error:
            raise RecipeError(f"--limit '{text}' has no number.", "Write bops=0.05.") from error
        limits.append(Limit(name, number * table.float_costs.get(name, 1.0)))
    return limits


def pins_of(table: SensitivityTable, recipe: Recipe) -> dict[str, Precision]:
    """The precision of every pinned layer: the edges', then those that patterns name."""
    names = [row.layer for row in table.layers]
    pins = {}
    if recipe.edge_bits is not None:
        pins = dict.fromkeys((names[0], names[-1]), recipe.base.edge(recipe.edge_bits))
    for text in recipe.pins:
        pattern, precision = parse_pair("pin", text)
        matched = fnmatch.filter(names, pattern)
        if not matched:
            raise RecipeError(f"--pin '{pattern}' matches no layer.", near(pattern, names))
        pins |= dict.fromkeys(matched, Precision.parse(precision))
    return pins
