"""Quantized files as they lie on the disk, measured beside each other and beside their float model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from onnxcalib.data import Preprocess, open_data
from onnxcalib.errors import ModelError
from onnxcalib.job import read_prepared, silent
from onnxcalib.model.equalize import equalized_as
from onnxcalib.model.io import load
from onnxcalib.model.layers import LayerList, find_layers
from onnxcalib.model.quantized import QuantizedFile
from onnxcalib.model.shapes import input_specs
from onnxcalib.recipe import Recipe
from onnxcalib.stages.calibrate import Progress
from onnxcalib.stages.compare import Comparison, compare_layers
from onnxcalib.stages.diagnose import Diagnosis, diagnose
from onnxcalib.stages.evaluate import evaluate_files
from onnxcalib.targets import find_target


def compare(
    files: tuple[Path, Path],
    data: Any,
    model: Path | None = None,
    *,
    preprocess: Preprocess | None = None,
    progress: Progress = silent,
) -> Comparison:
    """Compares two quantized files, through their float model if it is given."""
    opened = open_data(data, input_specs(load(files[0])), preprocess)
    prepared = None if model is None else read_prepared(model, find_target(Recipe().target))
    layers = compare_layers(files, opened, prepared, progress)
    return Comparison(layers, evaluate_files(list(files), opened, model or files[0], progress))


def diagnose_file(
    file: QuantizedFile,
    model: Path,
    data: Any,
    *,
    preprocess: Preprocess | None = None,
    progress: Progress = silent,
) -> tuple[LayerList, Diagnosis]:
    """The float model's layers, and what they do in a file that was made from it."""
    prepared = equalized_as(read_prepared(model, find_target(Recipe().target)), file.proto)
    listed = find_layers(prepared)
    known = {layer.name for layer in listed.layers}
    if not any(layer.name in known for layer in file.layers):
        raise ModelError(f"{model} has none of the file's quantized layers.", "Give the model that it was made from.")
    opened = open_data(data, input_specs(prepared.proto), preprocess)
    return listed, diagnose(prepared, listed.layers, file, opened, progress)
