#!/usr/bin/env python3
"""How many calibration images it takes: ResNet-20 at w4a4 by several methods, each with images drawn by five seeds.

    python tools/calibration_size.py ZOO --work FOLDER --out docs     # docs/calibration_size.csv, .md and .png
    python tools/calibration_size.py ZOO --work FOLDER --out docs --images 64 --method light --seeds 2
    python tools/calibration_size.py ZOO --work FOLDER --out docs --steps 50   # fewer steps of training than by default

The first and the last layer have 8 bits. `end-to-end` is end-to-end training alone, from rounding to nearest, without
batch-norm tuning and second-order rounding; `adaround` is advanced with AdaRound in place of AdaQuant. Rows that lie
in the CSV file are not measured again, so that the command can be stopped.

ZOO is that of tools/benchmark.py. Needs matplotlib and pillow.
"""

from __future__ import annotations

import argparse
import csv
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from zoo import Case, normalized, prepare

import onnxcalib
from onnxcalib import Pipeline, Recipe
from onnxcalib.algorithms.reconstruction.layerwise import Trained
from onnxcalib.pipeline import stages
from onnxcalib.pipeline.job import start
from onnxcalib.pipeline.pipelines import with_equal_channels
from onnxcalib.recipe import LayerOptimizer, parse_bits

IMAGES, SEEDS = (1, 8, 64, 512, 1000), 5
METHODS = ("plain", "light", "advanced", "adaround", "end-to-end")


@dataclass(frozen=True)
class Run:
    """A file, and what it scores on so many test images."""

    method: str
    images: int
    seed: int
    steps: int | None  # a layer, None: the default
    n: int
    top1: float
    agreement: float
    seconds: float

    @property
    def key(self) -> tuple[str, int, int, int | None]:
        """What it is known by."""
        return self.method, self.images, self.seed, self.steps


def read(path: Path) -> Iterator[Run]:
    """The rows of a CSV file."""
    with path.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            counts = {name: int(row[name]) for name in ("images", "seed", "n")}
            scores = {name: float(row[name]) for name in ("top1", "agreement", "seconds")}
            yield Run(method=row["method"], steps=int(row["steps"]) if row["steps"] else None, **counts, **scores)


def write(runs: Sequence[Run], path: Path) -> None:
    """The rows as a CSV file, and as a table beside it."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [each.name for each in fields(Run)])
        writer.writeheader()
        writer.writerows(asdict(run) for run in runs)
    path.with_suffix(".md").write_text(table(runs), encoding="utf-8")


def scores_of(runs: Sequence[Run], method: str, images: int) -> list[float]:
    """Top-1 of all seeds."""
    return [run.top1 for run in runs if (run.method, run.images) == (method, images)]


def table(runs: Sequence[Run]) -> str:
    """Mean and standard deviation of top-1 in Markdown, a column for each number of images."""
    counts = sorted({run.images for run in runs})
    lines = [["top-1", *(f"{count:,} image{'s' * (count > 1)}" for count in counts)], ["---"] * (len(counts) + 1)]
    for method in dict.fromkeys(run.method for run in runs):
        found = [scores_of(runs, method, count) for count in counts]
        cells = (f"{np.mean(it):.2f} ± {np.std(it, ddof=1) if len(it) > 1 else 0:.2f}" if it else "" for it in found)
        lines.append([method, *cells])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def draw(runs: Sequence[Run], path: Path) -> None:
    """Mean top-1 with its deviation against the number of images."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axis = plt.subplots(figsize=(7.5, 4.5), layout="constrained")
    for method in dict.fromkeys(run.method for run in runs):
        counts = sorted({run.images for run in runs if run.method == method})
        found = [scores_of(runs, method, count) for count in counts]
        spread = [np.std(each, ddof=1) if len(each) > 1 else 0.0 for each in found]
        axis.errorbar(counts, [np.mean(each) for each in found], spread, fmt="o-", capsize=3, label=method)
    axis.set_xscale("log")
    axis.set_xticks(sorted({run.images for run in runs}), [f"{it:,}" for it in sorted({run.images for run in runs})])
    axis.minorticks_off()
    axis.set_xlabel("calibration images")
    axis.set_ylabel(f"top-1, %, n = {runs[0].n:,}")
    axis.legend(frameon=False, loc="lower right")
    figure.savefig(path, dpi=110)


def recipe_of(method: str, seed: int, steps: int | None) -> Recipe:
    """What a method is asked for."""
    fixed = Recipe(bits=parse_bits("w4a4"), edge_bits=8, seed=seed)
    if method == "plain":
        return fixed
    if method == "light":
        return replace(fixed, pipeline=Pipeline.LIGHT)
    trained = replace(fixed, pipeline=Pipeline.ADVANCED, steps=steps)
    return replace(trained, layer_optimizer=LayerOptimizer.ADAROUND) if method == "adaround" else trained


def through_network(case: Case, recipe: Recipe, output: Path) -> None:
    """End-to-end training alone; kept whatever the held-out samples say, which one image has none of."""
    job: Any = with_equal_channels(start(case.model, case.calibration, recipe).jobs[0])
    plan = stages.uniform_plan(job, stages.statistics(job))
    found = stages.end_to_end_training(job, Trained(plan, plan, np.inf, np.inf))
    onnxcalib.write_model(job.write(found.plan), output)


def measured(case: Case, folder: Path, method: str, seed: int, images: int, steps: int | None) -> Run:
    """One file."""
    begin, output = time.perf_counter(), folder / f"size_{method}_{images}_{seed}.onnx"
    recipe = recipe_of(method, seed, steps)
    if method == "end-to-end":
        through_network(case, recipe, output)
    else:
        onnxcalib.quantize(case.model, case.calibration, recipe, output=output)
    seconds = time.perf_counter() - begin
    (row,) = onnxcalib.evaluate([output], case.test, case.model)
    assert row.top1 is not None
    assert row.agreement is not None
    return Run(method, images, seed, steps, row.samples, row.top1, row.agreement, seconds)


def main() -> None:
    """Measures what is not there yet, and draws all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("zoo", type=Path)
    parser.add_argument("--work", type=Path, required=True, help="Where files and drawn images lie.")
    parser.add_argument("--out", type=Path, required=True, help="The folder of calibration_size.csv, .md and .png.")
    parser.add_argument("--method", action="append", choices=METHODS, help="Only these.")
    parser.add_argument("--images", action="append", type=int, help=f"How many; by default {IMAGES}.")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--steps", type=int, help="Steps of training a layer.")
    given = parser.parse_args()
    for folder in (given.work, given.out):
        folder.mkdir(parents=True, exist_ok=True)
    case, path = prepare(given.zoo, given.work)["resnet20"], given.out / "calibration_size.csv"
    pixels = np.load(given.zoo / "cifar10_train2k.npz")["x"]
    runs = list(read(path)) if path.exists() else []
    for images in given.images or IMAGES:
        for seed in range(given.seeds):
            drawn = given.work / f"cifar_{images}_of_seed_{seed}.npz"
            np.savez(drawn, input=normalized(pixels[np.random.default_rng(seed).permutation(len(pixels))[:images]]))
            own = replace(case, calibration=drawn)
            for method in given.method or METHODS:
                steps = given.steps if method in METHODS[2:] else None
                if any(run.key == (method, images, seed, steps) for run in runs):
                    continue
                runs.append(measured(own, given.work, method, seed, images, steps))
                write(sorted(runs, key=lambda run: (METHODS.index(run.method), run.images, run.seed)), path)
                print(
                    f"{method:10} {images:5} images, seed {seed}: top-1 {runs[-1].top1:.2f}, {runs[-1].seconds:.0f} s"
                )
    runs = list(read(path))
    print(table(runs), end="")
    draw(runs, path.with_suffix(".png"))


if __name__ == "__main__":
    main()
