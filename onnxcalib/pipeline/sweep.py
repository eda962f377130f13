"""Sensitivities and the compression-loss curve of a model, without quantizing it."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx

from onnxcalib.data import Preprocess
from onnxcalib.errors import ModelError
from onnxcalib.executors.workers import Workers
from onnxcalib.mixed_precision.assembled import assembled_losses
from onnxcalib.mixed_precision.curve import Point, curve, ratios_between
from onnxcalib.mixed_precision.request import Request
from onnxcalib.mixed_precision.sensitivity import Measured, enough
from onnxcalib.pipeline import stages
from onnxcalib.pipeline.job import Job, Run, Start, no_layers, start
from onnxcalib.pipeline.pipelines import with_equal_channels
from onnxcalib.plan import Candidates
from onnxcalib.progress import Progress, listener_of, silent
from onnxcalib.recipe import Precision, Recipe


def sensitivity(
    model: str | Path | onnx.ModelProto,
    calibration: Any,
    recipe: Recipe,
    *,
    preprocess: Preprocess | None = None,
    progress: Progress = silent,
    workers: Workers | None = None,
) -> Measured:
    """What each layer loses at each precision of the recipe."""
    with contextlib.closing(workers or Workers()) as own:
        job = with_equal_channels(_own_graph(start(model, calibration, recipe, preprocess, progress, own), progress))
        return stages.sensitivities(job, candidates_of(job))


def compression_curve(
    model: str | Path | onnx.ModelProto,
    calibration: Any,
    recipe: Recipe,
    points: int,
    measure: bool,
    *,
    preprocess: Preprocess | None = None,
    progress: Progress = silent,
    workers: Workers | None = None,
) -> list[Point]:
    """Assignments from the smallest file to all layers at the base precision, by all three methods."""
    with contextlib.closing(workers or Workers()) as own:
        job = with_equal_channels(_own_graph(start(model, calibration, recipe, preprocess, progress, own), progress))
        candidates = candidates_of(job)
        table = stages.sensitivities(job, candidates).table
        overrides = Request.of(table, recipe).overrides
        found = list(curve(table, ratios_between(table, points, overrides), overrides))
        return _measured(job, candidates, found) if measure else found


def _measured(job: Job, candidates: Candidates, points: Sequence[Point]) -> list[Point]:
    """The points with the losses of their assembled models; equal ones are measured once."""
    told, choices = itertools.count(1), {_key(point): point.allocation.choices for point in points}
    work = stages.assembled(job, candidates, enough(job.model, job.data))
    found = assembled_losses(
        work, job.workers, list(choices.values()), lambda: job.progress("curve", next(told), len(choices))
    )
    losses = dict(zip(choices, found, strict=True))
    return [replace(point, measured_loss=losses[_key(point)]) for point in points]


def _key(point: Point) -> tuple[tuple[str, Precision], ...]:
    return tuple(sorted(point.allocation.choices.items()))


def candidates_of(job: Job) -> Candidates:
    """Calibrates, and rounds every layer at every precision on offer."""
    return stages.rounded_candidates(job, stages.statistics(job))


def _own_graph(started: Start, progress: Progress) -> Job:
    job = started.jobs[0]
    if not job.layers:
        raise no_layers(started.listed, started.model.source)
    if job.branch is not None:
        raise ModelError(
            f"all layers of {started.model.source} lie in branches of an If, where bits are not assigned.",
            "Quantize it at one precision.",
        )
    return replace(job, run=Run(listener_of(progress)))
