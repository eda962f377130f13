"""Sensitivities and the compression-loss curve of a model, without quantizing it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx

from onnxcalib.data import Preprocess
from onnxcalib.errors import ModelError
from onnxcalib.mixed_precision.curve import Point, curve, ratios_between
from onnxcalib.mixed_precision.request import Request
from onnxcalib.mixed_precision.sensitivity import Measured
from onnxcalib.pipeline import stages
from onnxcalib.pipeline.job import Job, Run, Start, no_layers, start
from onnxcalib.pipeline.pipelines import with_equal_channels
from onnxcalib.plan import Candidates
from onnxcalib.progress import Progress, listener_of, silent
from onnxcalib.recipe import Recipe


def sensitivity(
    model: str | Path | onnx.ModelProto,
    calibration: Any,
    recipe: Recipe,
    *,
    preprocess: Preprocess | None = None,
    progress: Progress = silent,
) -> Measured:
    """What each layer loses at each precision of the recipe."""
    job = with_equal_channels(_own_graph(start(model, calibration, recipe, preprocess, progress), progress))
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
) -> list[Point]:
    """Assignments from the smallest file to all layers at the base precision, by all three methods."""
    job = with_equal_channels(_own_graph(start(model, calibration, recipe, preprocess, progress), progress))
    candidates = candidates_of(job)
    table = stages.sensitivities(job, candidates).table
    overrides = Request.of(table, recipe).overrides
    loss_of = stages.measured_by(job, candidates) if measure else None
    found = []
    for point in curve(table, ratios_between(table, points, overrides), overrides, loss_of):
        found.append(point)
        progress("curve", len(found), 3 * points)
    return found


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
