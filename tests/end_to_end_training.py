"""Jobs, plans and tuners for tests of training through the whole network."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx
from single_layers import correlated

from models import feed_for, run
from onnxcalib.algorithms.reconstruction.end_to_end import BIASES, JOINT, NetworkTuned, NetworkTuner, Schedule
from onnxcalib.algorithms.teacher import Teacher
from onnxcalib.data import parted
from onnxcalib.numerics.losses import TEMPERATURE, Head
from onnxcalib.pipeline.job import Job, start
from onnxcalib.pipeline.sweep import candidates_of
from onnxcalib.plan import QuantPlan
from onnxcalib.progress import silent
from onnxcalib.recipe import Engine, Pipeline, RangeMethod, Recipe, parse_bits

SAMPLES = 40
TARGETS = ["ort", "paper"]
QUICK = replace(BIASES, steps=40, bias=2e-2)  # few large steps
QUICK_JOINT = replace(JOINT, steps=40, after=0, bias=2e-2, weight=6e-2, scale=3e-3)


def job_for(model: onnx.ModelProto, bits: str = "w4a8", target: str = "ort", samples: int = SAMPLES) -> Job:
    recipe = Recipe(Pipeline.ADVANCED, parse_bits(bits), target=target, ranges=RangeMethod.MINMAX)
    data = {name: correlated(value, 1) for name, value in feed_for(model, samples).items()}
    return start(model, data, recipe).jobs[0]


def plan_of(job: Job) -> QuantPlan:
    return candidates_of(job).stitch({layer.name: job.recipe.bits[0] for layer in job.layers})


def tuner_of(
    job: Job, engine: Engine = Engine.AUTO, schedule: Schedule = QUICK, *, strict: bool = False
) -> NetworkTuner:
    data, held_out = parted(job.data)
    teacher = Teacher(job.model, held_out, temperature=TEMPERATURE)
    how = (data, teacher, engine, schedule)
    return NetworkTuner(job.model, job.layers, job.places, job.target, *how, strict=strict)


def tuned(job: Job, plan: QuantPlan, engine: Engine = Engine.AUTO, schedule: Schedule = QUICK) -> NetworkTuned:
    return tuner_of(job, engine, schedule).tune(plan, silent)


def held_out_loss(job: Job, plan: QuantPlan) -> float:
    """Of the file, by another road: the divergence of softened logits, or the relative squared error."""
    feed = next(iter(parted(job.data)[1].batches(1000)))
    truth, found = run(job.model.proto, feed), run(job.write(plan), feed)
    total = 0.0
    for name, head in Teacher(job.model, job.data).heads.items():
        t, f = truth[name].astype(np.float64), found[name].astype(np.float64)
        if head is Head.VALUES:
            total += float(((t - f) ** 2).sum() / (t**2).sum())
        else:
            logs = [values / TEMPERATURE for values in (t, f)]
            logs = [values - np.log(np.exp(values).sum(axis=-1, keepdims=True)) for values in logs]
            total += float((np.exp(logs[0]) * (logs[0] - logs[1])).sum(axis=-1).mean())
    return total
