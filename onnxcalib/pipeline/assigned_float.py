"""Layers to which the integer program assigns float: what comes after goes on without them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from onnxcalib.model.layers import LayerList
from onnxcalib.pipeline.budget import Tail
from onnxcalib.pipeline.job import Job, kept_float
from onnxcalib.pipeline.result import Outcome
from onnxcalib.pipeline.sound import leaving
from onnxcalib.plan import LeftFloat


def on_quantized_layers(finished: Tail) -> Tail:
    """The same for an outcome whose plan may lack layers; where it lacks all of them, nothing is done."""

    def run(job: Job, found: Outcome) -> Outcome:
        floats = tuple(layer.name for layer in job.layers if layer.name not in found.plan.layers)
        if not floats:
            return finished(job, found)
        if len(floats) == len(job.layers):
            return replace(found, plan=replace(found.plan, shared={}, inputs={}, dynamic=()))
        smaller, plan = leaving(job, LeftFloat(layers=floats)), found.plan
        shared, inputs = (
            {name: qparams for name, qparams in grids.items() if name in smaller.points.tensors}
            for grids in (plan.shared, plan.inputs)
        )
        return finished(smaller, replace(found, plan=replace(plan, shared=shared, inputs=inputs)))

    return run


def assigned_float(listed: LayerList, outcomes: Sequence[Outcome]) -> LayerList:
    """The list in which such layers are among what stays float, and why."""
    names = {
        layer
        for outcome in outcomes
        if outcome.assigned is not None
        for layer, precision in outcome.assigned.allocation.choices.items()
        if precision.is_float
    }
    return kept_float(
        listed, [layer for layer in listed.layers if layer.name in names], "the integer program leaves it float"
    )
