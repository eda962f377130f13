"""Where a quantized model loses: the noise of every layer, and what each alone does to the float model's loss."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from onnxcalib.analysis.captured import Both, Captured
from onnxcalib.data import Dataset, Preprocess, first, open_data, shuffled
from onnxcalib.errors import ModelError
from onnxcalib.model.equalize import equalized_as
from onnxcalib.model.layers import Layer, LayerList, find_layers
from onnxcalib.model.outputs import find_output_kinds
from onnxcalib.model.prepare import Model
from onnxcalib.model.quantized import QuantizedFile
from onnxcalib.model.read import read_prepared
from onnxcalib.model.shapes import input_specs, typed
from onnxcalib.model.subgraph import Cutter
from onnxcalib.numerics.fit import in_shape
from onnxcalib.numerics.losses import TEMPERATURE, ModelLoss, sqnr_db
from onnxcalib.numerics.positions import counted
from onnxcalib.numerics.quant_params import Array
from onnxcalib.progress import Progress, silent
from onnxcalib.recipe import Recipe
from onnxcalib.runtime.session import Session, Tensors
from onnxcalib.runtime.threads import ahead, default_workers
from onnxcalib.targets import find_target

SAMPLES = 64
MANY_LAYERS, LEAST_SAMPLES = 64, 8  # what follows a layer is run on all samples with so many layers, and on so many
DISK_BYTES = 4 * 2**30  # of captured tensors at a time


@dataclass(frozen=True)
class LayerDiagnosis:
    """One layer of a quantized model, after its bias and before its activation."""

    layer: str
    sqnr_db: float  # against the float model, with all the noise that comes from before
    alone_db: float  # its own noise: the layer fed with the float model's input
    alone_loss: float  # of the float model with this layer alone as it is in the file


@dataclass(frozen=True)
class Diagnosis:
    """All layers that could be followed from the float model into the file, and the softened loss of the whole."""

    samples: int
    loss: float
    layers: tuple[LayerDiagnosis, ...]
    alone_samples: int  # of the losses of single layers


def diagnose_file(
    file: QuantizedFile,
    model: str | Path | onnx.ModelProto,
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
        raise ModelError(
            f"{prepared.source} has none of the file's quantized layers.", "Give the model that it was made from."
        )
    opened = shuffled(open_data(data, input_specs(prepared.proto), preprocess), Recipe().seed)
    return listed, diagnose(prepared, listed.layers, file, opened, progress)


def diagnose(
    model: Model,
    layers: Sequence[Layer],
    file: QuantizedFile,
    data: Dataset,
    progress: Progress,
    disk_bytes: int = DISK_BYTES,
    samples: int = SAMPLES,
) -> Diagnosis:
    """Requires a file that was made from the model; both run once on a few samples, then layer after layer.

    What layers read lies on disk meanwhile, and what comes after one is open for as long as it is looked at.
    """
    teacher, data = typed(model.proto), first(data, samples)
    pairs, kinds = Pairs(teacher, file.proto, layers), find_output_kinds(teacher)
    cutters, known = (Cutter(teacher), Cutter(file.proto)), {layer.name for layer in file.layers}
    probes = [
        _Probe(*cutters, layer, pairs, ModelLoss(kinds, temperature=TEMPERATURE))
        for layer in layers
        if layer.name in known and layer.summed in pairs.quantized_of
    ]
    both = Both(teacher, file.proto, data, ModelLoss(kinds, temperature=TEMPERATURE))
    sizes = both.measure([name for probe in probes for name in probe.floats], [probe.output for probe in probes])
    # What follows a layer runs once for each: on fewer samples where there are many, so that all of it stays linear.
    most = max(samples * MANY_LAYERS // max(len(probes), 1), LEAST_SAMPLES)
    found = list[LayerDiagnosis]()
    for chunk in _chunks(probes, *sizes, disk_bytes / max(len(data), 1)):
        with tempfile.TemporaryDirectory(prefix="onnxcalib_") as folder:
            names = dict.fromkeys(name for probe in chunk for name in probe.floats)
            captured = both.capture(names, [probe.output for probe in chunk], Path(folder))
            # As many layers at a time as there are cores: to open what follows one takes as long as to run it.
            for each in ahead(partial(_Probe.diagnosis, captured=captured, most=most), chunk, default_workers()):
                found.append(each)
                progress("diagnose", len(found), len(probes))
    return Diagnosis(both.samples, both.loss.value, tuple(found), min(most, both.samples))


def _chunks(
    probes: Sequence[_Probe], floats: Mapping[str, int], quantized: Mapping[str, int], most: float
) -> Iterator[list[_Probe]]:
    """Layers in order whose tensors fit on disk together; one chunk at least, for the loss of the whole."""
    chunk, held, taken = list[_Probe](), set[str](), 0
    for probe in probes:
        wider = held | set(probe.floats)
        taken += quantized.get(probe.output, 0)
        if chunk and taken + sum(floats.get(name, 0) for name in wider) > most:
            yield chunk
            chunk, wider, taken = [], set(probe.floats), quantized.get(probe.output, 0)
        chunk.append(probe)
        held = wider
    yield chunk


class Pairs:
    """Which tensor of the file is which of the float model: nodes keep their names."""

    def __init__(self, model: onnx.ModelProto, quantized: onnx.ModelProto, layers: Sequence[Layer] = ()) -> None:
        nodes = {node.name: node for node in model.graph.node}
        biased = {layer.name: layer for layer in layers if layer.bias_node is not None}
        self.float_of = {value.name: value.name for value in quantized.graph.input}
        self.columns: dict[str, int] = {}  # of tensors that are matrices in the file
        for node in quantized.graph.node:
            twin = nodes.get(node.name)
            if twin is not None and twin.op_type == node.op_type:
                self.float_of |= dict(zip(node.output, twin.output, strict=False))
            elif twin is not None and node.op_type == "Gemm" and node.name in biased:
                layer = biased[node.name]
                self.float_of[node.output[0]], self.columns[node.output[0]] = layer.summed, layer.channels
        self.quantized_of = {name: twin for twin, name in self.float_of.items()}


class _Probe:
    """One layer as it is in the file, fed by the float model, and what of the float model comes after it."""

    def __init__(self, model: Cutter, file: Cutter, layer: Layer, pairs: Pairs, loss: ModelLoss) -> None:
        self.name, self.reference = layer.name, layer.summed
        self.output = pairs.quantized_of[layer.summed]
        # What lies between a MatMul and its bias is inside the layer.
        self._model, self._file = model, file
        self._outside = set(pairs.float_of) - {pairs.quantized_of.get(layer.output)}
        self.reads = {name: pairs.float_of[name] for name in file.upstream([self.output], self._outside)[1]}
        self.columns, self.fed, self.loss = pairs.columns, model.fed_after(layer.summed), loss

    @property
    def floats(self) -> list[str]:
        """The tensors of the float model that are looked at."""
        return [*self.reads.values(), self.reference, *self.fed]

    def diagnosis(self, captured: Captured, most: int) -> LayerDiagnosis:
        """The layer on all samples, and what comes after it on so many of them."""
        alone = Session(self._file.upstream([self.output], self._outside)[0], threads=1)
        rest, _ = self._model.after(self.reference)
        following = Session(rest, threads=1) if rest is not None else None
        signal = noise = own = 0.0
        done = 0
        for floats, quantized, kept, counts, samples in captured.batches(self.floats, [self.output]):
            fed = {name: self._as_read(name, floats[twin]) for name, twin in self.reads.items()}
            made = {self.reference: self._as_made(alone.run(fed)[self.output], floats)}
            reference = counted(floats[self.reference], counts).astype(np.float64)
            signal += float((reference**2).sum())
            met = in_shape(reference.shape, counted(self._as_made(quantized[self.output], floats), counts))
            noise += float(((reference - met) ** 2).sum())
            own += float(((reference - counted(made[self.reference], counts)) ** 2).sum())
            if done < most:
                if following is not None:
                    made |= following.run({**made, **{name: floats[name] for name in self.fed}})
                # Outputs that do not depend on the layer are the float model's own.
                self.loss.update(kept, floats | made, counts=counts)
            done += samples
        return LayerDiagnosis(self.name, sqnr_db(signal, noise), sqnr_db(signal, own), self.loss.value)

    def _as_read(self, name: str, value: Array) -> Array:
        return value.reshape(-1, self.columns[name]) if name in self.columns else value

    def _as_made(self, value: Array, floats: Tensors) -> Array:
        return value.reshape(floats[self.reference].shape) if self.output in self.columns else value
