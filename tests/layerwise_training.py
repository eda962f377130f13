"""Jobs, and training of single layers, for tests of both flavours."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import pytest
from jobs import correlated_data, job_on

from onnxcalib.algorithms.reconstruction import layerwise as stage
from onnxcalib.algorithms.reconstruction.adaquant import STANDARD, LayerProblem, Optimised
from onnxcalib.algorithms.reconstruction.layerwise import Layerwise, Trainer
from onnxcalib.executors.workers import Workers
from onnxcalib.model import layer_loss as part
from onnxcalib.pipeline.job import Job
from onnxcalib.progress import silent
from onnxcalib.recipe import Engine, LayerOptimizer, Pipeline

SAMPLES = 24
RATES = dict.fromkeys((part.WEIGHT_RANGE, part.WEIGHT_LOW, part.INPUT_RANGE, part.INPUT_LOW, part.BIAS), 1e-2)
QUICK = replace(STANDARD, steps=10, rates={**RATES, part.WEIGHT: 0.1, part.ROUNDING: 0.3})


def job_for(model: onnx.ModelProto, bits: str = "w3a4", target: str = "ort", samples: int = SAMPLES) -> Job:
    data, compression = correlated_data(model, samples), 0.5 if "," in bits else None
    return job_on(model, data, bits, target, pipeline=Pipeline.ADVANCED, compression=compression)


def layerwise_of(job: Job, workers: int = 1, **changes: Any) -> Layerwise:
    how = {"schedule": QUICK, "engine": Engine.AUTO, "optimizer": LayerOptimizer.ADAQUANT, "seed": 0}
    own = {name: changes.pop(name) for name in (*how, "strict") if name in changes}
    trainer = Trainer(job.model, job.layers, job.points, job.target, job.data, **{**how, **own})
    return Layerwise(trainer, Workers(workers), **{"progress": silent, **changes})


class Seen:
    """Takes the place of training: keeps what every layer is given, and answers as it is told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, answer: Callable[[LayerProblem], Optimised] | None = None):
        self.problems: dict[tuple[str, int], LayerProblem] = {}
        self.inputs: dict[tuple[str, int], np.ndarray] = {}
        self.targets: dict[tuple[str, int], np.ndarray] = {}
        self.answer = answer or (lambda problem: Optimised(problem.start, 1.0, 1.0))
        monkeypatch.setattr(stage, "optimise", self)

    def __call__(self, problem: LayerProblem, inputs: Any, targets: Any, *_rest: Any) -> Optimised:
        bits = 8 if problem.input_scheme is None else problem.input_scheme.bits
        key = (problem.layer.name, bits)
        self.problems[key] = problem
        self.inputs[key], self.targets[key] = (held.read(range(held.samples)) for held in (inputs, targets))
        return self.answer(problem)
