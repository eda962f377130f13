"""Outputs that quantization breaks, and what is done about them: the recipe's on_broken."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TypeVar

from onnxcalib.algorithms.broken import OutputNoise
from onnxcalib.errors import ModelError, listed
from onnxcalib.model.placement import InsertionPoints
from onnxcalib.pipeline import stages
from onnxcalib.pipeline.job import Job, insertion_points
from onnxcalib.plan import Candidates, LeftFloat, QuantPlan
from onnxcalib.progress import Event
from onnxcalib.recipe import MAX_BITS, OnBroken, Recipe

Value = TypeVar("Value")


def with_sound_outputs(
    job: Job, make: Callable[[Job], Value], plan_of: Callable[[Job, Value], QuantPlan], made: Value | None = None
) -> tuple[Job, Value, LeftFloat | None, OutputNoise | None]:
    """What is made for a job, or for one with less to quantize where that mends outputs which would be broken.

    With it comes the noise that the outputs then have, where it was measured.
    """
    value = make(job) if made is None else made
    if judged_at_the_end(job.recipe):
        return job, value, None, None
    plan = plan_of(job, value)
    noise = before = stages.noise(job, plan)
    if not before.broken:
        return job, value, None, noise
    found = LeftFloat(before=before.broken, after=before.broken)
    if job.recipe.get("on_broken") is not OnBroken.KEEP and not job.recipe.weight_only:
        left = leavable(job, stages.broken_outputs(job, plan))
        if job.recipe.on_broken is OnBroken.ERROR:
            raise _refused(job, before, left)
        if left:
            smaller = leaving(job, left)
            tried = make(smaller)
            after = stages.noise(smaller, plan_of(smaller, tried))
            if after.helped(before):
                mended = {name: after.sqnr_db[name] for name in {**before.broken, **after.broken}}
                job, value, found = smaller, tried, replace(left, before=_of(before, mended), after=mended)
                noise = after
    warn_of_broken(job, OutputNoise(found.after))
    return job, value, found, noise


def judged_at_the_end(recipe: Recipe) -> bool:
    """Whether nothing may be left float: less than eight bits were asked for, and with them noise."""
    narrow = recipe.highest.weight < MAX_BITS or recipe.highest.activation < MAX_BITS
    return narrow and recipe.on_broken in (None, OnBroken.KEEP)


def at_base(job: Job, candidates: Candidates) -> QuantPlan:
    """Every layer quantized at the highest precision on offer."""
    return candidates.stitch({layer.name: job.recipe.highest for layer in job.layers})


def leavable(job: Job, left: LeftFloat) -> LeftFloat:
    """The same, with the layers that read floats; where the target has no form for these, all of them stays float."""
    fits = job.target.weight_only_ops if job.target.weight_only_bits else ()
    reading = [layer for layer in job.layers if layer.input in left.tensors and layer.name not in left.layers]
    inputs = tuple(layer.name for layer in reading if layer.op in fits)
    layers = (*left.layers, *(layer.name for layer in reading if layer.op not in fits))
    if len(layers) == len(job.layers):
        return LeftFloat()
    return replace(left, inputs=inputs, layers=layers)


def leaving(job: Job, left: LeftFloat) -> Job:
    """The job with less to quantize."""
    layers = tuple(layer for layer in job.layers if layer.name not in left.layers)
    products = tuple(product for product in job.products if not {*product.inputs} & {*left.tensors})
    smaller = replace(job, layers=layers, products=products, run=job.run.changed_by(left))
    return replace(smaller, points=_without(smaller, left.tensors))


def _without(job: Job, floats: tuple[str, ...]) -> InsertionPoints:
    points = insertion_points(
        job.model, job.layers, job.target, job.overrides, job.products, job.recipe.activations.mode
    )
    kept = {
        name: tensor
        for name, tensor in points.tensors.items()
        if name in job.points.tensors and name not in floats and tensor.same_qparams_as not in floats
    }
    read = {layer.input for layer in job.layers}
    return InsertionPoints(kept, tuple(name for name in job.points.dynamic if name in read))


def warn_of_broken(job: Job, noise: OutputNoise) -> None:
    """Says which outputs have as much noise as signal, and what could help."""
    if not noise.broken:
        return
    where = "" if job.branch is None else f"{job.branch.attribute} of '{job.branch.node}': "
    tried = not judged_at_the_end(job.recipe) and job.recipe.get("on_broken") is OnBroken.FLOAT
    helps = not tried and not job.recipe.weight_only
    hint = "or give `on_broken='float'`" if helps else "or `exclude` layers"
    message = (
        f"{where}{_said(noise.broken)} on calibration samples{', whatever few layers are left' if tried else ''}. "
        f"Check that the samples are preprocessed as the model expects, {hint}."
    )
    job.run.listener(Event("warning", {"message": message}))


def _refused(job: Job, noise: OutputNoise, left: LeftFloat) -> ModelError:
    causes = [*left.inputs, *left.layers] or list(left.tensors)
    why = f", most of it by {listed(causes)}" if causes else ""
    return ModelError(
        f"{job.model.source}: quantized, {_said(noise.broken)}{why}.",
        "Give `on_broken='float'` to leave what causes it float, or `on_broken='keep'`.",
    )


def _said(broken: Mapping[str, float]) -> str:
    told = [f"'{name}' ({db:.1f} dB)" for name, db in sorted(broken.items(), key=lambda item: item[1])]
    return f"the output{'s' * (len(told) > 1)} {listed(told)} would be mostly noise"


def _of(noise: OutputNoise, names: Mapping[str, float]) -> dict[str, float]:
    return {name: noise.sqnr_db[name] for name in names}
