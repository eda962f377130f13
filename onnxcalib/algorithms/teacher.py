"""The float model as the teacher: its outputs on the calibration data, and how far a quantized model is from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import onnx

from onnxcalib.data import Dataset, are_classes, place_of
from onnxcalib.errors import DataError, RecipeError
from onnxcalib.model.outputs import find_output_kinds
from onnxcalib.model.prepare import Model
from onnxcalib.numerics.losses import LossKind, ModelLoss, OutputKind, sqnr_db
from onnxcalib.numerics.metric import Drop, Metric, MetricLoss
from onnxcalib.runtime.session import Session, Tensors, samples_in

BATCH = 8  # samples; more take more memory and no less time

Loss = LossKind | Metric  # what tells a good model: a loss, or what a metric of the user's falls by


def new_loss(kinds: Mapping[str, OutputKind], kind: Loss, temperature: float = 1.0) -> ModelLoss | MetricLoss:
    """A loss that has seen no batch yet; a metric knows no temperature."""
    return MetricLoss(kind) if isinstance(kind, Metric) else ModelLoss(kinds, kind, temperature)


def check_loss(kind: Loss, kinds: Mapping[str, OutputKind], model: Model, data: Dataset) -> None:
    """A metric needs labels; cross-entropy also a distribution over them."""
    if isinstance(kind, Metric) and data.labels is None:
        raise RecipeError(f"the metric {kind.name} needs labels.", f"Add an array 'labels' to {data.source}.")
    if kind is not LossKind.CROSS_ENTROPY:
        return
    if data.labels is None or not are_classes(data.labels):
        hint = f"Add an array 'labels' to {data.source}, one class index a sample."
        raise RecipeError("`loss='cross-entropy'` needs the class of every sample.", hint)
    name = next((name for name, output_kind in kinds.items() if output_kind is not OutputKind.VALUES), None)
    if name is None:
        raise RecipeError(f"`loss='cross-entropy'` needs a classifier, and {model.source} is none.", "Use mse.")
    output = Session(model.proto, model.source).run(next(iter(data.batches(BATCH))))[name]
    if output.ndim != 2:
        raise RecipeError(
            f"`loss='cross-entropy'` needs one distribution a sample, and the output '{name}' of {model.source} has "
            f"{output.ndim} axes.",
            "Use mse.",
        )
    sample, classes = int(data.labels.argmax()), output.shape[-1]
    if data.labels[sample] >= classes:
        raise DataError(
            f"{data.source} has the label {data.labels[sample]} for sample {place_of(data, sample)}, but the output "
            f"'{name}' of {model.source} has {classes} classes.",
            "Count labels from 0, or check that they belong to this model.",
        )


@dataclass(frozen=True)
class Distance:
    """The loss of a quantized model, and the signal to noise of each of its outputs."""

    loss: float
    sqnr_db: Mapping[str, float]


class Teacher:
    """The float outputs on some data, kept for many comparisons."""

    def __init__(
        self, model: Model, data: Dataset, kind: Loss = LossKind.DISTILLATION, temperature: float = 1.0
    ) -> None:
        self.data, self.kind, self.temperature = data, kind, temperature
        self.kinds = find_output_kinds(model.proto)
        check_loss(kind, self.kinds, model, data)
        session = Session(model.proto, model.source)
        self._reference: list[Tensors] = [self._known_outputs(session.run(feed)) for feed in data.batches(BATCH)]

    def loss_of(self, model: onnx.ModelProto) -> float:
        """The loss of a quantized model."""
        return self.distance_of(model).loss

    def drop_of(self, model: onnx.ModelProto) -> Drop:
        """What the metric falls by, and how sure that is."""
        session, lost, done = Session(model, "the quantized model"), new_loss(self.kinds, self.kind), 0
        assert isinstance(lost, MetricLoss)
        assert self.data.labels is not None
        for feed, reference in zip(self.data.batches(BATCH), self._reference, strict=True):
            samples = samples_in(feed, self.data)
            lost.update(reference, self._known_outputs(session.run(feed)), self.data.labels[done : done + samples])
            done += samples
        return lost.drop

    def distance_of(self, model: onnx.ModelProto) -> Distance:
        """How far a quantized model is from the float one."""
        session, loss = Session(model, "the quantized model"), new_loss(self.kinds, self.kind, self.temperature)
        signal, noise, done = dict.fromkeys(self.kinds, 0.0), dict.fromkeys(self.kinds, 0.0), 0
        for feed, reference in zip(self.data.batches(BATCH), self._reference, strict=True):
            samples = samples_in(feed, self.data)
            labels = self.data.labels[done : done + samples] if self.data.labels is not None else None
            outputs = session.run(feed)
            loss.update(reference, outputs, labels)
            for name in self.kinds:
                exact = reference[name].astype(np.float64)
                signal[name] += float((exact**2).sum())
                noise[name] += float(((exact - outputs[name]) ** 2).sum())
            done += samples
        return Distance(loss.value, {name: sqnr_db(signal[name], noise[name]) for name in self.kinds})

    def _known_outputs(self, outputs: Tensors) -> Tensors:
        # A metric of the user's may look at any output.
        return dict(outputs) if isinstance(self.kind, Metric) else {name: outputs[name] for name in self.kinds}
