"""The pipelines as short lists of stages."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import onnx

from onnxcalib.data import Preprocess, first, open_data, split
from onnxcalib.errors import DataError, ModelError
from onnxcalib.job import Job, Start, list_layers, read_prepared, silent, start
from onnxcalib.model.branches import with_branch
from onnxcalib.model.io import check_writable, load, write_model
from onnxcalib.model.layers import LayerList
from onnxcalib.model.shapes import input_specs
from onnxcalib.numerics.loss import LossKind
from onnxcalib.plan import Candidates, QuantPlan
from onnxcalib.recipe import MAX_BITS, BatchNormReference, Pipeline, Precision, RangeMethod, Recipe
from onnxcalib.stages import sensitivity as sensitivity_stage
from onnxcalib.stages.batchnorm import Tuned, Tuner
from onnxcalib.stages.calibrate import Progress, Statistics, calibrate
from onnxcalib.stages.curve import Point, curve, ratios_between
from onnxcalib.stages.evaluate import Evaluation, evaluate_files
from onnxcalib.stages.fixed import fixed_precision
from onnxcalib.stages.mixed import Assigned, add_cost_tables, assign, pins_of
from onnxcalib.stages.rounding import Menu, Ranges, round_to_nearest
from onnxcalib.stages.sensitivity_table import SensitivityTable
from onnxcalib.stages.teacher import Teacher
from onnxcalib.targets import find_target

DEFAULT = Recipe()
HELD_OUT = 128
RANGE_SAMPLES = 256
RANGE_MARGIN = 0.9
RANGE_CANDIDATES = (RangeMethod.MSE, RangeMethod.AVERAGED, RangeMethod.PERCENTILE)


@dataclass(frozen=True)
class Outcome:
    """The plan of one graph, and how it came to be."""

    plan: QuantPlan
    table: SensitivityTable | None = None
    assigned: Assigned | None = None
    tuned: Tuned | None = None


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
) -> Result:
    """Quantizes a float model; the calibration data is a path, arrays by name, or feeds."""
    if output is not None:
        check_writable(Path(output))
    started = start(model, calibration, recipe, preprocess, progress)
    result = _joined(started, [_run(job) for job in started.jobs])
    if output is not None:
        result.save(output)
    return result


def _run(job: Job) -> Outcome:
    if job.recipe.pipeline is Pipeline.PLAIN:
        return _plain(job)
    if job.branch is not None and len(job.recipe.bits) > 1:
        # Bits are assigned within one graph; branches of an If get the highest on offer.
        asked = job.recipe
        fixed = Recipe(
            Pipeline.LIGHT, (asked.base,), ranges=asked.ranges, loss=asked.loss, bn_reference=asked.bn_reference
        )
        return _light(replace(job, recipe=fixed))
    return _light(job)


def _joined(started: Start, outcomes: Sequence[Outcome]) -> Result:
    """One file out of the model's own graph and the branches of its Ifs."""
    whole, plan = started.model.proto, None
    for job, outcome in zip(started.jobs, outcomes, strict=True):
        written = job.write(outcome.plan)
        whole = written if job.branch is None else with_branch(whole, job.branch, written)
        plan = outcome.plan if plan is None else plan.joined(outcome.plan)
    assert plan is not None
    own = outcomes[0]
    return Result(whole, plan, started.listed, started.jobs[0].recipe, own.table, own.assigned, own.tuned)


def _plain(job: Job) -> Outcome:
    """Calibrate, round to nearest, write."""
    return Outcome(_fixed_plan(job, calibrate(job.model, job.places, job.data, job.progress)))


def _light(job: Job) -> Outcome:
    """Forward passes only: sensitivity, integer program, batch-norm tuning."""
    statistics = calibrate(job.model, job.places, job.data, job.progress)
    table, assigned = None, None
    if len(job.recipe.bits) == 1:
        plan = _fixed_plan(job, statistics)
    else:
        candidates = _candidates(job, statistics)
        measured = measure_sensitivity(job, candidates)
        table = add_cost_tables(measured.table, job.recipe)
        assigned = assign_bits(job, candidates, table)
        plan = candidates.stitch(assigned.allocation.choices)
    tuned = tune_batch_norm(job, plan)
    return Outcome(tuned.plan, table, assigned, tuned)


def _fixed_plan(job: Job, statistics: Statistics) -> QuantPlan:
    precisions = fixed_precision(job.layers, job.places, job.recipe.bits[0], job.recipe.edge_bits)
    menu = {name: (precision,) for name, precision in precisions.items()}
    return _rounded(job, statistics, menu).stitch(precisions)


def _candidates(job: Job, statistics: Statistics) -> Candidates:
    return _rounded(job, statistics, menu_of(job))


def candidates_of(job: Job) -> Candidates:
    """Every layer at every precision on offer."""
    return _candidates(job, calibrate(job.model, job.places, job.data, job.progress))


def menu_of(job: Job) -> Menu:
    """What each layer may get; the edges may also get the edge bits."""
    recipe = job.recipe
    menu = {layer.name: tuple(sorted(recipe.bits)) for layer in job.layers}
    if recipe.edge_bits is not None:
        edge = Precision(recipe.edge_bits, recipe.edge_bits)
        for layer in (job.layers[0], job.layers[-1]):
            menu[layer.name] = tuple(sorted({*menu[layer.name], edge}))
    return menu


def _rounded(job: Job, statistics: Statistics, menu: Menu) -> Candidates:
    """Every layer at every precision of the menu, with the ranges asked for or those that suit the model."""

    def at(method: RangeMethod, weights: RangeMethod) -> Candidates:
        ranges = Ranges(dict.fromkeys(widths, method), weights)
        return round_to_nearest(job.model, job.layers, job.places, statistics, menu, job.target, ranges)

    def loss_of(method: RangeMethod) -> float:
        return teacher.loss_of(job.write(at(method, RangeMethod.MSE).stitch(lowest)))

    widths = {MAX_BITS} | {choice.activation for choices in menu.values() for choice in choices}
    if job.recipe.ranges is not RangeMethod.AUTO:
        return at(job.recipe.ranges, job.recipe.ranges)
    lowest = {name: choices[0] if len(choices) == 1 else min(job.recipe.bits) for name, choices in menu.items()}
    teacher = Teacher(job.model, first(job.data, RANGE_SAMPLES))
    losses = {method: loss_of(method) for method in RANGE_CANDIDATES}
    best = min(losses, key=losses.__getitem__)
    # Ranges that clip more are fragile once tuning moves the activations: they must be clearly better.
    clearly = losses[best] < RANGE_MARGIN * losses[RangeMethod.MSE]
    return at(best if clearly else RangeMethod.MSE, RangeMethod.MSE)


def measure_sensitivity(job: Job, candidates: Candidates) -> sensitivity_stage.Measured:
    """The sensitivity table of the job's layers."""
    problem = sensitivity_stage.Problem(
        job.model, job.layers, job.places, job.target, candidates, menu_of(job), job.recipe.base
    )
    data = first(job.data, sensitivity_stage.SAMPLES)
    return sensitivity_stage.measure(problem, data, _loss_kind(job.recipe), job.progress)


def assign_bits(job: Job, candidates: Candidates, table: SensitivityTable) -> Assigned:
    """The integer program's choice, measured on the assembled model."""
    return assign(table, job.recipe, _measured_by(job, candidates))


def sensitivity(
    model: str | Path | onnx.ModelProto,
    calibration: Any,
    recipe: Recipe,
    *,
    preprocess: Preprocess | None = None,
    progress: Progress = silent,
) -> sensitivity_stage.Measured:
    """What each layer loses at each precision of the recipe."""
    job = _own_graph(start(model, calibration, recipe, preprocess, progress))
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
    job = _own_graph(start(model, calibration, recipe, preprocess, progress))
    candidates = candidates_of(job)
    table = measure_sensitivity(job, candidates).table
    pins = pins_of(table, recipe)
    loss_of = _measured_by(job, candidates) if measure else None
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


def _measured_by(job: Job, candidates: Candidates) -> Callable[[Mapping[str, Precision]], float]:
    """The loss of assembled models on the samples that the sensitivity was measured on."""
    teacher = Teacher(job.model, first(job.data, sensitivity_stage.SAMPLES), _loss_kind(job.recipe))
    return lambda choices: teacher.loss_of(job.write(candidates.stitch(choices)))


def tune_batch_norm(job: Job, plan: QuantPlan) -> Tuned:
    """Batch-norm tuning on most of the samples, judged on the others."""
    data, held_out = job.data, job.data
    if len(job.data) >= 8:
        # Samples that come in one piece, as a model with a fixed batch takes them, cannot be parted.
        with contextlib.suppress(DataError):
            data, held_out = split(job.data, min(HELD_OUT, len(job.data) // 4))
    teacher = Teacher(job.model, held_out, _loss_kind(job.recipe))
    reference = job.recipe.bn_reference or BatchNormReference.FLOAT
    return Tuner(job.model, job.layers, job.target, data, teacher, reference).tune(plan, job.progress)


def _loss_kind(recipe: Recipe) -> LossKind:
    return recipe.loss or LossKind.DISTILLATION


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
    opened = open_data(data, input_specs(load(paths[0])), preprocess)
    return evaluate_files(paths, opened, Path(reference) if reference is not None else None, progress)
