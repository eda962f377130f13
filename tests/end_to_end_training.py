"""Jobs, plans and tuners for tests of training through the whole network."""

from __future__ import annotations

from dataclasses import replace

import by_hand
import onnx
from jobs import correlated_data, job_on

from models import run
from onnxcalib.algorithms.reconstruction.end_to_end import BIASES, JOINT, NetworkTuned, NetworkTuner, Schedule
from onnxcalib.algorithms.teacher import Teacher
from onnxcalib.data import parted
from onnxcalib.model.outputs import find_heads
from onnxcalib.numerics.losses import TEMPERATURE, Head
from onnxcalib.pipeline.job import Job
from onnxcalib.plan import QuantPlan
from onnxcalib.progress import silent
from onnxcalib.recipe import Engine, Pipeline

SAMPLES = 40
TARGETS = ["ort", "paper"]
QUICK = replace(BIASES, steps=40, bias=2e-2)  # few large steps
QUICK_JOINT = replace(JOINT, steps=40, after=0, bias=2e-2, weight=6e-2, scale=3e-3)


def job_for(model: onnx.ModelProto, bits: str = "w4a8", target: str = "ort", samples: int = SAMPLES) -> Job:
    return job_on(model, correlated_data(model, samples), bits, target, pipeline=Pipeline.ADVANCED)


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
    truth, found = (run(model, feed) for model in (job.model.proto, job.write(plan)))
    heads = find_heads(job.model.proto)
    logits = [name for name, head in heads.items() if head is Head.LOGITS]
    return by_hand.loss({name: truth[name] for name in heads}, found, logits, TEMPERATURE)
