"""Jobs, plans and tuners for tests of batch-norm tuning."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from jobs import job_on

from models import feed_for
from onnxcalib.algorithms.batchnorm import ChannelStatistics, Tuner
from onnxcalib.algorithms.teacher import Teacher
from onnxcalib.pipeline.job import Job
from onnxcalib.recipe import BatchNormReference

SAMPLES = 32


def job_for(model: onnx.ModelProto, bits: str = "w4a8", target: str = "ort", samples: int = SAMPLES) -> Job:
    return job_on(model, feed_for(model, samples), bits, target)


def tuner_of(job: Job, reference: BatchNormReference = BatchNormReference.FLOAT, **changes: Any) -> Tuner:
    teacher = Teacher(job.model, job.data)
    return Tuner(job.model, job.layers, job.target, job.data, teacher, reference, **{"batch": SAMPLES, **changes})


def stats(mean: np.ndarray, variance: np.ndarray) -> ChannelStatistics:
    return ChannelStatistics(np.asarray(mean, np.float64), np.asarray(variance, np.float64))


class Judge:
    """A teacher that gives the losses it was told, then the last of them for ever, and keeps what it was shown."""

    def __init__(self, *losses: float, kinds: Any = None) -> None:
        self.losses, self.kinds_that_count = list(losses), kinds
        self.shown: list[onnx.ModelProto] = []

    def loss_of(self, model: onnx.ModelProto) -> float:
        self.shown.append(model)
        return self.losses.pop(0) if len(self.losses) > 1 else self.losses[0]
