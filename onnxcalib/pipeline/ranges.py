"""Every layer rounded at every precision that it may get, with the range estimators that suit the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from onnxcalib.algorithms.calibration import Statistics
from onnxcalib.algorithms.rounding import CandidatePrecisions, Ranges, Rounding
from onnxcalib.algorithms.teacher import Distance, Teacher
from onnxcalib.data import Dataset, strata
from onnxcalib.numerics.losses import TEMPERATURE
from onnxcalib.pipeline.job import Job
from onnxcalib.plan import Candidates
from onnxcalib.recipe import MAX_BITS, RangeMethod
from onnxcalib.runtime.session import Session

SAMPLES = 128
MARGIN = 0.9  # of the loss with mse, which others must stay below
ALLOWED_DB = 0.5  # that an output may have less of than with minmax

Estimators = tuple[RangeMethod, RangeMethod]  # of activations and of weights
MSE = (RangeMethod.MSE, RangeMethod.MSE)
MINMAX = (RangeMethod.MINMAX, RangeMethod.MINMAX)
TRIED: tuple[Estimators, ...] = (
    MSE, (RangeMethod.AVERAGED, RangeMethod.MSE), (RangeMethod.PERCENTILE, RangeMethod.MSE), MINMAX,
)  # fmt: skip


def rounded(job: Job, statistics: Statistics, precisions: CandidatePrecisions, *, final: bool) -> Candidates:
    """Every layer at each of its precisions, with the ranges asked for or those that suit the model.

    Where that is not final, ranges of activations are judged beside the finest weights: what narrow ones lose to
    nearest is made good later, and would drown what ranges lose.
    """
    rounding = Rounding(job.model, job.layers, job.points, statistics, job.target, job.overrides, job.tied)

    def at(estimators: Estimators, precisions: CandidatePrecisions = precisions) -> Candidates:
        ranges = Ranges(dict.fromkeys(widths, estimators[0]), estimators[1], job.recipe.weights.block_size)
        return rounding.to_nearest(precisions, ranges)

    widths = {MAX_BITS} | {choice.activation for choices in precisions.values() for choice in choices}
    if job.recipe.ranges is not RangeMethod.AUTO:
        return at((job.recipe.ranges, job.recipe.ranges))
    lowest = {
        name: choices[0] if len(choices) == 1 else min(job.recipe.quantized) for name, choices in precisions.items()
    }
    judged = lowest
    if not (final or job.recipe.weight_only):
        finest = max(job.target.weight_bits)
        judged = {name: replace(precision, weight=finest) for name, precision in lowest.items()}
    parts = strata(job.data, SAMPLES, statistics.extreme_samples)
    teachers = [Teacher(job.model, part, job.float_loss, TEMPERATURE) for part in parts]
    tried = (MSE, MINMAX) if job.recipe.weight_only else TRIED
    distances, alone = {}, {name: (precision,) for name, precision in judged.items()}
    for done, estimators in enumerate(tried, 1):
        session = Session(job.simulate(at(estimators, alone).stitch(judged)), "the quantized model")
        distances[estimators] = _of_all([teacher.distance_by(session.run) for teacher in teachers], parts, job.data)
        job.progress("ranges", done, len(tried))
    activations, weights = select(distances)
    return at((activations, weights if judged == lowest else RangeMethod.MSE))


def _of_all(found: Sequence[Distance], parts: Sequence[Dataset], data: Dataset) -> Distance:
    """The distance on all samples, from the few that reach furthest and some that stand for all others.

    What is cut off of the first breaks an output before anything else does; taken for all, they would forbid every cut.
    """
    shares = [1.0] if len(parts) == 1 else [len(parts[0]) / len(data), 1 - len(parts[0]) / len(data)]
    weights = [share / len(part) for share, part in zip(shares, parts, strict=True)]

    def mean(powers: Sequence[Mapping[str, float]]) -> dict[str, float]:
        return {name: float(np.dot(weights, [each[name] for each in powers])) for name in powers[0]}

    loss = float(np.dot(shares, [each.loss for each in found]))
    return Distance(loss, mean([each.signal for each in found]), mean([each.noise for each in found]))


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
