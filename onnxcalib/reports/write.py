"""Writes the report of a run: one HTML page, its numbers as JSON, its figures as SVG and PNG."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import onnx

from onnxcalib.analysis.diagnose import diagnose
from onnxcalib.analysis.evaluate import evaluate_files
from onnxcalib.analysis.histograms import layer_histograms
from onnxcalib.analysis.layer_rows import ReportData, finite, layer_rows, with_advice, worst_rows
from onnxcalib.analysis.network import blocks
from onnxcalib.data import Dataset, Preprocess, first, open_data, shuffled
from onnxcalib.errors import OutputError
from onnxcalib.files import check_outputs, check_writable, replacing
from onnxcalib.model.equalize import equalization_in_words, equalized_as
from onnxcalib.model.files import model_outputs
from onnxcalib.model.io import load, write_model
from onnxcalib.model.layers import find_layers
from onnxcalib.model.quantized import read_quantized
from onnxcalib.model.read import read_prepared
from onnxcalib.model.shapes import input_specs
from onnxcalib.pipeline.inputs import data_read, models_read, recipe_read
from onnxcalib.pipeline.result import Result
from onnxcalib.progress import Progress, silent
from onnxcalib.reports import data as collect
from onnxcalib.reports.figures import SHOWN_WORST, draw
from onnxcalib.reports.page import page
from onnxcalib.reports.plots import pyplot
from onnxcalib.targets import find_target

# Calibration samples that a report looks at: for the noise of layers, and for the whole. `explain` takes its time.
DIAGNOSED, MEASURED = 16, 64


def check_report(path: Path) -> tuple[dict[str, Path], dict[str, Path]]:
    """Fails now rather than after the run when the report cannot be drawn or written; its files, and its folder."""
    pyplot()
    if path.suffix != ".html":
        raise OutputError(f"the report {path} does not end in .html.", "Name a .html file.")
    numbers, folder = path.with_suffix(".json"), figure_folder(path)
    for each in (path, numbers):
        check_writable(each)
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise OutputError(f"{folder} is in the way of the report's figures.", "Move it, or name another report.")
    return {"the report": path, "the report's numbers": numbers}, {"the report's figures": folder}


def figure_folder(path: Path) -> Path:
    """Where the figures of a report lie."""
    return path.with_name(f"{path.stem}_figures")


def write_report(
    result: Result,
    model: str | Path | onnx.ModelProto,
    calibration: Any,
    path: str | Path,
    *,
    test: Any = None,
    preprocess: Preprocess | None = None,
    progress: Progress = silent,
) -> ReportData:
    """Writes FILE.html, FILE.json and FILE_figures/ about a result, and gives back the numbers.

    Model and calibration are what it was made from; test data, where there is some, is what it is measured on.
    """
    path = Path(path)
    files, figures = check_report(path)
    written = {} if result.output is None else model_outputs("the quantized file", result.output)
    reads = (*models_read(model), *data_read(calibration, test), *recipe_read(result.recipe))
    check_outputs(files | written, reads, figures)
    with tempfile.TemporaryDirectory() as folder:
        source = _as_file(model, Path(folder) / "model.onnx")
        output = result.output or _as_file(result.model, Path(folder) / "quantized.onnx")
        specs = input_specs(load(source))
        own = open_data(calibration, specs, preprocess)
        other = None if test is None else open_data(test, specs, preprocess)
        shown = source.name if isinstance(model, onnx.ModelProto) else str(model)
        found = _gather(result, source, output, own, other, progress)
        found["repeat"] = collect.repeat(result.recipe, source, output, own, shown)
    publish(found, path)
    return found


def publish(found: ReportData, path: Path) -> None:
    """Draws and writes a report from its numbers alone."""
    check_report(path)
    pictures = draw(found)
    folder = figure_folder(path)
    folder.mkdir(exist_ok=True)
    for picture in pictures.values():
        _write(folder / f"{picture.name}.svg", picture.svg.encode())
        _write(folder / f"{picture.name}.png", picture.png)
    _write(path.with_suffix(".json"), f"{json.dumps(finite(found), indent=1, allow_nan=False)}\n".encode())
    _write(path, page(found, pictures).encode())


def _gather(
    result: Result, model: Path, output: Path, data: Dataset, test: Dataset | None, progress: Progress
) -> ReportData:
    mixed = shuffled(data, result.recipe.seed)  # of which the first few are looked at
    measured_on = first(mixed, MEASURED) if test is None else test
    evaluations = evaluate_files([model, output], measured_on, model, progress)
    prepared = equalized_as(read_prepared(model, find_target(result.recipe.target)), result.model)
    listed, file = find_layers(prepared), read_quantized(result.model)
    diagnosis = diagnose(prepared, listed.layers, file, mixed, progress, samples=DIAGNOSED)
    rows = layer_rows(file, listed, diagnosis)
    with_advice(rows, result.recipe)
    worst = [listed[row["layer"]] for row in worst_rows(rows, SHOWN_WORST)]
    return {
        "format": collect.FORMAT,
        "asked": collect.asked(result.recipe),
        "judged_by": result.judged_by,
        "equalized": equalization_in_words(result.model),
        "outcome": collect.outcome(evaluations, measured_on.source, test is None, result.budget),
        "layers": rows,
        "network": blocks(prepared, listed),
        "loss": {"whole": diagnosis.loss, "samples": diagnosis.samples, "alone": diagnosis.alone_samples},
        "float": collect.float_rows(result),
        "constants": collect.constant_rows(result),
        **collect.mixed_precision_data(result),
        "stages": collect.stage_rows(result),
        "histograms": collect.histogram_rows(layer_histograms(prepared, worst, file, mixed)) if worst else [],
        "bytes": collect.byte_rows(output),
    }


def _as_file(model: str | Path | onnx.ModelProto, path: Path) -> Path:
    if not isinstance(model, onnx.ModelProto):
        return Path(model)
    write_model(model, path)
    return path


def _write(path: Path, content: bytes) -> None:
    with replacing(path) as temporary:
        temporary.write_bytes(content)
