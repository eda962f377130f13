"""Jobs with the plainest ranges, and their plans."""

from __future__ import annotations

from typing import Any

import onnx
from single_layers import correlated

from models import Arrays, feed_for
from onnxcalib.pipeline.job import Job, start
from onnxcalib.pipeline.sweep import candidates_of
from onnxcalib.plan import QuantPlan
from onnxcalib.recipe import Pipeline, RangeMethod, Recipe, parse_bits


def job_on(model: onnx.ModelProto, data: Any, bits: str, target: str = "ort", **options: Any) -> Job:
    """A job of the light pipeline, unless the options name another."""
    settings = {"pipeline": Pipeline.LIGHT, "ranges": RangeMethod.MINMAX, **options}
    return start(model, data, Recipe(bits=parse_bits(bits), target=target, **settings)).jobs[0]


def trained_by_layers(steps: int) -> Recipe:
    """Three precisions, and layers that are trained one by one before bits are assigned."""
    bits, options = parse_bits("w3a4,w4a8,w8a8"), {"compression": 0.7, "steps": steps, "rounding": "nearest"}
    return Recipe(Pipeline.ADVANCED, bits, ranges=RangeMethod.MINMAX, **options)


def correlated_data(model: onnx.ModelProto, samples: int) -> Arrays:
    """Samples from which there is something to learn."""
    return {name: correlated(value, 1) for name, value in feed_for(model, samples).items()}


def plan_of(job: Job) -> QuantPlan:
    """Every layer at the first precision of the recipe."""
    return candidates_of(job).stitch({layer.name: job.recipe.bits[0] for layer in job.layers})
