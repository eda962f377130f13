"""The smallest file whose metric falls no further than allowed: searched on some samples, proven on others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from onnxcalib.errors import ModelError, RecipeError
from onnxcalib.mixed_precision.allocate import Allocation, Limit, least_reachable, minimise_loss
from onnxcalib.mixed_precision.assignment import Assigned
from onnxcalib.mixed_precision.request import Request
from onnxcalib.mixed_precision.table import SensitivityTable
from onnxcalib.numerics.metric import Drop
from onnxcalib.pipeline import stages
from onnxcalib.pipeline.job import Job
from onnxcalib.pipeline.result import AccuracyBudget, Outcome
from onnxcalib.plan import Candidates

CLOSE = 0.01  # of the largest size: sizes nearer than that are one
LOOKS = 4  # at the samples that prove; each further look makes luck likelier

Tail = Callable[[Job, Outcome], Outcome]  # what a pipeline does once bits are assigned


def within_drop(job: Job, candidates: Candidates, table: SensitivityTable, tuned: Tail, finished: Tail) -> Outcome:
    """The smallest file that keeps the promise on samples that nothing else saw.

    While searching, plans are tuned by a few forward passes; what is found is finished as the pipeline does it.
    """
    if job.branch is not None:
        raise ModelError(
            f"`max_drop` cannot be kept for {job.model.source}: its layers lie in branches of an If.",
            "Quantize it at one precision, and measure it with evaluate.",
        )
    most = job.recipe.mixed_precision.max_drop
    assert most is not None
    assert job.metric is not None
    search, aim, proven = _Search(job, candidates, table, tuned), most, []

    def finish(allocation: Allocation) -> Finished:
        outcome = finished(job, search.outcome(allocation))
        return Finished(allocation, outcome, stages.metric_drop(job, outcome.plan, False).value)

    for look in range(1, LOOKS + 1):
        # The last look is for the largest file: if even that fails, no other is worth a try.
        found = finalist(search, finish, aim) if look < LOOKS else finish(search.largest)
        proof = stages.metric_drop(job, found.outcome.plan, True)
        proven.append((proof, found.allocation.costs["size"]))
        if proof.value <= most:
            told = AccuracyBudget(job.metric.name, most, proof, look, tuple(search.tried))
            return replace(found.outcome, budget=told)
        if found.allocation == search.largest:
            break
        # It lost more on samples it did not see: allow so much less on those that it sees.
        aim = min(aim, found.drop) - (proof.value - most)
    raise _unreachable(job, most, proven, table)


@dataclass(frozen=True)
class Finished:
    """An assignment with all that the pipeline does for it, and what the metric falls by on samples that it saw."""

    allocation: Allocation
    outcome: Outcome
    drop: float


class Sizes(Protocol):
    """Assignments of many sizes, quickly tuned."""

    def smallest(self, aim: float) -> Allocation:
        """The smallest whose drop is within the aim."""

    def drop(self, allocation: Allocation) -> float:
        """What the metric falls by."""


def finalist(sizes: Sizes, finish: Callable[[Allocation], Finished], aim: float) -> Finished:
    """The smallest file within the aim once it is finished, which it may be at a size where a quick look is not."""
    found = finish(sizes.smallest(aim))
    gained = sizes.drop(found.allocation) - found.drop
    if gained <= 0 or found.drop > aim:
        return found
    smaller = sizes.smallest(aim + gained)
    if smaller.costs["size"] >= found.allocation.costs["size"]:
        return found
    tried = finish(smaller)
    return tried if tried.drop <= aim else found


class _Search:
    """Sizes between the least reachable and that of every layer at its most bits."""

    def __init__(self, job: Job, candidates: Candidates, table: SensitivityTable, tuned: Tail) -> None:
        self.job, self.candidates, self.table, self.tuned = job, candidates, table, tuned
        self.request = Request.of(table, job.recipe)
        self.tried: list[tuple[float, float]] = []
        self._drops: dict[str, float] = {}
        at_base = {row.layer: table.base for row in table.layers} | dict(self.request.overrides)
        self.largest = minimise_loss(table, self.request.limits, at_base)

    def smallest(self, aim: float) -> Allocation:
        """The smallest assignment found by halving whose drop is within the aim; the largest where none is."""
        low = least_reachable(self.table, "size", self.request.limits, self.request.overrides)
        found, high = self.largest, self.largest.costs["size"]
        close = CLOSE * high
        least = self._of_size(low)
        if self.drop(least) <= aim:
            return least
        while high - low > close:
            middle = (low + high) / 2
            allocation = self._of_size(middle)
            if self.drop(allocation) <= aim:
                found, high = allocation, allocation.costs["size"]
            else:
                low = middle
        return found

    def drop(self, allocation: Allocation) -> float:
        """What the metric falls by while searching."""
        key = repr(sorted(allocation.choices.items()))
        if key not in self._drops:
            plan = self.tuned(self.job, Outcome(self.candidates.stitch(allocation.choices))).plan
            self._drops[key] = stages.metric_drop(self.job, plan, False).value
            size = allocation.costs["size"] / self.table.float_costs["size"]
            self.tried.append((size, self._drops[key]))
        return self._drops[key]

    def outcome(self, allocation: Allocation) -> Outcome:
        """The plan of an assignment, before any tuning."""
        measured = stages.measured_by(self.job, self.candidates)(allocation.choices)
        assigned = Assigned(allocation, self.table.base_loss + allocation.estimated_loss, measured, len(self.tried))
        return Outcome(self.candidates.stitch(allocation.choices), table=self.table, assigned=assigned)

    def _of_size(self, size: float) -> Allocation:
        limits = [*self.request.limits, Limit("size", size * (1 + 1e-12))]
        return minimise_loss(self.table, limits, self.request.overrides)


def _unreachable(job: Job, most: float, proven: list[tuple[Drop, float]], table: SensitivityTable) -> RecipeError:
    assert job.metric is not None
    drop, size = min(proven, key=lambda pair: pair[0].value)
    share = size / table.float_costs["size"]
    return RecipeError(
        f"`max_drop={most:g}` cannot be kept: on {drop.samples} samples held out, {job.metric.name} falls by "
        f"{drop.value:.4g} (from {drop.before:.4g} to {drop.after:.4g}) at the least, with {size:,.0f} bytes of "
        f"constants, {share:.3f} of the float ones.",
        "Allow more, offer more bits, or give more samples.",
    )
