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
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import trained_start
from trained_start import Samples

from onnxcalib.algorithms.teacher import Teacher
from onnxcalib.data import open_data, train_validation_split
from onnxcalib.model.shapes import input_specs
from onnxcalib.numerics.losses import TEMPERATURE
from onnxcalib.pipeline import stages


def measure(model: Path, samples: Samples, calibrate: int, bits: str, steps: Sequence[int]) -> None:
    """Prints a table."""
    begun = trained_start.begin(model, samples, calibrate, bits)
    job, trained = begun.job, begun.trained
    sets = (train_validation_split(job.data)[1], open_data(begun.unseen, input_specs(job.model.proto)))
    judges = [Teacher(job.model, each, job.float_loss, TEMPERATURE) for each in sets]
    before = [judge.loss_of(job.simulate(stages.final_scales(job, trained.plan))) for judge in judges]
    print(f"| {model.stem}, {bits} | {len(sets[0])} held out | in several forms | kept | {len(sets[1]):,} unseen |")
    print(f"|---|---|---|---|---|\n| start | {before[0]:.5f} | | | {before[1]:.5f} |", flush=True)
    for each in steps:
        found = stages.end_to_end_training(replace(job, recipe=replace(job.recipe, steps=each)), trained)
        alone, unseen = (judge.loss_of(job.simulate(found.plan)) for judge in judges)
        forms = f"{found.before:.5f} to {found.after:.5f} ± {found.doubt:.5f}"
        print(f"| {each} steps | {alone:.5f} | {forms} | {'yes' if found.kept else 'no'} | {unseen:.5f} |", flush=True)


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("--calibrate", type=int, default=512)
    parser.add_argument("--bits", default="w4a4")
    parser.add_argument("--steps", type=int, nargs="+", default=[50, 100])
    given = parser.parse_args()
    measure(given.model, trained_start.read(given.data, given.calibrate), given.calibrate, given.bits, given.steps)


if __name__ == "__main__":
    main()
