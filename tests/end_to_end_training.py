"""Jobs, plans and tuners for tests of training through the whole network."""

from __future__ import annotations

from dataclasses import replace

import by_hand
import onnx
from jobs import correlated_data, job_on

from models import run
from onnxcalib.algorithms.reconstruction.end_to_end import BIASES, END_TO_END, NetworkTuned, NetworkTuner, Schedule
from onnxcalib.algorithms.teacher import Teacher
from onnxcalib.data import train_validation_split
from onnxcalib.model.outputs import find_output_kinds
from onnxcalib.numerics.losses import TEMPERATURE
from onnxcalib.numerics.output_kind import OutputKind
from onnxcalib.pipeline.job import Job
from onnxcalib.plan import QuantPlan
from onnxcalib.progress import silent
from onnxcalib.recipe import Engine, Pipeline

SAMPLES = 40
TARGETS = ["ort", "paper"]
QUICK = replace(BIASES, steps=40, bias=2e-2)  # few large steps
QUICK_END_TO_END = replace(END_TO_END, steps=40, after=0, bias=2e-2, weight=6e-2, scale=3e-3)


def job_for(model: onnx.ModelProto, bits: str = "w4a8", target: str = "ort", samples: int = SAMPLES) -> Job:
    return job_on(model, correlated_data(model, samples), bits, target, pipeline=Pipeline.ADVANCED)


def tuner_of(
    job: Job, engine: Engine = Engine.AUTO, schedule: Schedule = QUICK, *, strict: bool = False
) -> NetworkTuner:
    data, held_out = train_validation_split(job.data)
    teacher = Teacher(job.model, held_out, temperature=TEMPERATURE)
    how = (data, teacher, engine, schedule)
    return NetworkTuner(job.model, job.layers, job.points, job.target, *how, strict=strict)


def tuned(job: Job, plan: QuantPlan, engine: Engine = Engine.AUTO, schedule: Schedule = QUICK) -> NetworkTuned:
    return tuner_of(job, engine, schedule).tune(plan, silent)


def held_out_loss(job: Job, plan: QuantPlan) -> float:
    """Of the file, by another road: the divergence of softened logits, or the relative squared error."""
    feed = next(iter(train_validation_split(job.data)[1].batches(1000)))
    reference, found = (run(model, feed) for model in (job.model.proto, job.write(plan)))
    kinds = find_output_kinds(job.model.proto)
    logits = [name for name, head in kinds.items() if head is OutputKind.LOGITS]
    return by_hand.loss({name: reference[name] for name in kinds}, found, logits, TEMPERATURE)
