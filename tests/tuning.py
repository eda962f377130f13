"""Jobs, plans and tuners for tests of batch-norm tuning."""

from __future__ import annotations

import numpy as np
import onnx

from models import (
    feed_for,
)
from onnxcalib.algorithms.batchnorm import ChannelStatistics, Tuner
from onnxcalib.algorithms.teacher import Teacher
from onnxcalib.pipeline.job import Job, start
from onnxcalib.pipeline.sweep import candidates_of
from onnxcalib.plan import QuantPlan
from onnxcalib.recipe import BatchNormReference, Pipeline, RangeMethod, Recipe, parse_bits

SAMPLES = 32  # one batch of statistics


def job_for(model: onnx.ModelProto, bits: str = "w4a8", target: str = "ort", samples: int = SAMPLES) -> Job:
    recipe = Recipe(Pipeline.LIGHT, parse_bits(bits), target=target, ranges=RangeMethod.MINMAX)
    return start(model, feed_for(model, samples), recipe).jobs[0]


def plan_of(job: Job) -> QuantPlan:
    return candidates_of(job).stitch({layer.name: job.recipe.bits[0] for layer in job.layers})


def tuner_of(job: Job, reference: BatchNormReference = BatchNormReference.FLOAT) -> Tuner:
    return Tuner(job.model, job.layers, job.target, job.data, Teacher(job.model, job.data), reference)


def stats(mean: np.ndarray, variance: np.ndarray) -> ChannelStatistics:
    return ChannelStatistics(np.asarray(mean, np.float64), np.asarray(variance, np.float64))
