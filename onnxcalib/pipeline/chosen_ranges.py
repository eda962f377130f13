"""Activations as each tensor needs it: static, quantized at run time, or float, where the recipe leaves it to us."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from onnxcalib.algorithms.activation_ranges import ChosenRanges
from onnxcalib.model.layers import Layer
from onnxcalib.model.placement import InsertionPoints
from onnxcalib.pipeline import stages
from onnxcalib.pipeline.job import Job
from onnxcalib.plan import Candidates, QuantPlan
from onnxcalib.recipe import FLOAT_BITS, Activations, Precision

Value = TypeVar("Value", QuantPlan, Candidates)


def with_chosen_ranges(
    job: Job, made: Value, plan_of: Callable[[Job, Value], QuantPlan]
) -> tuple[Job, Value, ChosenRanges | None]:
    """The job and what was made for it with fewer static tensors, where that helps; None where it was not asked for."""
    if job.recipe.activations.mode is not Activations.AUTO:
        return job, made, None
    found: ChosenRanges = stages.activation_ranges(job, plan_of(job, made))
    if not found:
        return job, made, found
    gone = {*found.dynamic, *found.floats}
    kept = {
        name: tensor
        for name, tensor in job.points.tensors.items()
        if name not in gone and tensor.same_qparams_as not in gone
    }
    points = InsertionPoints(kept, (*job.points.dynamic, *found.dynamic))
    changed = made.reading(found.dynamic, found.floats)
    if isinstance(changed, QuantPlan):
        changed = as_read(job.layers, changed)
    return replace(job, points=points, run=job.run.changed_by(found)), changed, found


def as_read(layers: Sequence[Layer], plan: QuantPlan) -> QuantPlan:
    """The plan with the precisions of layers that now read floats."""
    floats = {
        layer.name for layer in layers if layer.input not in plan.dynamic and plan.layer_input(layer.input) is None
    }
    precisions = {
        name: Precision(each.weight, FLOAT_BITS) if name in floats else each for name, each in plan.precisions.items()
    }
    return replace(plan, precisions=precisions)
