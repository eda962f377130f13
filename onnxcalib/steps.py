"""The stages as steps of one job: each takes what the step before made."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from onnxcalib.data import Dataset, first, split
from onnxcalib.engine.inference import Session, samples_in
from onnxcalib.errors import DataError
from onnxcalib.job import Job
from onnxcalib.model.equalize import equalized, find_uneven
from onnxcalib.model.extract import with_outputs
from onnxcalib.model.layers import find_layers
from onnxcalib.numerics.loss import TEMPERATURE, LossKind
from onnxcalib.plan import Candidates, QuantPlan
from onnxcalib.recipe import (
    MAX_BITS,
    BatchNormReference,
    Engine,
    LayerOptimizer,
    Precision,
    RangeMethod,
    Recipe,
    Training,
)
from onnxcalib.stages import sensitivity as sensitivity_stage
from onnxcalib.stages.adaquant import SCHEDULES
from onnxcalib.stages.allocate import minimise_loss
from onnxcalib.stages.batchnorm import Tuned, Tuner
from onnxcalib.stages.calibrate import Statistics, calibrate
from onnxcalib.stages.equalize import Equalization, measure_channels
from onnxcalib.stages.fixed import fixed_precision
from onnxcalib.stages.layerwise import Layerwise
from onnxcalib.stages.memo import FORGETFUL, Memo
from onnxcalib.stages.mixed import Assigned, add_cost_tables, assign, contested, limits_of, pins_of
from onnxcalib.stages.network import BIASES, JOINT, PULL, SETTLED, NetworkTuned, NetworkTuner
from onnxcalib.stages.network import Schedule as NetworkSchedule
from onnxcalib.stages.rounding import Menu, Ranges, round_to_nearest
from onnxcalib.stages.sensitivity_table import SensitivityTable
from onnxcalib.stages.teacher import Teacher
from onnxcalib.stages.ties import without_ties
from onnxcalib.stages.unseen import scores
from onnxcalib.stages.wishes import menus_of

HELD_OUT = 128
RANGE_SAMPLES = 256
RANGE_MARGIN = 0.9
JOINT_STEPS = 8  # for each step of a layer that is asked for
# Training by layers that leaves more than this of the held-out loss has learned the other samples by heart.
GENERAL = 0.8
RANGE_CANDIDATES = (RangeMethod.MSE, RangeMethod.AVERAGED, RangeMethod.PERCENTILE)


@dataclass(frozen=True)
class Trained:
    """A plan trained layer by layer, and the held-out loss before and after."""

    start: QuantPlan
    plan: QuantPlan
    before: float
    after: float
    obstacles: tuple[str, ...] = ()  # why layers could not be trained

    @property
    def is_general(self) -> bool:
        """Whether what was learned holds for other samples."""
        return self.after < GENERAL * self.before

    @property
    def further(self) -> QuantPlan:
        """What is worth training on."""
        return self.plan if self.is_general else self.start

    @property
    def set_aside(self) -> Trained:
        """The same, told as not kept."""
        return replace(self, after=self.before)


def equalization(job: Job) -> Equalization:
    """What scales channels so that they share a grid well."""
    # A branch of an If keeps no metadata that could tell of it.
    uneven = find_uneven(job.model, job.layers, job.target) if job.branch is None else []
    return measure_channels(job.model, uneven, job.data, job.progress)


def equalize(job: Job, found: Equalization) -> Job:
    """The job on the model with scaled channels."""
    model = equalized(job.model, found.exponents)
    names = {layer.name for layer in job.layers}
    return replace(job, model=model, layers=tuple(it for it in find_layers(model).layers if it.name in names))


def fixed_plan(job: Job, statistics: Statistics) -> QuantPlan:
    """Every layer rounded at the one precision that is asked for, or at the edge bits."""
    return fixed_candidates(job, statistics).stitch(fixed_precisions(job))


def settled(job: Job, plan: QuantPlan) -> QuantPlan:
    """The plan as it is written: on scales that leave no rounding to chance, where the target wants that."""
    return without_ties(job.model, job.layers, job.places, plan, job.target)


def fixed_precisions(job: Job) -> dict[str, Precision]:
    """What each layer gets where nothing is assigned."""
    return fixed_precision(job.layers, job.places, job.recipe.bits[0], job.recipe.edge_bits)


def fixed_candidates(job: Job, statistics: Statistics) -> Candidates:
    """Every layer rounded at the one precision that it gets."""
    return _rounded(job, statistics, {name: (precision,) for name, precision in fixed_precisions(job).items()})


def rounded_candidates(job: Job, statistics: Statistics) -> Candidates:
    """Every layer rounded at every precision on offer."""
    return _rounded(job, statistics, menu_of(job))


def candidates_of(job: Job) -> Candidates:
    """Calibrates, and rounds every layer at every precision on offer."""
    return rounded_candidates(job, calibrate(job.model, job.places, job.data, job.progress))


def menu_of(job: Job) -> Menu:
    """What each layer may get."""
    return menus_of(job.layers, job.recipe)


def _rounded(job: Job, statistics: Statistics, menu: Menu) -> Candidates:
    """Every layer at every precision of the menu, with the ranges asked for or those that suit the model."""

    def at(method: RangeMethod, weights: RangeMethod) -> Candidates:
        ranges = Ranges(dict.fromkeys(widths, method), weights, job.recipe.block_size)
        return round_to_nearest(job.model, job.layers, job.places, statistics, menu, job.target, ranges)

    def loss_of(method: RangeMethod) -> float:
        return teacher.loss_of(job.simulate(at(method, RangeMethod.MSE).stitch(lowest)))

    widths = {MAX_BITS} | {choice.activation for choices in menu.values() for choice in choices}
    if job.recipe.ranges is not RangeMethod.AUTO:
        return at(job.recipe.ranges, job.recipe.ranges)
    if job.recipe.weight_only:
        return at(RangeMethod.MSE, RangeMethod.MSE)
    lowest = {name: choices[0] if len(choices) == 1 else min(job.recipe.bits) for name, choices in menu.items()}
    teacher = Teacher(job.model, first(job.data, RANGE_SAMPLES), temperature=TEMPERATURE)
    losses = {}
    for done, method in enumerate(RANGE_CANDIDATES, 1):
        losses[method] = loss_of(method)
        job.progress("ranges", done, len(RANGE_CANDIDATES))
    best = min(losses, key=losses.__getitem__)
    # Ranges that clip more are fragile once tuning moves the activations: they must be clearly better.
    clearly = losses[best] < RANGE_MARGIN * losses[RangeMethod.MSE]
    return at(best if clearly else RangeMethod.MSE, RangeMethod.MSE)


def check_reachable(job: Job, candidates: Candidates) -> None:
    """Fails now if no assignment can keep the limits, before hours of measuring and training."""
    names = {layer.input for layer in job.layers}
    inputs = {value.name for value in job.model.proto.graph.input}
    session = Session(with_outputs(job.model.proto, sorted(names - inputs)))
    feed = next(iter(job.data.batches(1)))
    samples = samples_in(feed, job.data)
    elements = {name: value.size / samples for name, value in {**feed, **session.run(feed)}.items() if name in names}
    table = add_cost_tables(sensitivity_stage.unmeasured(_problem(job, candidates), elements), job.recipe)
    minimise_loss(table, limits_of(table, job.recipe), pins_of(table, job.recipe))


def measure_sensitivity(job: Job, candidates: Candidates, memo: Memo = FORGETFUL) -> sensitivity_stage.Measured:
    """The sensitivity table of the job's layers."""
    data = first(job.data, sensitivity_stage.SAMPLES)
    return sensitivity_stage.measure(_problem(job, candidates), data, _loss_kind(job.recipe), job.progress, memo)


def _problem(job: Job, candidates: Candidates) -> sensitivity_stage.Problem:
    return sensitivity_stage.Problem(
        job.model, job.layers, job.places, job.target, candidates, menu_of(job), job.recipe.base
    )


def assign_bits(job: Job, candidates: Candidates, table: SensitivityTable, memo: Memo = FORGETFUL) -> Assigned:
    """The integer program's choice, measured on the assembled model, or a rival that measures better."""
    measure, kind = measured_by(job, candidates), _loss_kind(job.recipe)
    assigned = assign(table, job.recipe, measure)
    unseen = scores(job.model, job.data, kind, lambda it: job.simulate(candidates.stitch(it)), job.progress, memo)
    chosen = contested(table, job.recipe, assigned, measure, unseen)
    job.progress("assignments", 1, 1)  # often fewer are measured than might have been
    return chosen


def measured_by(job: Job, candidates: Candidates) -> Callable[[Mapping[str, Precision]], float]:
    """The loss of assembled models on the samples that the sensitivity was measured on."""
    teacher = Teacher(job.model, first(job.data, sensitivity_stage.SAMPLES), _loss_kind(job.recipe))
    return lambda choices: teacher.loss_of(job.simulate(candidates.stitch(choices)))


def parted(data: Dataset) -> tuple[Dataset, Dataset]:
    """Most of the samples to learn from, and the others to judge by."""
    if len(data) >= 8:
        # Samples that come in one piece, as a model with a fixed batch takes them, cannot be parted.
        with contextlib.suppress(DataError):
            return split(data, min(HELD_OUT, len(data) // 4))
    return data, data


def tune_batch_norm(job: Job, plan: QuantPlan) -> Tuned:
    """Batch-norm tuning on most of the samples, judged on the others."""
    data, held_out = parted(job.data)
    teacher = Teacher(job.model, held_out, _loss_kind(job.recipe), TEMPERATURE)
    reference = job.recipe.bn_reference or BatchNormReference.FLOAT
    return Tuner(job.model, job.layers, job.target, data, teacher, reference).tune(plan, job.progress)


def train_in_parallel(job: Job, candidates: Candidates, memo: Memo = FORGETFUL) -> Candidates:
    """Every layer at every precision, trained on the float model's inputs."""
    return layerwise(job, memo).parallel(candidates)


def train_in_turn(job: Job, plan: QuantPlan, memo: Memo = FORGETFUL) -> Trained:
    """Layer after layer, trained on the quantized network's inputs; kept if the held-out loss falls."""
    teacher = Teacher(job.model, parted(job.data)[1], temperature=TEMPERATURE)
    trained, obstacles = layerwise(job, memo).sequential(plan)
    before, after = (teacher.loss_of(job.simulate(each)) for each in (plan, trained))
    if after < before:
        return Trained(plan, trained, before, after, obstacles)
    return Trained(plan, plan, before, before, obstacles)


def trains_jointly(recipe: Recipe) -> bool:
    """Whether all layers train together at last: neither the paper nor AdaRound does that."""
    return recipe.training is not Training.PAPER and recipe.layer_optimizer is not LayerOptimizer.ADAROUND


def train_jointly(job: Job, trained: Trained, memo: Memo = FORGETFUL) -> NetworkTuned:
    """All layers at once towards the float model's outputs, on most of the samples, judged on the others.

    Ensures a settled plan, unless something has no gradient: the last quarter of the steps trains on its scales. It may
    be worse than the start.
    """
    share = 1.0 if job.recipe.steps is None else JOINT_STEPS * job.recipe.steps / (JOINT.steps + SETTLED.steps)
    early, late = (max(round(share * it.steps), 1) for it in (JOINT, SETTLED))
    first_part, last_part = replace(JOINT, steps=early, after=late), replace(SETTLED, steps=late, before=early)
    if trained.is_general:
        first_part = replace(first_part, pull=PULL)
    found = _through_network(job, trained.further, first_part, memo)
    if found.obstacle is not None:
        return found
    last = _through_network(job, settled(job, found.plan), last_part, memo)
    return replace(last, before=found.before)


def better_of(job: Job, trained: Trained, joint: NetworkTuned) -> tuple[QuantPlan, Trained, NetworkTuned]:
    """The settled plan to go on with, by joint training or by layers, and both told by what they gave."""
    if joint.obstacle is None and joint.after < trained.after:
        return joint.plan, trained if trained.is_general else trained.set_aside, joint
    return settled(job, trained.plan), trained, replace(joint, before=trained.after, after=trained.after)


def tune_biases(job: Job, plan: QuantPlan, memo: Memo = FORGETFUL) -> NetworkTuned:
    """Bias tuning on most of the samples, judged on the others."""
    return _through_network(job, plan, BIASES, memo)


def _through_network(job: Job, plan: QuantPlan, schedule: NetworkSchedule, memo: Memo) -> NetworkTuned:
    data, held_out = parted(job.data)
    teacher = Teacher(job.model, held_out, temperature=TEMPERATURE)
    engine, strict = job.recipe.engine or Engine.AUTO, bool(job.recipe.strict)
    how = (schedule, job.recipe.seed, job.workers, strict)
    return NetworkTuner(job.model, job.layers, job.target, data, teacher, engine, *how).tune(plan, job.progress, memo)


def layerwise(job: Job, memo: Memo = FORGETFUL) -> Layerwise:
    """Training of single layers, as the recipe asks for it."""
    recipe = job.recipe
    schedule = SCHEDULES[recipe.training or Training.STANDARD]
    return Layerwise(
        job.model,
        job.layers,
        job.places,
        job.target,
        parted(job.data)[0],
        replace(schedule, steps=recipe.steps or schedule.steps),
        recipe.engine or Engine.AUTO,
        recipe.layer_optimizer or LayerOptimizer.ADAQUANT,
        recipe.seed,
        job.workers,
        job.progress,
        bool(recipe.strict),
        memo,
    )


def _loss_kind(recipe: Recipe) -> LossKind:
    return recipe.loss or LossKind.DISTILLATION
