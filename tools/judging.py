#!/usr/bin/env python3
"""Whether held-out samples tell right what end-to-end training brings, beside samples that calibration did not see.

    python tools/judging.py MODEL.onnx DATA.npz --calibrate 512 --bits w4a4 --steps 25 50 100 200

The first samples of DATA calibrate, all others judge. Each row is what training of so many steps a layer makes of a
plan: its softened loss beside that of the plan that `advanced` trains from, on the held-out samples as they
are, on these in several forms with two standard errors of the difference, whether `advanced` keeps it, and on the
unseen samples.
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
from onnxcalib.data import open_data, train_validation_split
from onnxcalib.model.shapes import input_specs
from onnxcalib.numerics.losses import TEMPERATURE
from onnxcalib.pipeline import stages
from onnxcalib.pipeline.job import start
from onnxcalib.pipeline.pipelines import with_equal_channels
from onnxcalib.pipeline.rounding import rounded_and_tuned
from onnxcalib.recipe import parse_bits


def measure(model: Path, samples: dict[str, np.ndarray], calibrate: int, bits: str, steps: Sequence[int]) -> None:
    """Prints a table."""
    recipe = Recipe(Pipeline.ADVANCED, bits=parse_bits(bits), edge_bits=8)
    job = with_equal_channels(start(model, {name: it[:calibrate] for name, it in samples.items()}, recipe).jobs[0])
    others = {name: it[calibrate:] for name, it in samples.items()}
    sets = (train_validation_split(job.data)[1], open_data(others, input_specs(job.model.proto)))
    judges = [Teacher(job.model, each, job.float_loss, TEMPERATURE) for each in sets]
    found = rounded_and_tuned(job, stages.uniform_plan(job, stages.statistics(job)))
    begun = Trained(found.best.plan, found.best.plan, found.best.after, found.best.after, solved=found.is_second_order)
    before = [judge.loss_of(job.simulate(stages.final_scales(job, begun.plan))) for judge in judges]
    print(f"| {model.stem}, {bits} | {len(sets[0])} held out | in several forms | kept | {len(sets[1]):,} unseen |")
    print(f"|---|---|---|---|---|\n| start | {before[0]:.5f} | | | {before[1]:.5f} |", flush=True)
    for each in steps:
        own = replace(job, recipe=replace(recipe, steps=each))
        trained = stages.end_to_end_training(own, begun)
        alone, unseen = (judge.loss_of(job.simulate(trained.plan)) for judge in judges)
        forms = f"{trained.before:.5f} to {trained.after:.5f} ± {trained.doubt:.5f}"
        print(
            f"| {each} steps | {alone:.5f} | {forms} | {'yes' if trained.kept else 'no'} | {unseen:.5f} |", flush=True
        )


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
