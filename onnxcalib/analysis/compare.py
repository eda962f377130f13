"""Two quantized files, layer by layer and as a whole."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx

from onnxcalib.analysis.captured import showing
from onnxcalib.analysis.diagnose import SAMPLES
from onnxcalib.analysis.evaluate import Evaluation, evaluate_files
from onnxcalib.data import Dataset, Preprocess, first, open_data
from onnxcalib.errors import ModelError
from onnxcalib.model.equalize import IntArray, exponents_of, factors_of
from onnxcalib.model.io import load
from onnxcalib.model.prepare import Model
from onnxcalib.model.quantized import read_quantized
from onnxcalib.model.read import read_prepared
from onnxcalib.model.shapes import input_specs
from onnxcalib.model.smoothing import factors_of as smoothing_factors
from onnxcalib.model.smoothing import smoothing_of
from onnxcalib.names import as_cell
from onnxcalib.numerics.fit import in_shape
from onnxcalib.numerics.losses import sqnr_db
from onnxcalib.numerics.quant_params import broadcast
from onnxcalib.progress import Progress, silent
from onnxcalib.recipe import Recipe
from onnxcalib.runtime.session import fitting_batch, samples_in
from onnxcalib.targets import find_target


@dataclass(frozen=True)
class LayerComparison:
    """One layer in two files; without a float model there is only the difference."""

    layer: str
    bits: tuple[str, str]
    sqnr_db: tuple[float, float] | None  # of each against the float model
    difference_db: float  # what the second gains on the first; without a float model the SQNR of one against the other


@dataclass(frozen=True)
class Comparison:
    """The layers, worst difference first, and both files as a whole."""

    layers: Sequence[LayerComparison]
    whole: Sequence[Evaluation]


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


def compare_layers(
    paths: tuple[Path, Path], data: Dataset, reference: Model | None, progress: Progress
) -> list[LayerComparison]:
    """The layers that both files have, worst difference first."""
    files = tuple(read_quantized(load(path), str(path)) for path in paths)
    nodes = [_outputs(file.proto) for file in files]
    quantized = {layer.name for file in files for layer in file.layers}
    names = [name for name in nodes[0] if name in nodes[1] and name in quantized]
    if not names:
        raise ModelError(
            f"{paths[0]} and {paths[1]} have no quantized layer of one name.", "Compare files made from one model."
        )
    data = first(data, SAMPLES)
    precisions = [{layer.name: layer.told for layer in file.layers} for file in files]
    bits = {name: (precisions[0].get(name, "float"), precisions[1].get(name, "float")) for name in names}
    if reference is None:
        found = layer_noise(files[0].proto, files[1].proto, names, data, progress)
        rows = [LayerComparison(name, bits[name], None, found[name]) for name in names]
        return sorted(rows, key=lambda row: row.difference_db)
    names = [name for name in names if name in _outputs(reference.proto)]
    if not names:
        raise ModelError(
            f"{reference.source} has none of the layers of {paths[0]}.", "Give the model it was made from."
        )
    noises = [layer_noise(reference.proto, file.proto, names, data, progress) for file in files]
    rows = []
    for name in names:
        here, there = (noise[name] for noise in noises)
        # Two layers without noise are alike, not unknown.
        change = 0.0 if here == there else there - here
        rows.append(LayerComparison(name, bits[name], (here, there), change))
    return sorted(rows, key=lambda row: -abs(row.difference_db))


def layer_noise(
    reference: onnx.ModelProto, other: onnx.ModelProto, names: Sequence[str], data: Dataset, progress: Progress
) -> dict[str, float]:
    """The SQNR of what the named nodes make, streamed over the data."""
    made = [{name: _outputs(model)[name] for name in names} for model in (reference, other)]
    sessions = [showing(model, tensors.values()) for model, tensors in zip((reference, other), made, strict=True)]
    batch = min(fitting_batch(session, data) for session in sessions)
    signal, noise = dict.fromkeys(names, 0.0), dict.fromkeys(names, 0.0)
    exponents = [exponents_of(model) for model in (reference, other)]
    smoothing = [smoothing_of(model) for model in (reference, other)]
    done = 0
    for feed in data.batches(batch):
        expected, guess = (session.run(feed) for session in sessions)
        for name in names:
            wanted, found = (
                _unscaled(tensors[outputs[name]], scaled.get(name), smooth.get(name))
                for tensors, outputs, scaled, smooth in zip((expected, guess), made, exponents, smoothing, strict=True)
            )
            signal[name] += float((wanted**2).sum())
            noise[name] += float(((wanted - in_shape(wanted.shape, found)) ** 2).sum())
        done += samples_in(feed, data)
        progress("compare", min(done, len(data)), len(data))
    return {name: sqnr_db(signal[name], noise[name]) for name in names}


def _unscaled(tensor: npt.NDArray[Any], exponents: IntArray | None, smooth: IntArray | None) -> npt.NDArray[np.float64]:
    """A layer's output without the factors of its channels, which another file may not have."""
    if smooth is not None and tensor.shape[-1:] == smooth.shape:
        return np.asarray(tensor * smoothing_factors(smooth), np.float64)
    if exponents is None or tensor.ndim < 2 or tensor.shape[1] != len(exponents):
        return tensor.astype(np.float64)
    return np.asarray(tensor / broadcast(factors_of(exponents), 1, tensor.ndim), np.float64)


def csv_rows(rows: Sequence[LayerComparison]) -> list[list[str]]:
    """A header and one row a layer; what is unknown or infinite is empty."""

    def number(value: float | None) -> str:
        return "" if value is None or math.isinf(value) else f"{value:.4f}"

    lines = [["layer", "bits_a", "bits_b", "sqnr_a_db", "sqnr_b_db", "difference_db"]]
    for row in rows:
        both = row.sqnr_db or (None, None)
        lines.append([as_cell(row.layer), *row.bits, *map(number, both), number(row.difference_db)])
    return lines


def _outputs(model: onnx.ModelProto) -> dict[str, str]:
    return {node.name: node.output[0] for node in model.graph.node if node.output}
