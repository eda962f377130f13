"""Where a quantized model loses: the noise of every layer, and what each alone does to the float model's loss."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from onnxcalib.data import Dataset, Preprocess, first, open_data, shuffled
from onnxcalib.data.padding import positions_that_count
from onnxcalib.errors import ModelError
from onnxcalib.model.equalize import equalized_as
from onnxcalib.model.layers import Layer, LayerList, find_layers
from onnxcalib.model.outputs import find_output_kinds
from onnxcalib.model.prepare import Model
from onnxcalib.model.quantized import QuantizedFile
from onnxcalib.model.read import read_prepared
from onnxcalib.model.shapes import input_specs, typed
from onnxcalib.model.subgraph import after, upstream, with_outputs
from onnxcalib.numerics.fit import in_shape
from onnxcalib.numerics.losses import TEMPERATURE, ModelLoss, Reference, kept_of, sqnr_db
from onnxcalib.numerics.positions import Counts, counted
from onnxcalib.numerics.quant_params import Array
from onnxcalib.progress import Progress, silent
from onnxcalib.recipe import Recipe
from onnxcalib.runtime.session import Session, Tensors, fitting_batch, samples_in
from onnxcalib.targets import find_target

SAMPLES = 64


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
    model: Model, layers: Sequence[Layer], file: QuantizedFile, data: Dataset, progress: Progress
) -> Diagnosis:
    """Requires a file that was made from the model; streams over a few samples, both models side by side."""
    teacher, data = typed(model.proto), first(data, SAMPLES)
    pairs, kinds = Pairs(teacher, file.proto, layers), find_output_kinds(teacher)
    known = {layer.name for layer in file.layers}
    probes = [
        _Probe(teacher, file.proto, layer, pairs, ModelLoss(kinds, temperature=TEMPERATURE))
        for layer in layers
        if layer.name in known and layer.summed in pairs.quantized_of
    ]
    wanted = [name for probe in probes for name in (*probe.reads.values(), probe.reference, *probe.fed)]
    sessions = showing(teacher, wanted), showing(file.proto, [probe.output for probe in probes])
    batch = min(fitting_batch(session, data) for session in sessions)
    loss, done = ModelLoss(kinds, temperature=TEMPERATURE), 0
    for feed in data.batches(batch):
        floats, quantized = ({**feed, **session.run(feed)} for session in sessions)
        counts = positions_that_count(feed)
        kept = kept_of(floats, loss.kinds, counts)
        loss.update(kept, quantized, counts=counts)
        for probe in probes:
            probe.update(floats, quantized, kept, counts)
        done += samples_in(feed, data)
        progress("diagnose", min(done, len(data)), len(data))
    return Diagnosis(done, loss.value, tuple(probe.diagnosis() for probe in probes))


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

    def __init__(
        self, model: onnx.ModelProto, file: onnx.ModelProto, layer: Layer, pairs: Pairs, loss: ModelLoss
    ) -> None:
        self.name, self.reference = layer.name, layer.summed
        self.output = pairs.quantized_of[layer.summed]
        # What lies between a MatMul and its bias is inside the layer.
        outside = set(pairs.float_of) - {pairs.quantized_of.get(layer.output)}
        part, reads = upstream(file, [self.output], outside)
        self.alone, self.reads = Session(part, pool=False), {name: pairs.float_of[name] for name in reads}
        self.columns = pairs.columns
        rest, self.fed = after(model, layer.summed)
        self.rest = Session(rest, pool=False) if rest is not None else None
        self.loss = loss
        self.signal = self.noise = self.own = 0.0

    def update(self, floats: Tensors, quantized: Tensors, kept: Reference, counts: Counts | None) -> None:
        alone = self.alone.run({name: self._as_read(name, floats[twin]) for name, twin in self.reads.items()})
        made = {self.reference: self._as_made(alone[self.output], floats)}
        reference = counted(floats[self.reference], counts).astype(np.float64)
        self.signal += float((reference**2).sum())
        met = in_shape(reference.shape, counted(self._as_made(quantized[self.output], floats), counts))
        self.noise += float(((reference - met) ** 2).sum())
        self.own += float(((reference - counted(made[self.reference], counts)) ** 2).sum())
        if self.rest is not None:
            made |= self.rest.run({**made, **{name: floats[name] for name in self.fed}})
        # Outputs that do not depend on the layer are the float model's own.
        self.loss.update(kept, floats | made, counts=counts)

    def _as_read(self, name: str, value: Array) -> Array:
        return value.reshape(-1, self.columns[name]) if name in self.columns else value

    def _as_made(self, value: Array, floats: Tensors) -> Array:
        return value.reshape(floats[self.reference].shape) if self.output in self.columns else value

    def diagnosis(self) -> LayerDiagnosis:
        alone, together = (sqnr_db(self.signal, noise) for noise in (self.own, self.noise))
        return LayerDiagnosis(self.name, together, alone, self.loss.value)


def showing(model: onnx.ModelProto, names: Collection[str]) -> Session:
    """The model with inner tensors among its outputs."""
    inputs = {value.name for value in model.graph.input}
    outputs = [value.name for value in model.graph.output]
    shown = [name for name in dict.fromkeys(names) if name not in inputs and name not in outputs]
    return Session(with_outputs(model, [*outputs, *shown]))
