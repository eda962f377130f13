"""What `advanced` trains end to end from, beside samples that calibration did not see: for studies of training."""

from __future__ import annotations

import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import onnxcalib
from onnxcalib import Pipeline, Recipe
from onnxcalib.algorithms.reconstruction.layerwise import Trained
from onnxcalib.algorithms.teacher import Teacher
from onnxcalib.analysis.evaluate import Evaluation
from onnxcalib.data import open_data
from onnxcalib.model.shapes import input_specs
from onnxcalib.numerics.losses import TEMPERATURE
from onnxcalib.pipeline import stages
from onnxcalib.pipeline.job import Job, start
from onnxcalib.pipeline.pipelines import with_equal_channels
from onnxcalib.pipeline.rounding import rounded_and_tuned
from onnxcalib.plan import QuantPlan
from onnxcalib.recipe import parse_bits

Samples = dict[str, np.ndarray[Any, Any]]


@dataclass(frozen=True)
class Begun:
    """A model at fixed bits, edges at eight, where training through the network begins."""

    job: Job
    trained: Trained
    unseen: Samples


def begin(model: Path, samples: Samples, calibrate: int, bits: str) -> Begun:
    """Calibrates with the first samples; all others are left to judge by."""
    recipe = Recipe(Pipeline.ADVANCED, bits=parse_bits(bits), edge_bits=8)
    job = with_equal_channels(start(model, {name: it[:calibrate] for name, it in samples.items()}, recipe).jobs[0])
    found = rounded_and_tuned(job, stages.uniform_plan(job, stages.statistics(job)))
    tuned = found.best
    trained = Trained(tuned.plan, tuned.plan, tuned.after, tuned.after, solved=found.is_second_order)
    return Begun(job, trained, {name: it[calibrate:] for name, it in samples.items()})


class Judge:
    """The samples of a network that calibration did not see."""

    def __init__(self, job: Job, unseen: Samples) -> None:
        self.job, self.unseen = job, unseen
        data = open_data(unseen, input_specs(job.model.proto))
        self.teacher = Teacher(job.model, data, job.float_loss, TEMPERATURE)

    def __call__(self, plan: QuantPlan) -> tuple[Evaluation, float]:
        """What the written file scores, and its softened loss."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "written.onnx"
            onnxcalib.write_model(self.job.write(plan), path)
            (row,) = onnxcalib.evaluate([path], self.unseen, self.job.model.proto)
        return row, self.teacher.loss_of(self.job.simulate(plan))


def read(data: Path, calibrate: int) -> Samples:
    """The inputs of a file, of which so many samples calibrate and some are left."""
    samples = {name: values for name, values in np.load(data).items() if name != "labels"}
    if not 0 < calibrate < min(map(len, samples.values())):
        sys.exit(f"Error: {data} has too few samples to calibrate with {calibrate} and judge by others.")
    return samples
