"""The pipelines as short lists of stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import onnx

from onnxcalib.data import Preprocess, open_data
from onnxcalib.engine.differentiate import choose_engine
from onnxcalib.errors import ModelError
from onnxcalib.job import Job, Start, list_layers, read_prepared, silent, start
from onnxcalib.model.branches import with_branch
from onnxcalib.model.equalize import exponents_of
from onnxcalib.model.io import check_writable, load, write_model
from onnxcalib.model.layers import LayerList
from onnxcalib.model.shapes import input_specs, with_fixed_batch
from onnxcalib.plan import QuantPlan
from onnxcalib.recipe import MIXED, Engine, LayerOptimizer, Pipeline, Recipe, Training
from onnxcalib.runs.begin import running
from onnxcalib.runs.events import teller
from onnxcalib.stages.batchnorm import Tuned
from onnxcalib.stages.calibrate import Progress, Statistics, calibrate
from onnxcalib.stages.curve import Point, curve, ratios_between
from onnxcalib.stages.evaluate import Evaluation, evaluate_files
from onnxcalib.stages.mixed import Assigned, add_cost_tables, pins_of
from onnxcalib.stages.network import NetworkTuned
from onnxcalib.stages.sensitivity import Measured
from onnxcalib.stages.sensitivity_table import SensitivityTable
from onnxcalib.stages.wishes import check_wishes
from onnxcalib.steps import (
    Trained,
    assign_bits,
    better_of,
    candidates_of,
    check_reachable,
    equalization,
    equalize,
    fixed_plan,
    measure_sensitivity,
    measured_by,
    menu_of,
    rounded_candidates,
    settled,
    train_in_parallel,
    train_in_turn,
    train_jointly,
    trains_jointly,
    tune_batch_norm,
    tune_biases,
)
from onnxcalib.targets import find_target

DEFAULT = Recipe()


@dataclass(frozen=True)
class Outcome:
    """The plan of one graph, and how it came to be."""

    plan: QuantPlan
    table: SensitivityTable | None = None
    assigned: Assigned | None = None
    tuned: Tuned | None = None
    trained: Trained | None = None
    joint: NetworkTuned | None = None
    biases: NetworkTuned | None = None


@dataclass(frozen=True)
class Result:
    """A quantized model, and how it came to be."""

    model: onnx.ModelProto
    plan: QuantPlan
    layers: LayerList
    recipe: Recipe
    table: SensitivityTable | None = None
    assigned: Assigned | None = None
    tuned: Tuned | None = None
    trained: Trained | None = None
    joint: NetworkTuned | None = None
    biases: NetworkTuned | None = None
    output: Path | None = None  # the file that it was written to

    @property
    def optimizer(self) -> LayerOptimizer:
        """What trained the layers, if anything did."""
        return self.recipe.layer_optimizer or LayerOptimizer.ADAQUANT

    def save(self, path: str | Path) -> None:
        """Writes the model file, under a temporary name first."""
        write_model(self.model, path)


def quantize(
    model: str | Path | onnx.ModelProto,
    calibration: Any,
    recipe: Recipe = DEFAULT,
    *,
    output: str | Path | None = None,
    preprocess: Preprocess | None = None,
    progress: Progress = silent,
    workers: int | None = None,
    run_dir: str | Path | None = None,
) -> Result:
    """Quantizes a float model; the calibration data is a path, arrays by name, or feeds.

    Workers train layers side by side, one a core by default; their number does not change the result. A run directory
    keeps what is finished: an interrupted call, made again, goes on from there. A progress with a method `tell` also
    hears of events.
    """
    if output is not None:
        check_writable(Path(output))
    started = start(model, calibration, recipe, preprocess, progress, workers)
    folder = Path(run_dir) if run_dir is not None else None
    with running(started, folder, teller(progress)) as begun:
        for job in begun.jobs:
            if len(recipe.bits) > 1 and job.branch is None:
                check_wishes(recipe, job.layers, menu_of(job))
        equal = replace(begun, jobs=tuple(_equalized(job) for job in begun.jobs))
        result = _joined(equal, [_run(job) for job in equal.jobs])
        if output is not None:
            result.save(output)
            result = replace(result, output=Path(output))
    return result


def _equalized(job: Job) -> Job:
    """The job on a model whose channels share their grids well."""
    if job.recipe.pipeline is Pipeline.PLAIN or job.recipe.training is Training.PAPER:
        return job
    return equalize(job, job.kept("equalization", (), lambda _: equalization(job)))


def _run(job: Job) -> Outcome:
    if job.recipe.pipeline is Pipeline.PLAIN:
        return _plain(job)
    run = _light if job.recipe.pipeline is Pipeline.LIGHT else _advanced
    if job.branch is not None and len(job.recipe.bits) > 1:
        # Bits are assigned within one graph; branches of an If get the highest on offer.
        unmixed = {name: getattr(DEFAULT, name) for name in (*MIXED, "edge_bits")}
        return run(replace(job, recipe=replace(job.recipe, bits=(job.recipe.base,), **unmixed)))
    return run(job)


def _joined(started: Start, outcomes: Sequence[Outcome]) -> Result:
    """One file out of the model's own graph and the branches of its Ifs."""
    whole, plan = started.model.proto, None
    for job, outcome in zip(started.jobs, outcomes, strict=True):
        written = job.write(outcome.plan)
        whole = written if job.branch is None else with_branch(whole, job.branch, written)
        plan = outcome.plan if plan is None else plan.joined(outcome.plan)
    assert plan is not None
    if started.jobs[0].target.fixed_shapes:
        whole = with_fixed_batch(whole)
    own = outcomes[0]
    return Result(
        whole,
        plan,
        started.listed,
        started.jobs[0].recipe,
        own.table,
        own.assigned,
        own.tuned,
        own.trained,
        own.joint,
        own.biases,
    )


def _plain(job: Job) -> Outcome:
    """Calibrate, round to nearest, write."""
    return Outcome(settled(job, _fixed(job, _statistics(job))))


def _light(job: Job) -> Outcome:
    """Forward passes only: sensitivity, integer program, batch-norm tuning."""
    found = _assembled(job, train=False)
    tuned = _tuned(job, found.plan)
    return replace(found, plan=settled(job, tuned.plan), tuned=tuned)


def _advanced(job: Job) -> Outcome:
    """Training as well: layers in parallel before bits are assigned, after it in turn and together, then the biases."""
    choose_engine(job.recipe.engine or Engine.AUTO)
    found = _assembled(job, train=True)
    tuned = _tuned(job, found.plan)
    trained = job.kept("sequential", (tuned.plan,), lambda memo: train_in_turn(job, tuned.plan, memo))
    if trains_jointly(job.recipe):
        joint = job.kept("joint", (trained.further,), lambda memo: train_jointly(job, trained, memo))
        plan, trained, joint = better_of(job, trained, joint)
    else:
        plan, joint = settled(job, trained.plan), None
    # Biases are tuned on the scales that are written.
    biases = job.kept("biases", (plan,), lambda memo: tune_biases(job, plan, memo))
    return replace(found, plan=biases.plan, tuned=tuned, trained=trained, joint=joint, biases=biases)


def _assembled(job: Job, *, train: bool) -> Outcome:
    """The plan at one precision, or at the bits that the integer program assigns; only those are trained already."""
    statistics = _statistics(job)
    if len(job.recipe.bits) == 1:
        return Outcome(_fixed(job, statistics))
    rounded = job.kept("ranges", (statistics,), lambda _: rounded_candidates(job, statistics))
    check_reachable(job, rounded)
    candidates = (
        job.kept("parallel", (rounded,), lambda memo: train_in_parallel(job, rounded, memo)) if train else rounded
    )
    measured = job.kept("sensitivity", (candidates,), lambda memo: measure_sensitivity(job, candidates, memo))
    table = add_cost_tables(measured.table, job.recipe)
    assigned = job.kept("allocation", (candidates, table), lambda memo: assign_bits(job, candidates, table, memo))
    return Outcome(candidates.stitch(assigned.allocation.choices), table, assigned)


def _statistics(job: Job) -> Statistics:
    scaled = exponents_of(job.model.proto)
    return job.kept("statistics", (scaled,), lambda _: calibrate(job.model, job.places, job.data, job.progress))


def _fixed(job: Job, statistics: Statistics) -> QuantPlan:
    return job.kept("ranges", (statistics,), lambda _: fixed_plan(job, statistics))


def _tuned(job: Job, plan: QuantPlan) -> Tuned:
    return job.kept("batch norm", (plan,), lambda _: tune_batch_norm(job, plan))


def sensitivity(
    model: str | Path | onnx.ModelProto,
    calibration: Any,
    recipe: Recipe,
    *,
    preprocess: Preprocess | None = None,
    progress: Progress = silent,
) -> Measured:
    """What each layer loses at each precision of the recipe."""
    job = _equalized(_own_graph(start(model, calibration, recipe, preprocess, progress)))
    return measure_sensitivity(job, candidates_of(job))


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
    job = _equalized(_own_graph(start(model, calibration, recipe, preprocess, progress)))
    candidates = candidates_of(job)
    table = measure_sensitivity(job, candidates).table
    pins = pins_of(table, recipe)
    loss_of = measured_by(job, candidates) if measure else None
    found = []
    for point in curve(table, ratios_between(table, points, pins), pins, loss_of):
        found.append(point)
        progress("curve", len(found), 3 * points)
    return found


def _own_graph(started: Start) -> Job:
    job = started.jobs[0]
    if job.branch is not None:
        raise ModelError(
            f"all layers of {started.model.source} lie in branches of an If, where bits are not assigned.",
            "Quantize it at one precision.",
        )
    return job


def inspect(model: str | Path | onnx.ModelProto) -> LayerList:
    """The layers of a model, and what stays float and why."""
    return list_layers(read_prepared(model, find_target(DEFAULT.target)))


def evaluate(
    models: list[str | Path],
    data: Any,
    reference: str | Path | None = None,
    *,
    preprocess: Preprocess | None = None,
    progress: Progress = silent,
) -> list[Evaluation]:
    """Measures model files on labelled or unlabelled data, against a float reference if there is one."""
    paths = [Path(path) for path in models]
    specs = [input_specs(load(path)) for path in paths]
    # A target may fix the batch; a file with a free one takes the same batches.
    fixed = [each for each in specs if all(spec.shape[:1] not in ((), (None,)) for spec in each)]
    opened = open_data(data, (fixed or specs)[0], preprocess)
    return evaluate_files(paths, opened, Path(reference) if reference is not None else None, progress)
