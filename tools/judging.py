#!/usr/bin/env python3
"""Whether held-out samples tell right what end-to-end training brings, beside samples that calibration did not see.

    python tools/judging.py MODEL.onnx DATA.npz --calibrate 512 --bits w4a4 --steps 25 50 100 200

The first samples of DATA calibrate, all others judge. Each row is a plan as it is written: what `advanced` trains from,
or what training of so many steps a layer makes of it, with its softened loss on the held-out samples as they are, on
these in several forms, by which `advanced` decides, and on the unseen ones.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from onnxcalib import Pipeline, Recipe
from onnxcalib.algorithms.reconstruction.layerwise import Trained
from onnxcalib.algorithms.teacher import Teacher
from onnxcalib.algorithms.validation import Validation
from onnxcalib.data import open_data, train_validation_split
from onnxcalib.model.shapes import input_specs
from onnxcalib.numerics.losses import TEMPERATURE
from onnxcalib.pipeline import stages
from onnxcalib.pipeline.job import Job, start
from onnxcalib.pipeline.pipelines import with_equal_channels
from onnxcalib.pipeline.rounding import rounded_and_tuned
from onnxcalib.plan import QuantPlan
from onnxcalib.recipe import parse_bits


class Judges:
    """The three sets of samples."""

    def __init__(self, job: Job, unseen: dict[str, np.ndarray]) -> None:
        held_out = train_validation_split(job.data)[1]
        others = open_data(unseen, input_specs(job.model.proto))
        self.job = job
        self.counts = (len(held_out), len(held_out), len(others))
        self.judges = (
            Teacher(job.model, held_out, job.float_loss, TEMPERATURE),
            Validation(job.model, held_out, job.float_loss, TEMPERATURE, job.recipe.seed),
            Teacher(job.model, others, job.float_loss, TEMPERATURE),
        )

    def row(self, label: str, plan: QuantPlan) -> str:
        """A line of the table."""
        written = self.job.simulate(plan)
        return f"| {label} | {' | '.join(f'{judge.loss_of(written):.5f}' for judge in self.judges)} |"


def measure(model: Path, samples: dict[str, np.ndarray], calibrate: int, bits: str, steps: Sequence[int]) -> None:
    """Prints a table."""
    recipe = Recipe(Pipeline.ADVANCED, bits=parse_bits(bits), edge_bits=8)
    job = with_equal_channels(start(model, {name: it[:calibrate] for name, it in samples.items()}, recipe).jobs[0])
    judges = Judges(job, {name: it[calibrate:] for name, it in samples.items()})
    found = rounded_and_tuned(job, stages.uniform_plan(job, stages.statistics(job)))
    begun = Trained(found.best.plan, found.best.plan, found.best.after, found.best.after, solved=found.is_second_order)
    held_out, _, unseen = judges.counts
    print(f"| {model.stem}, {bits} | {held_out} held out | in several forms | {unseen:,} unseen |\n|---|---|---|---|")
    print(judges.row("start", stages.final_scales(job, begun.plan)), flush=True)
    for each in steps:
        own = replace(job, recipe=replace(recipe, steps=each))
        print(judges.row(f"{each} steps", stages.end_to_end_training(own, begun).plan), flush=True)


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("--calibrate", type=int, default=512)
    parser.add_argument("--bits", default="w4a4")
    parser.add_argument("--steps", type=int, nargs="+", default=[50, 100])
    given = parser.parse_args()
    samples = {name: values for name, values in np.load(given.data).items() if name != "labels"}
    if not 0 < given.calibrate < min(map(len, samples.values())):
        sys.exit(f"Error: {given.data} has too few samples to calibrate with {given.calibrate} and judge by others.")
    measure(given.model, samples, given.calibrate, given.bits, given.steps)


if __name__ == "__main__":
    main()
