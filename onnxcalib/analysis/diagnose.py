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

from onnxcalib.analysis.captured import Captured, Outputs, Seen, Twin, Twins, Watched
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
from onnxcalib.numerics.losses import TEMPERATURE, ModelLoss, kept_of, sqnr_db
from onnxcalib.numerics.output_kind import Kinds
from onnxcalib.numerics.positions import counted
from onnxcalib.numerics.quant_params import Array
from onnxcalib.progress import Progress, silent
from onnxcalib.recipe import Recipe
from onnxcalib.runtime.following import Following
from onnxcalib.runtime.threads import ahead, default_workers
from onnxcalib.targets import find_target

SAMPLES = 64
MANY_LAYERS, LEAST_SAMPLES = 32, 8  # what follows a layer is run on all samples with so many layers, and on so many
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
    """Requires a file that was made from the model; both run once on a few samples, then what follows each layer.

    What it is fed lies on disk meanwhile, and what comes after a layer is open for as long as it is looked at.
    """
    teacher, data = typed(model.proto), first(data, samples)
    kinds, cutters = find_output_kinds(teacher), (Cutter(teacher), Cutter(file.proto))
    pairs, known = Pairs(teacher, file.proto, layers), {layer.name for layer in file.layers}
    judged = [layer for layer in layers if layer.name in known and layer.summed in pairs.quantized_of]
    following = Following(cutters[0], [layer.summed for layer in judged])
    probes = [
        _Probe(cutters[1], layer, following.fed(layer.summed), pairs, ModelLoss(kinds, temperature=TEMPERATURE))
        for layer in judged
    ]
    # What follows a layer runs once for each: on fewer samples where there are many, so that all of it stays linear.
    most = min(max(samples * MANY_LAYERS // max(len(probes), 1), LEAST_SAMPLES), len(data))
    watched = _watched(probes, *cutters)
    sizes, size = watched.measure(data, pairs.twins)
    whole, found = _Whole(kinds, [value.name for value in teacher.graph.output], most), list[LayerDiagnosis]()
    for chunk in _chunks(probes, sizes, disk_bytes / max(most, 1)):
        if len(chunk) < len(probes):
            watched = _watched(chunk, *cutters)
        with tempfile.TemporaryDirectory(prefix="onnxcalib_") as folder:
            captured = whole.capture(watched, chunk, data, size, pairs.twins, Path(folder))
            watched.close()  # its memory is free for what follows layers
            # As many layers at a time as there are cores: to open what follows one takes as long as to run it.
            look = partial(_Probe.diagnosis, captured=captured, following=following)
            for each in ahead(look, chunk, default_workers()):
                found.append(each)
                progress("diagnose", len(found), len(probes))
    return Diagnosis(whole.samples, whole.loss.value, tuple(found), min(most, whole.samples))


class _Whole:
    """The loss of the file, which is gathered with the first tensors that are captured."""

    def __init__(self, kinds: Kinds, outputs: Sequence[str], most: int) -> None:
        self.kinds, self.outputs, self.most = kinds, outputs, most
        self.loss, self.samples = ModelLoss(kinds, temperature=TEMPERATURE), 0

    def capture(
        self, watched: Watched, probes: Sequence[_Probe], data: Dataset, size: int, reads: Twins, folder: Path
    ) -> Captured:
        """Runs both models once: adds up the noise of layers, and keeps what is fed to what follows them."""
        fed = dict.fromkeys(name for probe in probes for name in probe.fed)
        found = Captured.within(folder, [probe.reference for probe in probes], fed)
        is_first, seen = not self.samples, 0

        def take(batch: Seen) -> None:
            nonlocal seen
            outputs = {name: batch.floats[name] for name in self.outputs}
            kept = kept_of(outputs, self.kinds, batch.counts)
            if is_first:
                self.loss.update(kept, batch.quantized, counts=batch.counts)
                self.samples += batch.samples
            made = {probe.reference: probe.compare(batch) for probe in probes}
            if seen < self.most:
                found.append(made, batch, Outputs(outputs, kept, batch.counts))
            seen += batch.samples

        watched.run(data, size, reads, take)
        return found


def _watched(probes: Sequence[_Probe], model: Cutter, file: Cutter) -> Watched:
    floats = [name for probe in probes for name in (*probe.reads, probe.reference, *probe.fed)]
    return Watched(model.model, floats, file, {probe.output: probe.part for probe in probes})


def _chunks(probes: Sequence[_Probe], sizes: Mapping[str, int], most: float) -> Iterator[list[_Probe]]:
    """Layers in order whose tensors fit on disk together; one chunk at least, for the loss of the whole."""
    chunk, held, taken = list[_Probe](), set[str](), 0
    for probe in probes:
        more = sizes.get(probe.reference, 0) + sum(sizes.get(name, 0) for name in probe.fed if name not in held)
        if chunk and taken + more > most:
            yield chunk
            chunk, held, taken = [], set(), 0
        chunk.append(probe)
        held.update(probe.fed)
        taken += more
    yield chunk


class Pairs:
    """Which tensor of the file is which of the float model: nodes keep their names."""

    def __init__(self, model: onnx.ModelProto, quantized: onnx.ModelProto, layers: Sequence[Layer] = ()) -> None:
        nodes = {node.name: node for node in model.graph.node}
        biased = {layer.name: layer for layer in layers if layer.bias_node is not None}
        self.float_of = {value.name: value.name for value in quantized.graph.input}
        columns: dict[str, int] = {}  # of tensors that are matrices in the file
        for node in quantized.graph.node:
            twin = nodes.get(node.name)
            if twin is not None and twin.op_type == node.op_type:
                self.float_of |= dict(zip(node.output, twin.output, strict=False))
            elif twin is not None and node.op_type == "Gemm" and node.name in biased:
                layer = biased[node.name]
                self.float_of[node.output[0]], columns[node.output[0]] = layer.summed, layer.channels
        self.quantized_of = {name: twin for twin, name in self.float_of.items()}
        self.twins = {name: Twin(twin, columns.get(name)) for name, twin in self.float_of.items()}


class _Probe:
    """One layer as it is in the file, fed by the float model, and what of the float model comes after it."""

    def __init__(self, file: Cutter, layer: Layer, fed: Sequence[str], pairs: Pairs, loss: ModelLoss) -> None:
        self.name, self.reference = layer.name, layer.summed
        self.output = pairs.quantized_of[layer.summed]
        # What lies between a MatMul and its bias is inside the layer.
        inner = [pairs.quantized_of[layer.output]] if layer.output in pairs.quantized_of else []
        self.part = file.part([self.output], pairs.twins, inner)
        self.reads = [pairs.twins[name].tensor for name in self.part.fed]
        self.fed, self.loss = fed, loss
        self._signal = self._noise = self._own = 0.0

    def compare(self, seen: Seen) -> Array:
        """Adds a batch's noise up, and gives what the layer makes of the float model's tensors."""
        exact = seen.floats[self.reference]
        met, made = (each[self.output] for each in (seen.quantized, seen.alone))
        if made.ndim != exact.ndim:  # a matrix in the file alone
            met, made = met.reshape(exact.shape), made.reshape(exact.shape)
        rows = counted(exact, seen.counts)
        self._signal += _energy(rows)
        self._noise += _energy(rows - in_shape(rows.shape, counted(met, seen.counts)))
        self._own += _energy(rows - counted(made, seen.counts))
        return made

    def diagnosis(self, captured: Captured, following: Following) -> LayerDiagnosis:
        """What the layer costs, by what comes after it."""
        run = following.open(self.reference)
        for tensors, (outputs, kept, counts) in captured.batches(self.reference, self.fed):
            made = {self.reference: tensors[self.reference], **run(tensors)}
            # Outputs that do not depend on the layer are the float model's own.
            self.loss.update(kept, outputs | made, counts=counts)
        met, alone = (sqnr_db(self._signal, each) for each in (self._noise, self._own))
        return LayerDiagnosis(self.name, met, alone, self.loss.value)


def _energy(values: Array) -> float:
    return float(np.einsum("i,i->", values.ravel(), values.ravel(), dtype=np.float64))
