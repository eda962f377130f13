"""Every layer rounded at every precision that it may get, with the range estimator that suits the model."""

from __future__ import annotations

from collections.abc import Mapping

from onnxcalib.algorithms.calibration import Statistics
from onnxcalib.algorithms.rounding import CandidatePrecisions, Ranges, round_to_nearest
from onnxcalib.algorithms.teacher import Teacher
from onnxcalib.data import first
from onnxcalib.numerics.losses import TEMPERATURE
from onnxcalib.pipeline.job import Job
from onnxcalib.plan import Candidates
from onnxcalib.recipe import MAX_BITS, RangeMethod

SAMPLES = 256
MARGIN = 0.9
TRIED = (RangeMethod.MSE, RangeMethod.AVERAGED, RangeMethod.PERCENTILE)


def rounded(job: Job, statistics: Statistics, precisions: CandidatePrecisions) -> Candidates:
    """Every layer at each of its precisions, with the ranges asked for or those that suit the model."""

    def at(method: RangeMethod, weights: RangeMethod) -> Candidates:
        ranges = Ranges(dict.fromkeys(widths, method), weights, job.recipe.block_size)
        return round_to_nearest(job.model, job.layers, job.places, statistics, precisions, job.target, ranges)

    def loss_of(method: RangeMethod) -> float:
        return teacher.loss_of(job.simulate(at(method, RangeMethod.MSE).stitch(lowest)))

    widths = {MAX_BITS} | {choice.activation for choices in precisions.values() for choice in choices}
    if job.recipe.ranges is not RangeMethod.AUTO:
        return at(job.recipe.ranges, job.recipe.ranges)
    if job.recipe.weight_only:
        return at(RangeMethod.MSE, RangeMethod.MSE)
    lowest = {name: choices[0] if len(choices) == 1 else min(job.recipe.bits) for name, choices in precisions.items()}
    teacher = Teacher(job.model, first(job.data, SAMPLES), temperature=TEMPERATURE)
    losses = {}
    for done, method in enumerate(TRIED, 1):
        losses[method] = loss_of(method)
        job.progress("ranges", done, len(TRIED))
    return at(preferred(losses), RangeMethod.MSE)


def preferred(losses: Mapping[RangeMethod, float]) -> RangeMethod:
    """The estimator to take, by the loss of the model with each of them."""
    best = min(losses, key=losses.__getitem__)
    # Ranges that clip more are fragile once tuning moves the activations: they must be clearly better.
    return best if losses[best] < MARGIN * losses[RangeMethod.MSE] else RangeMethod.MSE
