"""Which rounding a plan gets: to nearest, or second-order at one of a few strengths, each with batch-norm tuning."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from onnxcalib.algorithms.batchnorm import FloatStatistics, Tuned
from onnxcalib.algorithms.float_rows import FloatRows
from onnxcalib.algorithms.second_order import ChosenRounding
from onnxcalib.data import why_not_parted
from onnxcalib.pipeline.job import Job
from onnxcalib.pipeline.stages import (
    batch_norm_tuning,
    learned_from,
    quick_teacher,
    quick_tuning,
    second_order_rounding,
    trains_end_to_end,
)
from onnxcalib.plan import QuantPlan
from onnxcalib.recipe import MAX_BITS, Pipeline, Rounding

# Of the move for the error that arrives. All of it (1) chases noise: of ResNet-20 at three precisions, the quick-start
# model at three and a language model, it was the best on two of the quick-start model, by 6 % of the loss and by less.
STRENGTHS = (0.0, 0.5)

# Weights of fewer bits lose far less by it than to nearest, so that layers compare otherwise; with four and more the
# table of round to nearest assigns bits as well.
FEW_BITS = 4

# A quick tuning does not tell roundings apart whose losses differ by less than this factor: they get the whole tuning.
CLEARLY = 1.25


@dataclass(frozen=True)
class Roundings:
    """The plan on the rounding that is taken, after batch-norm tuning."""

    best: Tuned
    chosen: ChosenRounding | None = None  # None where only one was tried

    @property
    def is_second_order(self) -> bool:
        """Whether it is of second order."""
        return self.chosen is not None and self.chosen.strength is not None


def rounded_and_tuned(job: Job, plan: QuantPlan) -> Roundings:
    """The plan with batch-norm tuning, on the rounding whose held-out loss is the least after it.

    What is clearly behind after a quick tuning does not get the whole one; all others do, both strengths among them.
    """
    if not _tried(job, plan):
        return Roundings(batch_norm_tuning(job, plan))
    floats = FloatStatistics(job.model, job.layers, learned_from(job))
    job = replace(job, float_statistics=floats, quick_teacher=quick_teacher(job))
    nearest, others = _Trial(None, plan, quick_tuning(job, plan).after), _second_order(job, plan)
    asked = job.recipe.weights.rounding is Rounding.SECOND_ORDER
    trials = others if asked else [nearest, *others]
    first = min(trials, key=lambda trial: trial.loss)
    close = [trial for trial in trials if trial is first or trial.loss < CLEARLY * first.loss]
    tuned = [(batch_norm_tuning(job, trial.plan), trial) for trial in close]
    best, taken = min(tuned, key=lambda pair: pair[0].after)
    before = next((found.after for found, trial in tuned if trial is nearest), None)
    if taken is nearest:
        return Roundings(best, ChosenRounding(None, best.after, best.after))
    losses = (nearest.loss, taken.loss) if before is None else (before, best.after)
    return Roundings(best, ChosenRounding(taken.strength, *losses, taken.skip_reasons))


@dataclass(frozen=True)
class _Trial:
    """A rounding, and the held-out loss after a quick tuning."""

    strength: float | None  # None: to nearest
    plan: QuantPlan
    loss: float
    skip_reasons: tuple[str, ...] = ()


def _second_order(job: Job, plan: QuantPlan) -> list[_Trial]:
    """One at each strength."""
    with _with_float_rows(job) as sharing:
        rounded = [second_order_rounding(sharing, plan, strength) for strength in STRENGTHS]
    return [_Trial(it.strength, it.plan, quick_tuning(job, it.plan).after, it.skip_reasons) for it in rounded]


@contextlib.contextmanager
def _with_float_rows(job: Job) -> Iterator[Job]:
    """The job with what layers read in the float network on disk: every strength reads the same."""
    directory = job.run.directory
    scratch = None if directory is None else directory.scratch
    with tempfile.TemporaryDirectory(prefix="onnxcalib_", dir=scratch) as folder:
        yield replace(job, float_rows=FloatRows(job.model, job.layers, learned_from(job), Path(folder)))


def rounds_candidates(job: Job) -> bool:
    """Whether bits are assigned by what second-order rounding leaves of each layer."""
    least = min(precision.weight for precision in job.recipe.quantized)
    return _is_open(job) and (job.recipe.weight_only or least < FEW_BITS)


def trains_candidates(job: Job) -> bool:
    """Whether layers are trained before bits are assigned: what comes of that is lost where they are rounded anew."""
    return job.recipe.pipeline is Pipeline.ADVANCED and not _is_open(job)


def _is_open(job: Job) -> bool:
    """Whether second-order rounding is asked for, or left to us: nothing is chosen by samples it was learned from."""
    rounding = job.recipe.get("rounding")
    if rounding is not Rounding.AUTO:
        return rounding is Rounding.SECOND_ORDER
    return trains_end_to_end(job.recipe) and why_not_parted(job.data) is None


def _tried(job: Job, plan: QuantPlan) -> bool:
    """Whether it is asked for, or left to us and likely to gain: eight bits leave little to make good."""
    asked = job.recipe.get("rounding") is Rounding.SECOND_ORDER
    return asked or (_is_open(job) and any(each.weight < MAX_BITS for each in plan.precisions.values()))
