"""The stages: what each is called, which values it takes, and what it reads of the recipe."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from onnxcalib.algorithms.activation_ranges import ChosenRanges, RangeSearch
from onnxcalib.algorithms.batchnorm import ROUNDS, Tuned, Tuner
from onnxcalib.algorithms.broken import OutputNoise, Search, output_noise
from onnxcalib.algorithms.calibration import Statistics, calibrate
from onnxcalib.algorithms.equalization import Equalization, measure_channels
from onnxcalib.algorithms.reconstruction.adaquant import SCHEDULES, Optimised
from onnxcalib.algorithms.reconstruction.end_to_end import (
    NetworkTuned,
    NetworkTuner,
    Schedule,
    bias_schedule,
    scales_schedule,
    schedules_for,
)
from onnxcalib.algorithms.reconstruction.layerwise import Layerwise, Trained, Trainer
from onnxcalib.algorithms.rounding_safe import with_rounding_safe_scales
from onnxcalib.algorithms.second_order import RoundedLayer, Rounder, SecondOrder
from onnxcalib.algorithms.second_order_candidates import CandidateRounder
from onnxcalib.algorithms.smoothing import Smooth
from onnxcalib.algorithms.teacher import Teacher
from onnxcalib.algorithms.tied import SHARED_BITS, sharing_tables, tied_layers
from onnxcalib.algorithms.validation import Validation
from onnxcalib.data import FEWEST, Dataset, first, train_validation_split
from onnxcalib.mixed_precision import sensitivity
from onnxcalib.mixed_precision.allocate import minimise_loss
from onnxcalib.mixed_precision.assembled import Assembled, sendable
from onnxcalib.mixed_precision.assignment import Assigned, assign
from onnxcalib.mixed_precision.costs import Problem, unmeasured
from onnxcalib.mixed_precision.probes import Probed
from onnxcalib.mixed_precision.request import (
    Request,
    add_cost_tables,
    candidate_precisions,
    quantized_only,
    uniform_precisions,
)
from onnxcalib.mixed_precision.table import SensitivityTable
from onnxcalib.model.equalize import equalized, exponents_of, find_equalization_groups
from onnxcalib.model.layers import find_layers
from onnxcalib.model.smoothing import smoothing_of
from onnxcalib.model.subgraph import with_outputs
from onnxcalib.model.switches import SwitchedModel, write_switched
from onnxcalib.numerics.losses import TEMPERATURE
from onnxcalib.numerics.metric import Drop
from onnxcalib.pipeline.dynamic import static_tensors
from onnxcalib.pipeline.equalizing import find_smoothing, lowest, with_smoothing
from onnxcalib.pipeline.job import Job
from onnxcalib.pipeline.ranges import rounded
from onnxcalib.pipeline.stage import Stage, stage
from onnxcalib.plan import Candidates, LeftFloat, QuantPlan
from onnxcalib.progress import NO_CHECKPOINT, Checkpoint
from onnxcalib.recipe import (
    FLOAT_BITS,
    LayerOptimizer,
    Precision,
    RangeMethod,
    Recipe,
    Training,
    TrainingOptions,
)
from onnxcalib.runtime.session import Session, samples_in

RANGE_SAMPLES = 32  # held out, by which it is judged whether a tensor is static
LEARNED_FROM = 512  # samples of second-order rounding, at most
TUNED_ON = 256  # of batch-norm tuning: all 384 of MobileNet-V2 at w4a4 left .152, 128 of them .154, 64 .159
EIGHT_BIT_SAMPLES = 64  # of batch-norm tuning where all is at eight bits; more left no less loss
QUICK_SAMPLES, QUICK_ROUNDS = 64, 1  # while sizes or roundings are compared
PRECISIONS = ("bits", "edge_bits", "overrides")
LIMITS = ("compression", "max_loss", "limits", "costs", "minimise")
TRAINING = ("engine", "layer_optimizer", "schedule", "steps", "seed", "strict")


@stage("equalization", PRECISIONS)
def equalization(job: Job) -> Equalization:
    """What scales channels so that they share a grid well."""
    # A branch of an If keeps no metadata that could tell of it.
    groups = find_equalization_groups(job.model, job.layers, job.target) if job.branch is None else []
    return measure_channels(job.model, groups, lowest(job), job.data, job.progress)


def equalize(job: Job, found: Equalization) -> Job:
    """The job on the model with scaled channels."""
    model = equalized(job.model, found.exponents)
    names = {layer.name for layer in job.layers}
    layers = tuple(layer for layer in find_layers(model).layers if layer.name in names)
    tied = {name: it for name, it in tied_layers(model, layers, job.constants).items() if name in job.tied}
    return replace(job, model=model, layers=layers, tied=tied, run=job.run.changed_by(exponents_of(model.proto)))


@stage("smoothing", ("ranges", "block_size", "loss", *PRECISIONS))
def smoothing(job: Job) -> Smooth:
    """What takes outliers of activations over into the weights that read them."""
    return Smooth(find_smoothing(job))


def smooth(job: Job, found: Smooth) -> Job:
    """The job on the model with such channels."""
    smoothed = with_smoothing(job, found.exponents)
    return replace(smoothed, run=job.run.changed_by(smoothing_of(smoothed.model.proto)))


@stage("statistics")
def statistics(job: Job) -> Statistics:
    """What calibration learns of every tensor that is quantized."""
    return calibrate(job.model, job.points, job.data, job.progress)


@stage("ranges", ("ranges", "block_size", "loss", *PRECISIONS))
def uniform_plan(job: Job, found: Statistics, final: bool = False) -> QuantPlan:
    """Every layer rounded at the one precision that is asked for, or at the edge bits; final if no stage tunes it."""
    precisions = uniform_precisions(job.layers, job.points, job.recipe) | _stored_once(job)
    single = {name: (precision,) for name, precision in precisions.items()}
    return rounded(job, found, single, final=final).stitch(precisions)


@stage("ranges", ("ranges", "block_size", "loss", *PRECISIONS))
def rounded_candidates(job: Job, found: Statistics) -> Candidates:
    """Every layer rounded at every precision on offer."""
    return rounded(job, found, quantized_only(candidate_precisions(job.layers, job.recipe)), final=False)


@stage("output noise")
def noise(job: Job, plan: QuantPlan) -> OutputNoise:
    """What each output has of noise under a plan."""
    return output_noise(job.model, job.data, job.simulate(plan))


@stage("broken outputs")
def broken_outputs(job: Job, plan: QuantPlan) -> LeftFloat:
    """The few tensors and layers that are better left float, under a plan that breaks an output."""
    return Search(job.model, job.layers, job.points, job.target, job.data, job.progress).leave(plan)


@stage("activations", title="activation ranges")
def activation_ranges(job: Job, plan: QuantPlan) -> ChosenRanges:
    """The tensors that are better quantized at run time, or left float, under a static plan."""
    held_out = first(train_validation_split(job.data)[1], RANGE_SAMPLES)
    teacher = Teacher(job.model, held_out, temperature=TEMPERATURE)
    tensors = static_tensors(job.layers, job.points, job.overrides)
    fits = job.target.weight_only_ops if job.target.weight_only_bits else ()
    leavable = [name for name in tensors if all(layer.op in fits for layer in job.layers if layer.input == name)]

    def switch(plan: QuantPlan) -> SwitchedModel:
        return write_switched(job.model, job.layers, plan, job.target)

    return RangeSearch(teacher, job.simulate, switch, job.progress).choose(plan, tensors, leavable)


def check_reachable(job: Job, candidates: Candidates) -> None:
    """Fails now if no assignment can keep the limits, before hours of measuring and training."""
    names = {layer.input for layer in job.layers}
    inputs = {value.name for value in job.model.proto.graph.input}
    session = Session(with_outputs(job.model.proto, sorted(names - inputs)))
    feed = next(iter(job.data.batches(1)))
    samples = samples_in(feed, job.data)
    elements = {name: value.size / samples for name, value in {**feed, **session.run(feed)}.items() if name in names}
    table = add_cost_tables(unmeasured(_problem(job, candidates), elements), job.recipe)
    request = Request.of(table, job.recipe)
    minimise_loss(table, request.limits, request.overrides)


@stage("parallel", TRAINING, title="parallel training", part=Optimised, parts_tell_all=True)
def parallel_training(job: Job, candidates: Candidates, checkpoint: Checkpoint = NO_CHECKPOINT) -> Candidates:
    """Every layer at every precision, trained on the float model's inputs."""
    return layerwise(job, checkpoint).parallel(candidates)


@stage("second-order candidates", ("ranges", "overrides"), part=RoundedLayer)
def second_order_candidates(job: Job, candidates: Candidates, checkpoint: Checkpoint = NO_CHECKPOINT) -> Candidates:
    """Every layer at every precision, rounded for what it reads in the float network; weights alone."""
    return CandidateRounder(_rounder(job, checkpoint)).round(candidates)


@stage("sensitivity", ("loss", "metric", *PRECISIONS), part=Probed)
def sensitivities(job: Job, candidates: Candidates, checkpoint: Checkpoint = NO_CHECKPOINT) -> sensitivity.Measured:
    """The sensitivity table of the job's layers."""
    data = sensitivity.probed_on(job.model, job.data, len(job.layers))
    return sensitivity.measure(_problem(job, candidates), data, job.loss, job.progress, checkpoint, job.workers)


@stage("allocation", ("loss", "metric", *LIMITS, *PRECISIONS))
def allocation(job: Job, candidates: Candidates, table: SensitivityTable) -> Assigned:
    """The integer program's choice, measured on the assembled model."""
    return assign(table, Request.of(table, job.recipe), measured_by(job, candidates))


@stage("second-order", ("ranges", "overrides"), title="second-order rounding", part=RoundedLayer)
def second_order_rounding(
    job: Job, plan: QuantPlan, strength: float, checkpoint: Checkpoint = NO_CHECKPOINT
) -> SecondOrder:
    """Every layer rounded anew for what it reads in the quantized network, on most of the samples."""
    return _rounder(job, checkpoint).round(plan, strength)


@stage("batch norm", ("loss", "metric", "bn_reference"))
def batch_norm_tuning(job: Job, plan: QuantPlan) -> Tuned:
    """Batch-norm tuning on some samples, judged on others that are held out."""
    data, held_out = train_validation_split(job.data)
    data = first(data, TUNED_ON if plan.is_narrow else EIGHT_BIT_SAMPLES)
    teacher = Teacher(job.model, held_out, job.loss, TEMPERATURE)
    how = (job.target, data, teacher, job.recipe.get("bn_reference"))
    rounds = ROUNDS if len(job.data) >= FEWEST else 0  # few samples say less of a channel than rounding spoils
    tuner = Tuner(job.model, job.layers, *how, rounds=rounds, floats=job.float_statistics)
    return tuner.tune(plan, job.progress)


@stage("quick tuning", ("loss", "metric", "bn_reference"), title="tuning of a plan that is tried")
def quick_tuning(job: Job, plan: QuantPlan) -> Tuned:
    """Enough of batch-norm tuning to compare plans by: its first rounds, on few samples."""
    data = first(learned_from(job), QUICK_SAMPLES)
    how = (job.target, data, job.quick_teacher or quick_teacher(job), job.recipe.get("bn_reference"))
    tuner = Tuner(job.model, job.layers, *how, rounds=QUICK_ROUNDS, floats=job.float_statistics)
    return tuner.tune(plan, job.progress)


@stage("metric", ("metric",))
def metric_drop(job: Job, plan: QuantPlan, proves: bool) -> Drop:
    """What the metric falls by on the samples that calibrate, or on those that prove."""
    data = job.proof if proves else job.data
    assert job.metric is not None
    assert data is not None
    return Teacher(job.model, data, job.metric).drop_of(job.simulate(plan))


@stage("sequential", (*TRAINING, "loss"), title="sequential training", part=Optimised)
def sequential_training(job: Job, plan: QuantPlan, checkpoint: Checkpoint = NO_CHECKPOINT) -> Trained:
    """Layer after layer, trained on the quantized network's inputs; kept if the held-out loss falls."""
    teacher = Teacher(job.model, train_validation_split(job.data)[1], job.float_loss, TEMPERATURE)
    return _kept_if_better(job, teacher, plan, *layerwise(job, checkpoint).sequential(plan))


@stage("end-to-end", ("engine", "steps", "seed", "strict", "loss"), title="end-to-end training")
def end_to_end_training(job: Job, trained: Trained, checkpoint: Checkpoint = NO_CHECKPOINT) -> NetworkTuned:
    """All layers at once towards the float model's outputs, on most of the samples, judged on the others.

    Ensures final scales, unless something has no gradient: the last quarter of the steps trains on its scales. It may
    be worse than the start: it tells the losses of what was trained before and of what came out, each as it is written.
    """
    found = _trained_end_to_end(job, trained, checkpoint)
    if found.skip_reason is not None:
        return found
    held_out = train_validation_split(job.data)[1]
    judge = Validation(job.model, held_out, job.float_loss, TEMPERATURE, job.recipe.seed)
    compared = judge.compare(job.simulate(final_scales(job, trained.plan)), job.simulate(found.plan))
    return replace(found, before=compared.before, after=compared.after, doubt=compared.chance)


def _trained_end_to_end(job: Job, trained: Trained, checkpoint: Checkpoint) -> NetworkTuned:
    if trained.solved and trained.plan.reads_floats:
        found = _through_network(job, trained.further, scales_schedule(job.recipe.training.steps), checkpoint)
        return replace(found, plan=final_scales(job, found.plan))
    samples = len(train_validation_split(job.data)[0])
    early, late = schedules_for(job.recipe.training.steps, samples, solved=trained.solved or trained.generalizes)
    found = _through_network(job, trained.further, early, checkpoint)
    if found.skip_reason is not None:
        return found
    return _through_network(job, final_scales(job, found.plan), late, checkpoint)


@stage("biases", ("engine", "steps", "seed", "strict", "loss"), title="bias tuning")
def bias_tuning(job: Job, plan: QuantPlan, checkpoint: Checkpoint = NO_CHECKPOINT) -> NetworkTuned:
    """Bias tuning on most of the samples, judged on the others."""
    return _through_network(job, plan, bias_schedule(job.recipe.training.steps), checkpoint)


STAGES: tuple[Stage[Any, Any], ...] = (
    equalization,
    smoothing,
    statistics,
    uniform_plan,
    rounded_candidates,
    noise,
    broken_outputs,
    activation_ranges,
    parallel_training,
    sensitivities,
    allocation,
    second_order_candidates,
    second_order_rounding,
    batch_norm_tuning,
    quick_tuning,
    metric_drop,
    sequential_training,
    end_to_end_training,
    bias_tuning,
)


def trains_end_to_end(recipe: Recipe) -> bool:
    """Whether all layers train together at last: neither the paper nor AdaRound does that."""
    asked = recipe.training
    return asked.schedule is not Training.PAPER and asked.layer_optimizer is not LayerOptimizer.ADAROUND


def training_pays(recipe: Recipe, plan: QuantPlan) -> bool:
    """Whether weights are trained: below eight bits, or where anything was said about training."""
    return plan.is_narrow or recipe.training != TrainingOptions()


def better_of(job: Job, trained: Trained, end_to_end: NetworkTuned) -> tuple[QuantPlan, Trained, NetworkTuned]:
    """The plan on final scales to go on with, by end-to-end training or by layers, and both told by what they gave."""
    if end_to_end.kept:
        return end_to_end.plan, trained if trained.generalizes else trained.set_aside, end_to_end
    return final_scales(job, trained.plan), trained, replace(end_to_end, after=end_to_end.before, doubt=0.0)


def final_scales(job: Job, plan: QuantPlan) -> QuantPlan:
    """The plan as it is written: on scales that leave no rounding to chance, where the target wants that."""
    return with_rounding_safe_scales(job.model, job.layers, job.points, plan, job.target)


def assembled(job: Job, candidates: Candidates, data: Dataset) -> Assembled:
    """What jobs share that measure assignments."""
    return Assembled(job.model, job.layers, job.target, candidates, sendable(data), job.loss)


def measured_by(job: Job, candidates: Candidates) -> Callable[[Mapping[str, Precision]], float]:
    """The loss of assembled models on the samples that the sensitivity was measured on."""
    teacher = Teacher(job.model, sensitivity.enough(job.model, job.data), job.loss)
    return lambda choices: teacher.loss_of(job.simulate(candidates.stitch(choices)))


def layerwise(job: Job, checkpoint: Checkpoint = NO_CHECKPOINT) -> Layerwise:
    """Training of single layers, as the recipe asks for it."""
    recipe = job.recipe
    trainer = Trainer(
        job.model,
        job.layers,
        job.points,
        job.target,
        train_validation_split(job.data)[0],
        replace(SCHEDULES[recipe.get("schedule")], steps=recipe.get("steps")),
        recipe.get("engine"),
        recipe.get("layer_optimizer"),
        recipe.seed,
        recipe.get("strict"),
    )
    return Layerwise(trainer, job.workers, job.progress, checkpoint)


def _stored_once(job: Job) -> dict[str, Precision]:
    """Layers that share a table get its eight bits: fewer would be stored beside it, in a larger file."""
    names = [layer.name for layer in job.layers]
    fixed = {name for name, override in job.overrides.items() if override.precision is not None}
    fixed |= {names[0], names[-1]} if job.recipe.edge_bits is not None else set()
    return {name: Precision(SHARED_BITS, FLOAT_BITS) for name in job.tied if name not in fixed}


def learned_from(job: Job) -> Dataset:
    """The samples that weights are rounded for: more bring little."""
    return first(train_validation_split(job.data)[0], LEARNED_FROM)


def quick_teacher(job: Job) -> Teacher:
    """What a plan is judged by that is tuned quickly."""
    held_out = first(train_validation_split(job.data)[1], QUICK_SAMPLES)
    return Teacher(job.model, held_out, job.loss, TEMPERATURE)


def _rounder(job: Job, checkpoint: Checkpoint) -> Rounder:
    method = RangeMethod.MSE if job.recipe.ranges is RangeMethod.AUTO else job.recipe.ranges
    how = (job.target, learned_from(job), method, job.progress, checkpoint)
    fixed = [name for name, override in job.overrides.items() if override.ranges is not None]
    return Rounder(job.model, job.layers, *how, fixed=fixed, floats=job.float_rows)


def _problem(job: Job, candidates: Candidates) -> Problem:
    precisions = candidate_precisions(job.layers, job.recipe)
    return Problem(job.model, job.layers, job.target, candidates, precisions, job.recipe.base, job.constants)


def _kept_if_better(
    job: Job, teacher: Teacher, plan: QuantPlan, trained: QuantPlan, skip_reasons: tuple[str, ...]
) -> Trained:
    before, after = (teacher.loss_of(job.simulate(each)) for each in (plan, trained))
    if after < before:
        return Trained(plan, trained, before, after, skip_reasons)
    return Trained(plan, plan, before, before, skip_reasons)


def _tuner(job: Job, plan: QuantPlan, schedule: Schedule) -> NetworkTuner:
    data, held_out = train_validation_split(job.data)
    teacher = Teacher(job.model, held_out, job.float_loss, TEMPERATURE)
    how = (job.recipe.get("engine"), schedule, job.recipe.seed, job.workers.threads, job.recipe.get("strict"))
    frozen = sharing_tables(plan)
    return NetworkTuner(job.model, job.layers, job.points, job.target, data, teacher, *how, frozen=frozen)


def _through_network(job: Job, plan: QuantPlan, schedule: Schedule, checkpoint: Checkpoint) -> NetworkTuned:
    return _tuner(job, plan, schedule).tune(plan, job.progress, checkpoint)
