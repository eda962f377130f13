#!/usr/bin/env python3
"""What equalized channels bring: `light` without, with those before depthwise layers, and with all that it equalizes.

    python tools/equalizing.py MODEL.onnx DATA.npz --bits w4a4 w8a8 --seeds 2
    python tools/equalizing.py models/fashion_mobilenet.onnx models/fashion_calibration.npz --calibrate 256

The first samples of DATA calibrate, all others judge; a seed is that of the order of the first. Edges have eight bits.
A row has the softened loss on the unseen samples, the share of predictions that are those of the float model, the
bytes, and how many layers have scaled channels.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import trained_start
from trained_start import Judge, Samples

from onnxcalib import Pipeline, Recipe
from onnxcalib.algorithms.equalization import Equalization
from onnxcalib.errors import OnnxcalibError
from onnxcalib.model.equalize import Exponents, find_equalization_groups
from onnxcalib.pipeline import stages
from onnxcalib.pipeline.job import Job, start
from onnxcalib.pipeline.rounding import rounded_and_tuned
from onnxcalib.recipe import parse_bits

KINDS = ("none", "before depthwise layers", "all")


def some(job: Job, found: Exponents, kind: str) -> Exponents:
    """The exponents that a kind of equalization has of all that were found."""
    if kind == "all":
        return found
    groups = find_equalization_groups(job.model, job.layers, job.target) if kind != "none" else []
    free = {maker.name for group in groups if group.is_free for maker in group.makers}
    return {name: exponents for name, exponents in found.items() if name in free}


def measure(model: Path, samples: Samples, calibrate: int, bits: Sequence[str], seeds: int) -> None:
    """Prints a table."""
    known, unseen = ({name: values[part] for name, values in samples.items()} for part in _parts(calibrate))
    count = len(next(iter(unseen.values())))
    print(f"| {model.stem}, n = {count:,} | seed | equalized | loss | agreement, % | bytes | layers |")
    print("|---|---|---|---|---|---|---|")
    for width in bits:
        for seed in range(seeds):
            recipe = Recipe(Pipeline.LIGHT, bits=parse_bits(width), edge_bits=8, seed=seed)
            begun = start(model, known, recipe).jobs[0]
            found = stages.equalization(begun).exponents
            for kind in KINDS:
                exponents = some(begun, found, kind)
                job = stages.equalize(begun, Equalization(exponents))
                tuned = rounded_and_tuned(job, stages.uniform_plan(job, stages.statistics(job))).best
                row, loss = Judge(job, unseen)(stages.final_scales(job, tuned.plan))
                scores = f"{loss:.5f} | {row.agreement:.2f} | {row.bytes:,} | {len(exponents)}"
                print(f"| {width} | {seed} | {kind} | {scores} |", flush=True)


def _parts(calibrate: int) -> tuple[slice, slice]:
    return slice(calibrate), slice(calibrate, None)


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("--calibrate", type=int, default=512)
    parser.add_argument("--bits", nargs="+", default=["w4a4"])
    parser.add_argument("--seeds", type=int, default=1)
    given = parser.parse_args()
    samples = trained_start.read(given.data, given.calibrate)
    try:
        measure(given.model, samples, given.calibrate, given.bits, given.seeds)
    except OnnxcalibError as error:
        sys.exit(f"Error: {error}")


if __name__ == "__main__":
    main()
