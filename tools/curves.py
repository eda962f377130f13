#!/usr/bin/env python3
"""Accuracy against size: both greedy rules, the integer program, light, advanced, and advanced with any bits.

    python tools/curves.py ZOO mobilenet_v2 --work FOLDER --out docs          # docs/curve_mobilenet_v2.csv and .png
    python tools/curves.py ZOO resnet50 --work FOLDER --out docs --images 128 --steps 12   # less of both
    python tools/curves.py ZOO resnet20 --work FOLDER --out docs --method light --size 0.15 --size 0.2

Layers get w4a4 or w8a8; `relaxed` also advanced, gets weights of 2 to 8 bits and activations of 4 or 8. The greedy
rules and the integer program choose from one sensitivity table, and nothing is tuned after that. Rows that lie in the
CSV file are not measured again, and what is finished of one stays in FOLDER, so that the command can be stopped.

ZOO is that of tools/benchmark.py. Needs matplotlib; for ImageNet pillow.
"""

from __future__ import annotations

import argparse
import csv
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from zoo import Case, prepare

import onnxcalib
from onnxcalib import Pipeline, Recipe, RecipeError
from onnxcalib.mixed_precision.assignment import METHODS, solve
from onnxcalib.mixed_precision.request import Request
from onnxcalib.pipeline.job import start
from onnxcalib.pipeline.pipelines import with_equal_channels
from onnxcalib.pipeline.stages import final_scales, sensitivities
from onnxcalib.pipeline.sweep import candidates_of
from onnxcalib.recipe import parse_bits

SIZES = (0.13, 0.14, 0.15, 0.17, 0.2, 0.24)
TWO = "w4a4,w8a8"
ANY = ",".join(f"w{weight}a{activation}" for weight in range(2, 9) for activation in (4, 8))
TRAINED = ("light", "advanced", "relaxed")
FLOAT = "float"


@dataclass(frozen=True)
class Point:
    """A file: how it was made, what it takes, and what it scores on so many test samples."""

    model: str
    method: str
    asked: float  # of the float size; weights and biases
    images: int
    steps: int | None  # a layer, None: the default
    n: int
    bytes: int
    of_float: float  # of the bytes of the float file
    top1: float
    agreement: float
    seconds: float

    @property
    def key(self) -> tuple[str, float, int, int | None]:
        """What it is known by."""
        return self.method, self.asked, self.images, self.steps


class Curve:
    """The points of a model, in a CSV file after each."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.points = list(_read(path)) if path.exists() else []

    def __contains__(self, key: tuple[str, float, int, int | None]) -> bool:
        return any(point.key == key for point in self.points)

    def add(self, point: Point) -> None:
        """Writes the file anew, sorted."""
        order = [FLOAT, *METHODS, *TRAINED]
        self.points = sorted([*self.points, point], key=lambda each: (order.index(each.method), each.asked))
        with self.path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, [each.name for each in fields(Point)])
            writer.writeheader()
            writer.writerows(asdict(each) for each in self.points)


def _read(path: Path) -> Iterator[Point]:
    kinds: dict[str, Callable[[str], Any]] = {"model": str, "method": str, "images": int, "n": int, "bytes": int}
    kinds["steps"] = lambda text: int(text) if text else None
    with path.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            yield Point(**{name: kinds.get(name, float)(text) for name, text in row.items()})


class Measuring:
    """Makes the files of one model, and measures them."""

    def __init__(self, case: Case, folder: Path) -> None:
        self.case, self.folder = case, folder
        self.images = len(next(iter(np.load(case.calibration).values())))
        self._table = cache(self._measured_table)

    def key(self, method: str, size: float) -> tuple[str, float, int, int | None]:
        """What the point would be known by."""
        return method, size, self.images, self.case.steps if method in TRAINED[1:] else None

    def points(self, method: str, sizes: Sequence[float]) -> Iterator[Point]:
        """The files of one method, measured together, as the float model need run only once."""
        made: dict[float, tuple[Path, float]] = {}
        for size in sizes:
            try:
                made[size] = self._made(method, size)
            except RecipeError as error:  # a rule may not reach every size
                print(f"{self.case.name:14} {method:19} at {size:.3f}: {error}", flush=True)
        rows = onnxcalib.evaluate([path for path, _ in made.values()], self.case.test, self.case.model) if made else []
        for (size, (_, seconds)), row in zip(made.items(), rows, strict=True):
            assert row.top1 is not None
            assert row.agreement is not None
            scores = (row.samples, row.bytes, row.bytes / self.case.model.stat().st_size, row.top1, row.agreement)
            yield Point(self.case.name, *self.key(method, size), *scores, seconds)

    def _made(self, method: str, size: float) -> tuple[Path, float]:
        """The file of one method and size, and how long it took; raises a RecipeError where it does not reach it."""
        begin = time.perf_counter()
        path = self.folder / f"{self.case.name}_{method}_{size}_{self.images}.onnx"
        if method == FLOAT:
            path = self.case.model
        elif method in TRAINED:
            recipe = self._recipe(method, size)
            # Points of one method share what does not depend on the size.
            onnxcalib.quantize(self.case.model, self.case.calibration, recipe, output=path, run_dir=self._run(method))
        else:
            job, candidates, table = self._table()
            recipe = Recipe(Pipeline.LIGHT, bits=parse_bits(TWO), compression=size)
            plan = candidates.stitch(solve(table, Request.of(table, recipe), method).choices)
            onnxcalib.write_model(job.write(final_scales(job, plan)), path)
        return path, time.perf_counter() - begin

    def _recipe(self, method: str, size: float) -> Recipe:
        pipeline = Pipeline.LIGHT if method == "light" else Pipeline.ADVANCED
        bits = parse_bits(ANY if method == "relaxed" else TWO)
        return Recipe(pipeline, bits=bits, compression=size, steps=self.key(method, size)[3])

    def _run(self, method: str) -> Path:
        return self.folder / f"{self.case.name}_{method}_{self.images}.run"

    def _measured_table(self) -> tuple[Any, Any, Any]:
        recipe = Recipe(Pipeline.LIGHT, bits=parse_bits(TWO), compression=1.0)
        job = with_equal_channels(start(self.case.model, self.case.calibration, recipe).jobs[0])
        candidates = candidates_of(job)
        return job, candidates, sensitivities(job, candidates).table


def fewer(case: Case, images: int, folder: Path) -> Path:
    """The first images that a model is calibrated with, in a file of their own."""
    path = folder / f"{case.name}_first_{images}.npz"
    np.savez(path, **{name: values[:images] for name, values in np.load(case.calibration).items()})
    return path


def told(point: Point) -> str:
    """A line of print."""
    return (
        f"{point.model:14} {point.method:19} at {point.asked:.3f}: {point.of_float:.3f} of the bytes, "
        f"top-1 {point.top1:.2f}, agreement {point.agreement:.2f}, n {point.n:,}, {point.seconds:.0f} s"
    )


def draw(points: Sequence[Point], path: Path) -> None:
    """Top-1 against the size that was asked for, a line a method."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axis = plt.subplots(figsize=(7.5, 4.8), layout="constrained")
    for method in dict.fromkeys(point.method for point in points):
        own = [point for point in points if point.method == method]
        if method == FLOAT:
            axis.axhline(own[0].top1, color="grey", linestyle=":", label=f"float, {own[0].top1:.2f}")
        else:
            style = "o-" if method in TRAINED else "x--"
            axis.plot([point.asked for point in own], [point.top1 for point in own], style, label=method)
    axis.set_xlabel("size of weights and biases, of float")
    axis.set_ylabel("top-1, %")
    axis.set_title(f"{points[0].model}, n = {points[0].n:,}, {points[0].images:,} calibration images")
    # Files that are of no use would press all others to the top.
    best = max(point.top1 for point in points)
    axis.set_ylim(max(best - 15, 0), best + 1)
    axis.legend(frameon=False, loc="lower right")
    figure.savefig(path, dpi=110)


def main() -> None:
    """Measures what is not there yet, and draws all."""
    methods = (*METHODS, *TRAINED)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("zoo", type=Path)
    parser.add_argument("model", choices=["mobilenet_v2", "resnet50", "resnet20"])
    parser.add_argument("--work", type=Path, required=True, help="Where files and finished stages lie.")
    parser.add_argument("--out", type=Path, required=True, help="The folder of curve_MODEL.csv and curve_MODEL.png.")
    parser.add_argument("--method", action="append", choices=methods, help="Only these.")
    parser.add_argument("--size", action="append", type=float, help=f"Of float; by default {SIZES}.")
    parser.add_argument("--steps", type=int, help="Steps of training a layer, of advanced and relaxed.")
    parser.add_argument("--images", type=int, help="How many calibrate, of the 512.")
    given = parser.parse_args()
    for folder in (given.work, given.out):
        folder.mkdir(parents=True, exist_ok=True)
    case = replace(prepare(given.zoo, given.work)[given.model], steps=given.steps)
    if given.images is not None:
        case = replace(case, calibration=fewer(case, given.images, given.work))
    measuring = Measuring(case, given.work)
    curve = Curve(given.out / f"curve_{given.model}.csv")
    for method in (FLOAT, *(given.method or methods)):
        sizes = [1.0] if method == FLOAT else given.size or SIZES
        for point in measuring.points(method, [size for size in sizes if measuring.key(method, size) not in curve]):
            curve.add(point)
            print(told(point), flush=True)
    draw(curve.points, curve.path.with_suffix(".png"))


if __name__ == "__main__":
    main()
