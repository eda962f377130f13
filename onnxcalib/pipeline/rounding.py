"""Which rounding a plan gets: to nearest, or second-order at one of a few strengths, each with batch-norm tuning."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from onnxcalib.algorithms.batchnorm import Tuned
from onnxcalib.algorithms.second_order import ChosenRounding, SecondOrder
from onnxcalib.algorithms.teacher import Teacher
from onnxcalib.data import train_validation_split, why_not_parted
from onnxcalib.numerics.losses import TEMPERATURE
from onnxcalib.pipeline.job import Job
from onnxcalib.pipeline.stages import batch_norm_tuning, quick_tuning, second_order_rounding, trains_end_to_end
from onnxcalib.plan import QuantPlan
from onnxcalib.recipe import MAX_BITS, Recipe, Rounding

# Of the move for the error that arrives: where activations have few bits, all of it would chase noise.
STRENGTHS = (0.0, 0.5, 1.0)


@dataclass(frozen=True)
class Roundings:
    """The plan after batch-norm tuning on each rounding, and the better of them."""

    nearest: Tuned
    best: Tuned
    chosen: ChosenRounding | None = None  # None where only one was tried

    @property
    def is_second_order(self) -> bool:
        """Whether the better one is of second order."""
        return self.chosen is not None and self.chosen.strength is not None

    @property
    def set_aside(self) -> ChosenRounding | None:
        """The choice, told as not kept."""
        return None if self.chosen is None else replace(self.chosen, strength=None, after=self.chosen.before)


def rounded_and_tuned(job: Job, plan: QuantPlan) -> Roundings:
    """The plan with batch-norm tuning, also on the rounding whose held-out loss is then the least."""
    nearest = batch_norm_tuning(job, plan)
    if not _tried(job, plan):
        return Roundings(nearest, nearest)
    rounded = _best_strength(job, plan)
    tuned = batch_norm_tuning(job, rounded.plan)
    if tuned.after >= nearest.after and job.recipe.weights.rounding is not Rounding.SECOND_ORDER:
        return Roundings(nearest, nearest, ChosenRounding(None, nearest.after, nearest.after, ()))
    chosen = ChosenRounding(rounded.strength, nearest.after, tuned.after, rounded.skip_reasons)
    return Roundings(nearest, tuned, chosen)


def _best_strength(job: Job, plan: QuantPlan) -> SecondOrder:
    """More and more of it, until the loss after a quick tuning no longer falls."""
    best, least = None, math.inf
    for strength in STRENGTHS:
        rounded = second_order_rounding(job, plan, strength)
        loss = quick_tuning(job, rounded.plan).after
        if best is not None and not loss < least:
            break
        best, least = rounded, loss
    assert best is not None
    return best


def kept_over_training(job: Job, rounded: QuantPlan, trained: QuantPlan) -> bool:
    """Whether the rounding alone is better than what training made of another; both on the scales that are written."""
    teacher = Teacher(job.model, train_validation_split(job.data)[1], job.float_loss, TEMPERATURE)
    return teacher.loss_of(job.simulate(rounded)) < teacher.loss_of(job.simulate(trained))


def rounds_candidates(recipe: Recipe) -> bool:
    """Whether bits are assigned by what second-order rounding leaves: where layers read floats, it fits any mix."""
    return recipe.weight_only and recipe.get("rounding") is not Rounding.NEAREST and trains_end_to_end(recipe)


def _tried(job: Job, plan: QuantPlan) -> bool:
    """Whether it is asked for, or left to us and likely to gain: eight bits leave little to make good."""
    rounding = job.recipe.get("rounding")
    if rounding is not Rounding.AUTO:
        return rounding is Rounding.SECOND_ORDER
    # Nothing is chosen by samples that it was learned from.
    return (
        trains_end_to_end(job.recipe)
        and why_not_parted(job.data) is None
        and any(precision.weight < MAX_BITS for precision in plan.precisions.values())
    )
