#!/usr/bin/env python3
"""What layers should be like when bits are assigned: rounded to nearest, to the second order, or trained one by one.

    python tools/candidate_tables.py MODEL.onnx DATA.npz --bits w4a4,w8a8 --size 0.15 --size 0.18
    python tools/candidate_tables.py MODEL.onnx DATA.npz --bits w2a4,w4a4,w8a8 --size 0.13 --calibrate 256 --steps 50

The first samples of DATA calibrate, all others judge. Each kind of candidate gets a sensitivity table of its own; what
the integer program assigns by it is then made by `light`, alike for all. A row has the softened loss on the unseen
samples, the share of predictions that are those of the float model, and how long the candidates took.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import trained_start
from trained_start import Judge, Samples

from onnxcalib import Pipeline, Recipe
from onnxcalib.errors import OnnxcalibError
from onnxcalib.pipeline import stages
from onnxcalib.pipeline.job import Job, start
from onnxcalib.pipeline.pipelines import with_equal_channels
from onnxcalib.pipeline.rounding import rounded_and_tuned
from onnxcalib.pipeline.sweep import candidates_of
from onnxcalib.plan import Candidates
from onnxcalib.recipe import parse_bits

KINDS: dict[str, Callable[[Job, Candidates], Candidates]] = {
    "nearest": lambda _, nearest: nearest,
    "second-order": stages.second_order_candidates,
    "trained": stages.parallel_training,
}


@dataclass(frozen=True)
class Study:
    """A model, and the samples that it is calibrated with and judged by."""

    model: Path
    samples: Samples
    calibrate: int

    def job(self, bits: str, size: float, steps: int) -> Job:
        """What the stages work on; the channels are equalized already."""
        recipe = Recipe(Pipeline.ADVANCED, bits=parse_bits(bits), compression=size, steps=steps)
        return with_equal_channels(start(self.model, self._part(slice(self.calibrate)), recipe).jobs[0])

    def measure(self, bits: str, sizes: Sequence[float], kinds: Sequence[str], steps: int) -> None:
        """Prints a row for each kind and size."""
        job = self.job(bits, sizes[0], steps)
        unseen = self._part(slice(self.calibrate, None))
        judge = Judge(job, unseen)
        nearest = candidates_of(job)
        count = len(next(iter(unseen.values())))
        print(f"| {self.model.stem}, {bits}, n = {count:,} | size | loss | agreement, % | bytes | s |")
        print("|---|---|---|---|---|---|")
        for kind in kinds:
            begin = time.perf_counter()
            candidates = KINDS[kind](job, nearest)
            spent = time.perf_counter() - begin
            table = stages.sensitivities(job, candidates).table
            for size in sizes:
                asked = replace(job, recipe=Recipe(Pipeline.LIGHT, bits=parse_bits(bits), compression=size))
                choices = stages.allocation(asked, candidates, table).allocation.choices
                tuned = rounded_and_tuned(asked, nearest.stitch(choices)).best
                plan = stages.final_scales(asked, tuned.plan)
                row, loss = judge(plan)
                scores = f"{loss:.5f} | {row.agreement:.2f} | {row.bytes:,}"
                print(f"| {kind} | {size:g} | {scores} | {spent:.0f} |", flush=True)

    def _part(self, part: slice) -> Samples:
        return {name: values[part] for name, values in self.samples.items()}


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("--calibrate", type=int, default=512)
    parser.add_argument("--bits", default="w4a4,w8a8")
    parser.add_argument("--size", type=float, action="append", help="Of float; 0.18 by default.")
    parser.add_argument("--kind", choices=KINDS, action="append", help="Only these.")
    parser.add_argument("--steps", type=int, default=100, help="Of a layer that is trained.")
    given = parser.parse_args()
    study = Study(given.model, trained_start.read(given.data, given.calibrate), given.calibrate)
    try:
        study.measure(given.bits, given.size or [0.18], given.kind or list(KINDS), given.steps)
    except OnnxcalibError as error:
        sys.exit(f"Error: {error}")


if __name__ == "__main__":
    main()
