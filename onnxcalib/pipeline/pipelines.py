"""The pipelines as short lists of stages."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Any

import onnx

from onnxcalib.algorithms.broken import OutputNoise
from onnxcalib.algorithms.reconstruction.end_to_end import NetworkTuned
from onnxcalib.algorithms.reconstruction.layerwise import Trained
from onnxcalib.autodiff.gradients import choose_engine
from onnxcalib.cache.folder import check_run_directory
from onnxcalib.data import Preprocess, why_not_parted
from onnxcalib.data.absent import is_absent, no_data
from onnxcalib.data.padding import find_mask
from onnxcalib.executors.workers import find_workers
from onnxcalib.files import check_outputs
from onnxcalib.mixed_precision.request import add_cost_tables, check_mixed
from onnxcalib.model.branches import with_branch
from onnxcalib.model.external import embedded, model_bytes
from onnxcalib.model.files import model_outputs
from onnxcalib.model.io import PROTOBUF_LIMIT
from onnxcalib.model.left_float import with_left_float
from onnxcalib.model.outputs import find_output_kinds
from onnxcalib.model.placement import InsertionPoints
from onnxcalib.model.shapes import with_fixed_batch
from onnxcalib.model.short_names import with_short_names
from onnxcalib.model.stored import store_constants
from onnxcalib.model.widen import with_output_types
from onnxcalib.numerics.metric import MetricFunction
from onnxcalib.pipeline import stages
from onnxcalib.pipeline.assigned_float import assigned_float, on_quantized_layers
from onnxcalib.pipeline.begin import running
from onnxcalib.pipeline.budget import Tail, within_drop
from onnxcalib.pipeline.chosen_ranges import with_chosen_ranges
from onnxcalib.pipeline.equalizing import can_be_smoothed
from onnxcalib.pipeline.inputs import data_read, models_read, recipe_read
from onnxcalib.pipeline.job import Job, Start, kept_float, left_float, start
from onnxcalib.pipeline.left_weights import with_left_weights_stored
from onnxcalib.pipeline.loading import Part, parts_of, parts_to_drop, without
from onnxcalib.pipeline.result import Outcome, Result
from onnxcalib.pipeline.rounding import rounded_and_tuned, rounds_candidates, trains_candidates
from onnxcalib.pipeline.sound import at_base, judged_at_the_end, warn_of_broken, with_sound_outputs
from onnxcalib.pipeline.stages import better_of, equalize, final_scales, smooth, training_pays, trains_end_to_end
from onnxcalib.plan import Candidates, LeftFloat, QuantPlan, StoredConstant
from onnxcalib.progress import Event, Listener, Progress, listener_of, silent
from onnxcalib.recipe import Activations, MixedPrecisionOptions, Pipeline, Recipe, Training
from onnxcalib.recipe.settings import check_sent
from onnxcalib.runtime.memory import allowed, bounded, peak_bytes
from onnxcalib.runtime.providers import using
from onnxcalib.runtime.session import refusal
from onnxcalib.targets import Constants, Format

DEFAULT = Recipe()
EIGHT_BITS = "eight bits leave next to nothing to train for; `steps` asks for it all the same."
LEAST_BYTES = 2**16  # of a float model whose file should be less than half of it; toys keep names that people can read


def quantize(  # noqa: PLR0913
    model: str | Path | onnx.ModelProto,
    calibration: Any,
    recipe: Recipe = DEFAULT,
    *,
    output: str | Path | None = None,
    preprocess: Preprocess | None = None,
    progress: Progress = silent,
    workers: int | None = None,
    scheduler: str | Path | None = None,
    executor: Executor | None = None,
    provider: str | None = None,
    memory: str | int | None = None,
    run_dir: str | Path | None = None,
    metric: MetricFunction | None = None,
) -> Result:
    """Quantizes a float model; the calibration data is a path, arrays by name, or feeds.

    Independent jobs go to workers: one a core by default, those of a Dask scheduler, or those of an executor; where
    they run does not change the result. A provider of onnxruntime runs the models, but for training steps. A run
    directory keeps what is finished: an interrupted call, made again, goes on from there. A progress with a method
    `event` also hears of events. A metric is a function of all outputs and all labels, for `max_drop` and the loss
    'metric'. Tensors and layers that would leave an output mostly noise stay float, unless the recipe's `on_broken`
    says otherwise; the result's `left` names them.
    """
    folder = Path(run_dir) if run_dir is not None else None
    check_sent(recipe, scheduler=scheduler, executor=executor)
    reads = (*models_read(model), *data_read(calibration), *recipe_read(recipe))
    outputs = {} if output is None else model_outputs("output", Path(output))
    check_outputs(outputs, reads, {} if folder is None else check_run_directory(folder))
    with contextlib.ExitStack() as stack:
        stack.enter_context(using(provider))
        stack.enter_context(bounded(memory))
        found = stack.enter_context(contextlib.closing(find_workers(workers, scheduler, executor)))
        started = start(model, calibration, recipe, preprocess, progress, found, metric)
        begun = stack.enter_context(running(started, folder, listener_of(progress)))
        for job in begun.jobs:
            if len(recipe.bits) > 1 and job.branch is None:
                check_mixed(recipe, job.layers)
        if recipe.pipeline is not Pipeline.PLAIN:
            _tell_if_nothing_is_held_out(begun.jobs)
        if recipe.pipeline is Pipeline.ADVANCED:
            choose_engine(recipe.get("engine"))
        equal = replace(begun, jobs=tuple(with_equal_channels(job) for job in begun.jobs))
        done = with_left_weights_stored(equal, [_run(job) for job in equal.jobs])
        result = replace(_joined(*done), reads=reads)
        if output is not None:
            result.save(output)
            result = replace(result, output=Path(output))
        _tell_if_too_much(listener_of(progress))
    return result


def quantize_without_data(model: str | Path | onnx.ModelProto, recipe: Recipe, output: str | Path) -> Result:
    """Quantizes weights by their values, and what products read as it comes at run time; nothing is measured."""
    assert recipe.weight_only or recipe.activations.mode is Activations.DYNAMIC, "static ranges need data"
    reads = (*models_read(model), *recipe_read(recipe))
    check_outputs(model_outputs("output", Path(output)), reads)
    started = start(model, no_data(), recipe)
    # What only other ops read stays float: there is nothing to find its range from.
    jobs = tuple(replace(job, points=InsertionPoints({}, job.points.dynamic)) for job in started.jobs)
    started = replace(started, jobs=jobs)
    outcomes = [Outcome(final_scales(job, _uniform(job))) for job in started.jobs]
    result = replace(_joined(started, outcomes), reads=reads)
    result.save(output)
    return replace(result, output=Path(output))


def _tell_if_nothing_is_held_out(jobs: Sequence[Job]) -> None:
    """Says once why no samples are left to judge by; what a branch of an If captures is a dataset of its own."""
    for job in jobs:
        reason = why_not_parted(job.data)
        if reason is not None:
            where = "" if job.branch is None else f"{job.branch.attribute} of '{job.branch.node}': "
            job.run.listener(Event("warning", {"message": where + reason}))
            return


def _tell_if_too_much(listener: Listener) -> None:
    """Says where memory did not suffice: a model, its weights and one sample's tensors take what they take."""
    most, taken = allowed(), peak_bytes()
    if most is not None and taken is not None and taken > most:
        said = f"{taken / 2**30:.2f} GB were taken at the peak of this process, more than the {most / 2**30:.2f} GB"
        listener(Event("warning", {"message": f"{said} of `memory`. Give it more, or accept that."}))


def with_equal_channels(job: Job) -> Job:
    """The job on a model whose channels share their grids well."""
    if job.recipe.pipeline is Pipeline.PLAIN or job.recipe.training.schedule is Training.PAPER:
        return job
    job = equalize(job, stages.equalization(job))
    return smooth(job, stages.smoothing(job)) if can_be_smoothed(job) else job


def _run(job: Job) -> Outcome:
    run = {Pipeline.PLAIN: _plain, Pipeline.LIGHT: _light, Pipeline.ADVANCED: _advanced}[job.recipe.pipeline]
    if job.branch is not None and len(job.recipe.bits) > 1:
        # Bits are assigned within one graph; branches of an If get the highest on offer.
        one, unmixed = (job.recipe.highest,), MixedPrecisionOptions()
        job = replace(job, recipe=replace(job.recipe, bits=one, edge_bits=None, mixed_precision=unmixed))
    outcome = run(job) if job.layers else Outcome(_uniform(job), noise=OutputNoise({}))
    noise = outcome.noise or stages.noise(job, outcome.plan)
    if judged_at_the_end(job.recipe):
        warn_of_broken(job, noise)
    return replace(outcome, noise=noise)


def _plain(job: Job) -> Outcome:
    """Calibrate, round to nearest, write."""
    job, plan, left, noise = with_sound_outputs(job, _uniform, _itself)
    return Outcome(final_scales(job, plan), left, noise=noise)


def _light(job: Job) -> Outcome:
    """Forward passes only: sensitivity, integer program, second-order rounding, batch-norm tuning."""
    return _assembled(job, _tuned)


def _tuned(job: Job, found: Outcome) -> Outcome:
    """What the light pipeline does with assigned bits."""
    rounded = rounded_and_tuned(job, found.plan)
    plan = final_scales(job, rounded.best.plan)
    return replace(found, plan=plan, rounding=rounded.chosen, tuned=rounded.best)


def _quickly_tuned(job: Job, found: Outcome) -> Outcome:
    """Enough of it to compare sizes by."""
    tuned = stages.quick_tuning(job, found.plan)
    return replace(found, plan=final_scales(job, tuned.plan), tuned=tuned)


def _advanced(job: Job) -> Outcome:
    """Training as well: end to end, or biases; before that by layers, where weights are rounded to nearest."""
    return _assembled(job, _trained)


def _trained(job: Job, found: Outcome) -> Outcome:
    """What the advanced pipeline does with assigned bits."""
    rounded = rounded_and_tuned(job, found.plan)
    tuned = rounded.best
    if not training_pays(job.recipe, tuned.plan):
        plan = final_scales(job, tuned.plan)
        skipped = NetworkTuned(plan, tuned.after, tuned.after, EIGHT_BITS)
        biases = stages.bias_tuning(job, plan)
        found = replace(found, rounding=rounded.chosen, tuned=tuned, end_to_end=skipped)
        return replace(found, plan=biases.plan, biases=biases)
    solved = rounded.chosen is not None and trains_end_to_end(job.recipe)
    if solved:
        # For what layers read in the quantized network, taken or not: training them one by one has the same aim.
        trained = Trained(tuned.plan, tuned.plan, tuned.after, tuned.after, solved=rounded.is_second_order)
    else:
        trained = stages.sequential_training(job, tuned.plan)
    if trains_end_to_end(job.recipe):
        end_to_end = stages.end_to_end_training(job, trained)
        plan, trained, end_to_end = better_of(job, trained, end_to_end)
    else:
        plan, end_to_end = final_scales(job, trained.plan), None
    told = None if solved else trained
    found = replace(found, plan=plan, rounding=rounded.chosen, tuned=tuned, trained=told, end_to_end=end_to_end)
    if end_to_end is not None and plan is end_to_end.plan:  # which has trained them, on the scales that are written
        return found
    biases = stages.bias_tuning(job, plan)
    return replace(found, plan=biases.plan, biases=biases)


def _itself(_: Job, plan: QuantPlan) -> QuantPlan:
    return plan


def _uniform(job: Job) -> QuantPlan:
    if not job.layers:  # only constants are stored
        return QuantPlan(job.target.name, "none", {}, {}, {}, {})
    return stages.uniform_plan(job, stages.statistics(job), job.recipe.pipeline is Pipeline.PLAIN)


def _candidates(job: Job) -> Candidates:
    return stages.rounded_candidates(job, stages.statistics(job))


def _assembled(job: Job, finished: Tail) -> Outcome:
    """The plan at one precision, or at the bits that the integer program assigns, and what follows on that."""
    if len(job.recipe.bits) == 1:
        job, plan, ranges = with_chosen_ranges(job, _uniform(job), _itself)
        job, plan, left, _ = with_sound_outputs(job, _uniform, _itself, plan)
        return finished(job, Outcome(plan, left, ranges))
    job, candidates, ranges = with_chosen_ranges(job, _candidates(job), at_base)
    job, candidates, left, _ = with_sound_outputs(job, _candidates, at_base, candidates)
    stages.check_reachable(job, candidates)
    if rounds_candidates(job):
        candidates = stages.second_order_candidates(job, candidates)
    elif trains_candidates(job):
        candidates = stages.parallel_training(job, candidates)
    table = add_cost_tables(stages.sensitivities(job, candidates).table, job.recipe)
    tuned, finished = on_quantized_layers(_quickly_tuned), on_quantized_layers(finished)
    if job.recipe.mixed_precision.max_drop is not None:
        return replace(within_drop(job, candidates, table, tuned, finished), left=left, ranges=ranges)
    assigned = stages.allocation(job, candidates, table)
    return finished(job, Outcome(candidates.stitch(assigned.allocation.choices), left, ranges, table, assigned))


def _joined(started: Start, outcomes: Sequence[Outcome]) -> Result:
    """One file out of the model's own graph and the branches of its Ifs, which onnxruntime loads."""
    plans, left = [outcome.plan for outcome in outcomes], _left(outcomes)
    whole, constants = _assemble(started, plans, left)
    listed = assigned_float(started.listed, outcomes)
    listed = listed if left is None else left_float(listed, left)
    first = started.jobs[0]
    if first.target.format is Format.QDQ and (why := refusal(whole, started.model.source)) is not None:

        def why_not(dropped: Sequence[Part]) -> str | None:
            return refusal(
                _assemble(started, [without(plan, dropped) for plan in plans], left)[0], started.model.source
            )

        dropped = parts_to_drop(parts_of(started.jobs, plans), why_not)
        plans = [without(plan, dropped) for plan in plans]
        whole, constants = _assemble(started, plans, left)
        reason = f"onnxruntime cannot load the file with it quantized: {why}"
        listed = kept_float(listed, [layer for layer in listed.layers if Part(layer.name, True) in dropped], reason)
        for part in dropped:
            message = f"{'layer' if part.is_layer else 'tensor'} '{part.name}' stays float: {reason}."
            first.run.listener(Event("warning", {"message": message}))
    plan = replace(reduce(QuantPlan.joined, plans), constants=constants)
    told = {**vars(outcomes[0]), "plan": plan, "left": left}
    mask = None if is_absent(started.data) else find_mask(started.data)
    kinds = find_output_kinds(started.model.proto)
    whole = embedded(whole) if model_bytes(whole) < PROTOBUF_LIMIT else whole
    found = Result(**told, model=whole, layers=listed, recipe=started.asked, output_kinds=kinds, mask=mask)
    return replace(found, names_files=started.model.names_files)


def _assemble(
    started: Start, plans: Sequence[QuantPlan], left: LeftFloat | None
) -> tuple[onnx.ModelProto, Mapping[str, StoredConstant]]:
    """The file of these plans, and what is stored as integers beside layers."""
    whole, target = started.model.proto, started.jobs[0].target
    for job, plan in zip(started.jobs, plans, strict=True):
        written = job.write(plan)
        whole = written if job.branch is None else with_branch(whole, job.branch, written)
    constants: Mapping[str, StoredConstant] = {}
    if target.constants is Constants.FOLDED:
        tables = [table for plan in plans for table in plan.tables.values()]
        whole, constants = store_constants(whole, [*started.constants, *tables])
    whole = with_output_types(whole, started.model.output_types)
    whole = with_fixed_batch(whole) if target.fixed_shapes else whole
    if 2 * model_bytes(whole) > started.model.given_bytes >= LEAST_BYTES:
        whole = with_short_names(whole, started.model.proto)
    return whole if left is None else with_left_float(whole, left), constants


def _left(outcomes: Sequence[Outcome]) -> LeftFloat | None:
    """What stays float in any graph, None where no output was broken."""
    found = [outcome.left for outcome in outcomes if outcome.left is not None]
    return reduce(LeftFloat.joined, found) if found else None
