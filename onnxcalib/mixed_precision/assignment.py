"""From a sensitivity table and a request to an assignment whose measured loss keeps it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from onnxcalib.errors import RecipeError
from onnxcalib.mixed_precision.allocate import GREEDY, Allocation, maximise_gain, minimise_loss
from onnxcalib.mixed_precision.request import Request
from onnxcalib.mixed_precision.table import SensitivityTable
from onnxcalib.recipe import Precision

TRIES = 12
METHODS = ("integer-program", *GREEDY)
Measure = Callable[[Mapping[str, Precision]], float]


@dataclass(frozen=True)
class Assigned:
    """An allocation, and how its estimate compares with the assembled model."""

    allocation: Allocation
    estimated_loss: float  # of the whole model: the base model's loss and the sum of the increases
    measured_loss: float
    tries: int


def assign(table: SensitivityTable, request: Request, measure: Measure) -> Assigned:
    """Solves, measures the assembled model, and with a loss budget tightens until the measurement keeps it."""
    most = request.max_loss
    if most is None:
        return _measured(table, minimise_loss(table, request.limits, request.overrides), measure, 1)
    budget = most - table.base_loss
    if budget < 0:
        raise RecipeError(
            f"`max_loss={most:.6g}` cannot be kept: with every layer at {table.base} the loss is already "
            f"{table.base_loss:.6g}.",
            "Ask for at least that much, or for more bits.",
        )
    for tries in range(1, TRIES + 1):
        allocation = maximise_gain(table, request.minimise, budget, request.limits, request.overrides)
        found = _measured(table, allocation, measure, tries)
        if found.measured_loss <= most:
            return found
        # Losses add up to more than their sum: shrink the budget by as much as it was overrun, and a little more.
        overrun = (found.measured_loss - table.base_loss) / max(most - table.base_loss, 1e-12)
        budget = min(allocation.estimated_loss, budget) / max(1.1 * overrun, 1.25)
        if budget == 0.0:  # estimates of nothing at all cannot shrink: only the base precision is left
            at_base = {row.layer: table.base for row in table.layers} | dict(request.overrides)
            found = _measured(table, minimise_loss(table, request.limits, at_base), measure, tries + 1)
            if found.measured_loss <= most:
                return found
            break
    raise RecipeError(
        f"`max_loss={most:.6g}` could not be kept in {tries} tries; the last lost {found.measured_loss:.6g}.",
        "Allow more loss, or offer more bits.",
    )


def solve(table: SensitivityTable, request: Request, method: str) -> Allocation:
    """An assignment from the table alone, unmeasured; the greedy rules know one limit and no loss budget."""
    limits, overrides = request.limits, request.overrides
    if method == METHODS[0]:
        if request.max_loss is None:
            return minimise_loss(table, limits, overrides)
        return maximise_gain(table, request.minimise, request.max_loss - table.base_loss, limits, overrides)
    if request.max_loss is not None or len(limits) != 1:
        raise RecipeError(f"`method={method!r}` takes one limit and no `max_loss`.", "Give `compression` alone.")
    return GREEDY[method](table, limits[0], overrides)


def _measured(table: SensitivityTable, allocation: Allocation, measure: Measure, tries: int) -> Assigned:
    return Assigned(allocation, table.base_loss + allocation.estimated_loss, measure(allocation.choices), tries)
