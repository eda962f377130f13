"""The parts of mixed precision on their own: sensitivities, an assignment of bits, the compression-loss curve."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent.futures import Executor
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx

from onnxcalib.data import Preprocess, Transform, transformed
from onnxcalib.errors import RecipeError
from onnxcalib.executors.workers import find_workers
from onnxcalib.mixed_precision import table_files
from onnxcalib.mixed_precision.allocate import Allocation
from onnxcalib.mixed_precision.assignment import METHODS, solve
from onnxcalib.mixed_precision.curve import Point
from onnxcalib.mixed_precision.request import Request, add_cost_tables, naming_rows, offered
from onnxcalib.mixed_precision.table import SensitivityTable
from onnxcalib.pipeline import sweep
from onnxcalib.progress import Progress, silent
from onnxcalib.recipe import MixedPrecisionOptions, Pipeline, Precision, Recipe
from onnxcalib.runtime.memory import bounded
from onnxcalib.runtime.providers import using

ANY_SIZE = 2.0  # a compression that every assignment keeps, for a list of bits needs something to aim for


def sensitivity(  # noqa: PLR0913 - as many as the command has options
    model: str | Path | onnx.ModelProto,
    calibration: Any,
    recipe: Recipe | str,
    *,
    preprocess: Preprocess | None = None,
    transform: Transform | None = None,
    progress: Progress = silent,
    workers: int | None = None,
    scheduler: str | Path | None = None,
    executor: Executor | None = None,
    provider: str | None = None,
    memory: str | int | None = None,
) -> SensitivityTable:
    """Measures what each layer loses at each precision, one layer changed at a time.

    Args:
        model: The float model, as a path or in memory.
        calibration: Samples, in all forms that `quantize` takes.
        recipe: The precisions to compare, such as "w4a4,w8a8", or a recipe whose `bits` are a list.
        preprocess: How images become arrays, where the data is a folder of images.
        transform: Makes a feed of each item of the data.
        progress: Called with the stage, how much of it is done, and of how much.
        workers: Jobs that are done side by side on this machine, one a core by default.
        scheduler: The Dask scheduler whose workers do these jobs: its address, or its file.
        executor: What does these jobs instead: any `concurrent.futures.Executor`.
        provider: The execution provider of onnxruntime that runs the models, such as "cuda" or "openvino".
        memory: What to keep to as far as possible, at the price of time: bytes, or text such as "2GB".

    Returns:
        Losses and costs by layer and precision, which `allocate` takes and `write_table` writes.
    """
    data = transformed(calibration, transform)
    found, swept = find_workers(workers, scheduler, executor), _swept(recipe)
    with using(provider), bounded(memory):
        return sweep.sensitivity(model, data, swept, preprocess=preprocess, progress=progress, workers=found).table


def allocate(  # noqa: PLR0913 - as many as the command has options
    table: SensitivityTable | str | Path,
    *,
    compression: float | None = None,
    max_loss: float | None = None,
    limits: Mapping[str, float] | Iterable[str] = (),
    costs: Mapping[str, str | Path] | Iterable[str] = (),
    minimise: str | None = None,
    overrides: Mapping[str, Precision | str] | Iterable[str] = (),
    edge_bits: int | None = None,
    method: str = METHODS[0],
) -> Allocation:
    """Assigns bits from a sensitivity table; nothing is measured.

    Args:
        table: What `sensitivity` gave, or a .csv or .json file of it.
        compression: The most bytes of all constants, relative to float.
        max_loss: The most loss, by the table's estimate.
        limits: Further limits by cost, such as {"bops": 0.05}; the table's own costs are relative to float.
        costs: Your own costs by name, each a CSV file of layer,precision,cost.
        minimise: The cost to make small under the most loss; size by default.
        overrides: Precisions by pattern of layer names, such as {"*classifier*": "w8a8"}.
        edge_bits: Bits of the first and the last layer.
        method: "integer-program", or one of the greedy rules: "greedy-accuracy", "greedy-compression".

    Returns:
        The precision of each layer, the estimated loss, the costs, and whether the optimum is proven.
    """
    if method not in METHODS:
        raise RecipeError(f"'{method}' is not a choice for `method`.", f"Choose {', '.join(METHODS)}.")
    found = table if isinstance(table, SensitivityTable) else table_files.load(Path(table))
    lists: dict[str, Any] = {"limits": limits, "costs": costs, "overrides": overrides}
    recipe = Recipe(
        Pipeline.LIGHT, offered(found), edge_bits,
        compression=compression, max_loss=max_loss, minimise=minimise, **lists,
    )  # fmt: skip
    recipe = naming_rows(recipe, found)
    costed = add_cost_tables(found, recipe)
    return solve(costed, Request.of(costed, recipe), method)


def curve(  # noqa: PLR0913 - as many as the command has options
    model: str | Path | onnx.ModelProto,
    calibration: Any,
    recipe: Recipe | str,
    *,
    points: int = 10,
    measure: bool = False,
    preprocess: Preprocess | None = None,
    transform: Transform | None = None,
    progress: Progress = silent,
    workers: int | None = None,
    scheduler: str | Path | None = None,
    executor: Executor | None = None,
    provider: str | None = None,
    memory: str | int | None = None,
) -> list[Point]:
    """Traces the compression-loss curve, from the smallest file to the highest precision everywhere.

    Args:
        model: The float model, as a path or in memory.
        calibration: Samples, in all forms that `quantize` takes.
        recipe: The precisions to mix, such as "w4a4,w8a8", or a recipe whose `bits` are a list.
        points: How many sizes, at least 2.
        measure: Whether to measure every assembled model, not only to estimate its loss.
        preprocess: How images become arrays, where the data is a folder of images.
        transform: Makes a feed of each item of the data.
        progress: Called with the stage, how much of it is done, and of how much.
        workers: Jobs that are done side by side on this machine, one a core by default.
        scheduler: The Dask scheduler whose workers do these jobs: its address, or its file.
        executor: What does these jobs instead: any `concurrent.futures.Executor`.
        provider: The execution provider of onnxruntime that runs the models, such as "cuda" or "openvino".
        memory: What to keep to as far as possible, at the price of time: bytes, or text such as "2GB".

    Returns:
        For each size the assignment of the integer program and those of both greedy rules, as far as they reach it.
    """
    if points < 2:
        raise RecipeError(f"`points={points}` make no curve.", "Give 2 or more.")
    data = transformed(calibration, transform)
    found, swept = find_workers(workers, scheduler, executor), _swept(recipe)
    with using(provider), bounded(memory):
        return sweep.compression_curve(
            model, data, swept, points, measure, preprocess=preprocess, progress=progress, workers=found
        )


def read_table(path: str | Path) -> SensitivityTable:
    """Reads a sensitivity table.

    Args:
        path: A .csv or .json file that `write_table` or the command `sensitivity` wrote.
    """
    return table_files.load(Path(path))


def write_table(table: SensitivityTable, path: str | Path) -> None:
    """Writes a sensitivity table.

    Args:
        table: What `sensitivity` gave.
        path: The .csv or .json file to write.
    """
    table_files.check_output(Path(path))
    table_files.save(table, Path(path))


def _swept(recipe: Recipe | str) -> Recipe:
    """A recipe that compares precisions and aims for nothing."""
    if isinstance(recipe, str):
        if "," not in recipe:
            raise RecipeError(f"`bits={recipe!r}` leaves nothing to compare.", "Give a list such as w4a4,w8a8.")
        return Recipe("light", recipe, mixed_precision=MixedPrecisionOptions(ANY_SIZE))
    if len(recipe.bits) < 2:
        listed = ",".join(map(str, recipe.bits))
        raise RecipeError(f"`bits={listed!r}` leaves nothing to compare.", "Give `bits` a list such as w4a4,w8a8.")
    return replace(recipe, pipeline=Pipeline.LIGHT) if recipe.pipeline is Pipeline.PLAIN else recipe
