"""Every layer rounded at every precision that it may get, with the range estimators that suit the model."""

from __future__ import annotations

from collections.abc import Mapping

from onnxcalib.algorithms.calibration import Statistics
from onnxcalib.algorithms.rounding import CandidatePrecisions, Ranges, Rounding
from onnxcalib.algorithms.teacher import Distance, Teacher
from onnxcalib.data import first_with
from onnxcalib.numerics.losses import TEMPERATURE
from onnxcalib.pipeline.job import Job
from onnxcalib.plan import Candidates
from onnxcalib.recipe import MAX_BITS, RangeMethod

SAMPLES = 128
MARGIN = 0.9  # of the loss with mse, which others must stay below
ALLOWED_DB = 0.5  # that an output may have less of than with minmax

Estimators = tuple[RangeMethod, RangeMethod]  # of activations and of weights
MSE = (RangeMethod.MSE, RangeMethod.MSE)
MINMAX = (RangeMethod.MINMAX, RangeMethod.MINMAX)
TRIED: tuple[Estimators, ...] = (
    MSE, (RangeMethod.AVERAGED, RangeMethod.MSE), (RangeMethod.PERCENTILE, RangeMethod.MSE), MINMAX,
)  # fmt: skip


def rounded(job: Job, statistics: Statistics, precisions: CandidatePrecisions) -> Candidates:
    """Every layer at each of its precisions, with the ranges asked for or those that suit the model."""
    rounding = Rounding(job.model, job.layers, job.points, statistics, job.target, job.overrides, job.tied)

    def at(estimators: Estimators) -> Candidates:
        ranges = Ranges(dict.fromkeys(widths, estimators[0]), estimators[1], job.recipe.weights.block_size)
        return rounding.to_nearest(precisions, ranges)

    widths = {MAX_BITS} | {choice.activation for choices in precisions.values() for choice in choices}
    if job.recipe.ranges is not RangeMethod.AUTO:
        return at((job.recipe.ranges, job.recipe.ranges))
    lowest = {
        name: choices[0] if len(choices) == 1 else min(job.recipe.quantized) for name, choices in precisions.items()
    }
    # Samples that reach furthest are among them: what is cut off of these breaks an output first.
    judging = first_with(job.data, SAMPLES, statistics.extreme_samples)
    teacher = Teacher(job.model, judging, job.float_loss, TEMPERATURE)
    tried = (MSE, MINMAX) if job.recipe.weight_only else TRIED
    distances = {}
    for done, estimators in enumerate(tried, 1):
        distances[estimators] = teacher.distance_of(job.simulate(at(estimators).stitch(lowest)))
        job.progress("ranges", done, len(tried))
    return at(select(distances))


def select(distances: Mapping[Estimators, Distance]) -> Estimators:
    """The least loss among those that leave no output clearly noisier than minmax, which clips nothing, does."""
    floor = distances[MINMAX].sqnr_db
    sound = {
        estimators: found.loss
        for estimators, found in distances.items()
        if all(found.sqnr_db[name] >= least - ALLOWED_DB for name, least in floor.items())
    }
    best = min(sound, key=sound.__getitem__)
    # Ranges that clip more are fragile once tuning moves the activations: they must be clearly better.
    return MSE if MSE in sound and sound[best] >= MARGIN * sound[MSE] else best
