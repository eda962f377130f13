"""The pipelines as short lists of stages."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx

from onnxcalib.data import Dataset, Preprocess, first, open_data
from onnxcalib.errors import ModelError
from onnxcalib.model.io import check_writable, load, read_model, write_model
from onnxcalib.model.layers import Layer, LayerList, choose, find_layers
from onnxcalib.model.placement import Places, place
from onnxcalib.model.prepare import Model, prepare
from onnxcalib.model.qdq import write_qdq
from onnxcalib.model.shapes import input_specs
from onnxcalib.plan import QuantPlan
from onnxcalib.recipe import RangeMethod, Recipe
from onnxcalib.stages.calibrate import Progress, calibrate
from onnxcalib.stages.choose_ranges import SAMPLES, best_plan
from onnxcalib.stages.evaluate import Evaluation, evaluate_files
from onnxcalib.stages.fixed import fixed_precision
from onnxcalib.stages.rounding import round_to_nearest
from onnxcalib.stages.teacher import Teacher
from onnxcalib.targets import Target, find_target


@dataclass(frozen=True)
class Result:
    """A quantized model, and how it came to be."""

    model: onnx.ModelProto
    plan: QuantPlan
    layers: LayerList
    recipe: Recipe

    def save(self, path: str | Path) -> None:
        """Writes the model file, under a temporary name first."""
        write_model(self.model, path)


@dataclass(frozen=True)
class Job:
    """What every stage starts from."""

    model: Model
    listed: LayerList
    layers: tuple[Layer, ...]
    places: Places
    target: Target
    data: Dataset
    recipe: Recipe


def silent(_stage: str, _done: int, _total: int) -> None:
    """Progress that nobody watches."""


DEFAULT = Recipe()


def quantize(
    model: str | Path | onnx.ModelProto,
    calibration: Any,
    recipe: Recipe = DEFAULT,
    *,
    output: str | Path | None = None,
    preprocess: Preprocess | None = None,
    progress: Progress = silent,
) -> Result:
    """Quantizes a float model; the calibration data is a path, arrays by name, or feeds."""
    if output is not None:
        check_writable(Path(output))
    job = start(model, calibration, recipe, preprocess)
    plan = _plain(job, progress)
    result = Result(write_qdq(job.model, job.layers, plan, job.target), plan, job.listed, recipe)
    if output is not None:
        result.save(output)
    return result


def start(model: str | Path | onnx.ModelProto, calibration: Any, recipe: Recipe, preprocess: Preprocess | None) -> Job:
    """Reads the model and the data, and finds what there is to quantize."""
    target = find_target(recipe.target)
    prepared = read_prepared(model, target)
    listed = find_layers(prepared)
    if not listed.layers:
        kinds = sorted({f"{node.op} ({node.reason})" for node in listed.float_nodes})
        raise ModelError(
            f"{prepared.source} has no layer that can be quantized.",
            f"What stays float: {'; '.join(kinds)}." if kinds else "It has no Conv, Gemm or MatMul.",
        )
    layers = choose(listed, recipe.include, recipe.exclude)
    data = open_data(calibration, input_specs(prepared.proto), preprocess)
    return Job(prepared, listed, layers, place(prepared, layers, target), target, data, recipe)


def read_prepared(model: str | Path | onnx.ModelProto, target: Target) -> Model:
    """The model as stages see it."""
    source = "the given model" if isinstance(model, onnx.ModelProto) else str(model)
    return prepare(read_model(model), source, target.oldest_opset, target.newest_opset)


def _plain(job: Job, progress: Progress) -> QuantPlan:
    statistics = calibrate(job.model, job.places, job.data, progress)
    precisions = fixed_precision(job.layers, job.places, job.recipe.bits[0], job.recipe.edge_bits)

    def rounded(ranges: RangeMethod) -> QuantPlan:
        return round_to_nearest(job.model, job.layers, job.places, statistics, precisions, job.target, ranges)

    if job.recipe.ranges is not RangeMethod.AUTO:
        return rounded(job.recipe.ranges)
    teacher = Teacher(job.model, first(job.data, SAMPLES))
    return best_plan(rounded, lambda plan: teacher.loss_of(write_qdq(job.model, job.layers, plan, job.target)))


def inspect(model: str | Path | onnx.ModelProto) -> LayerList:
    """The layers of a model, and what stays float and why."""
    return find_layers(read_prepared(model, find_target(Recipe().target)))


def evaluate(
    models: list[str | Path],
    data: Any,
    reference: str | Path | None = None,
    *,
    preprocess: Preprocess | None = None,
    progress: Progress = silent,
) -> list[Evaluation]:
    """Measures model files on labelled or unlabelled data, against a float reference if there is one."""
    paths = [Path(path) for path in models]
    opened = open_data(data, input_specs(load(paths[0])), preprocess)
    return evaluate_files(paths, opened, Path(reference) if reference is not None else None, progress)
