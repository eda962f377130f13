"""What `advanced` trains end to end from, beside samples that calibration did not see: for studies of training."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from onnxcalib import Pipeline, Recipe
from onnxcalib.algorithms.reconstruction.layerwise import Trained
from onnxcalib.pipeline import stages
from onnxcalib.pipeline.job import Job, start
from onnxcalib.pipeline.pipelines import with_equal_channels
from onnxcalib.pipeline.rounding import rounded_and_tuned
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


def read(data: Path, calibrate: int) -> Samples:
    """The inputs of a file, of which so many samples calibrate and some are left."""
    samples = {name: values for name, values in np.load(data).items() if name != "labels"}
    if not 0 < calibrate < min(map(len, samples.values())):
        sys.exit(f"Error: {data} has too few samples to calibrate with {calibrate} and judge by others.")
    return samples
