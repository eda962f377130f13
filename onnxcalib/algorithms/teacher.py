"""The float model as the teacher: its outputs on the calibration data, and how far a quantized model is from them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx

from onnxcalib.data import Dataset, Feed, are_classes, place_of
from onnxcalib.data.padding import positions_that_count
from onnxcalib.errors import DataError, RecipeError
from onnxcalib.model.outputs import find_output_kinds
from onnxcalib.model.prepare import Model
from onnxcalib.numerics.fit import in_shape
from onnxcalib.numerics.losses import ModelLoss, Reference, kept_of, sqnr_db
from onnxcalib.numerics.metric import Drop, Metric, MetricLoss, Taken
from onnxcalib.numerics.output_kind import LossKind, OutputKind, kinds_that_count
from onnxcalib.numerics.positions import Counts, counted
from onnxcalib.numerics.quant_params import Array
from onnxcalib.numerics.top_tokens import TopTokens, as_logits
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
    name = next((name for name, output_kind in kinds.items() if output_kind.is_distribution), None)
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
    """The loss of a quantized model, and the power of each of its outputs and of their noise."""

    loss: float
    signal: Mapping[str, float]
    noise: Mapping[str, float]

    @property
    def sqnr_db(self) -> dict[str, float]:
        """The signal to noise of each output."""
        return {name: sqnr_db(power, self.noise[name]) for name, power in self.signal.items()}


class Teacher:
    """The float outputs on some data, kept for many comparisons; of the logits of tokens the likeliest are kept.

    Padding does not count.
    """

    def __init__(
        self,
        model: Model,
        data: Dataset,
        kind: Loss = LossKind.DISTILLATION,
        temperature: float = 1.0,
        threads: int = 0,
    ) -> None:
        self.data, self.kind, self.temperature, self.threads = data, kind, temperature, threads
        self.kinds = find_output_kinds(model.proto)
        check_loss(kind, self.kinds, model, data)
        session = Session(model.proto, model.source, threads=threads)
        self._reference = [self._kept(session.run(feed), feed, labels) for feed, labels in _labelled(data)]

    @property
    def kinds_that_count(self) -> dict[str, OutputKind]:
        """The outputs that the loss looks at, and what it takes them for."""
        return kinds_that_count(self.kinds, LossKind.DISTILLATION if isinstance(self.kind, Metric) else self.kind)

    def loss_of(self, model: onnx.ModelProto) -> float:
        """The loss of a quantized model."""
        return self.loss_by(self._session(model).run)

    def loss_by(self, run: Callable[[Feed], Tensors]) -> float:
        """The loss of whatever makes outputs of feeds."""
        loss = new_loss(self.kinds, self.kind, self.temperature)
        for batch in self._batches(run):
            loss.update(batch.reference, batch.outputs, batch.labels, batch.counts)
        return loss.value

    def losses_by(self, run: Callable[[Feed], Tensors]) -> list[float]:
        """What each batch of samples adds to the loss, which is their mean; not of a metric."""
        assert isinstance(self.kind, LossKind), "a metric sees all samples at once"
        found = []
        for batch in self._batches(run):
            loss = ModelLoss(self.kinds, self.kind, self.temperature)
            loss.update(batch.reference, batch.outputs, batch.labels, batch.counts)
            found.append(loss.sums)
        of_each = {name: sum(counts[name] for _, counts in found) / len(found) for name in self.kinds_that_count}
        return [sum((lost[name] / max(of, 1e-30) for name, of in of_each.items()), 0.0) for lost, _ in found]

    def drop_of(self, model: onnx.ModelProto) -> Drop:
        """What the metric falls by, and how sure that is."""
        lost = new_loss(self.kinds, self.kind)
        assert isinstance(lost, MetricLoss)
        for batch in self._batches(self._session(model).run):
            lost.update(batch.reference, batch.outputs, batch.labels)
        return lost.drop

    def distance_of(self, model: onnx.ModelProto) -> Distance:
        """How far a quantized model is from the float one."""
        return self.distance_by(self._session(model).run)

    def distance_by(self, run: Callable[[Feed], Tensors]) -> Distance:
        """How far whatever makes outputs of feeds is from the float model."""
        loss = new_loss(self.kinds, self.kind, self.temperature)
        signal, noise = dict.fromkeys(self.kinds, 0.0), dict.fromkeys(self.kinds, 0.0)
        for batch in self._batches(run):
            loss.update(batch.reference, batch.outputs, batch.labels, batch.counts)
            for name, output_kind in self.kinds.items():
                powers = batch.powers(name, probabilities=output_kind.is_of_probabilities)
                signal[name], noise[name] = signal[name] + powers[0], noise[name] + powers[1]
        return Distance(loss.value, signal, noise)

    def _session(self, model: onnx.ModelProto) -> Session:
        return Session(model, "the quantized model", threads=self.threads)

    def _batches(self, run: Callable[[Feed], Tensors]) -> Iterator[_Batch]:
        for (feed, labels), reference in zip(_labelled(self.data), self._reference, strict=True):
            yield _Batch(reference, run(feed), labels, positions_that_count(feed))

    def _kept(self, outputs: Tensors, feed: Feed, labels: Array | None) -> Reference | Taken:
        if isinstance(self.kind, Metric):
            assert labels is not None
            return Taken.of(self.kind, outputs, labels)
        known = {name: outputs[name] for name in self.kinds}
        return kept_of(known, self.kinds_that_count, positions_that_count(feed))


def _labelled(data: Dataset) -> Iterator[tuple[Feed, Array | None]]:
    done = 0
    for feed in data.batches(BATCH):
        samples = samples_in(feed, data)
        yield feed, data.labels[done : done + samples] if data.labels is not None else None
        done += samples


@dataclass(frozen=True)
class _Batch:
    reference: Any  # what the loss keeps
    outputs: Tensors
    labels: Array | None
    counts: Counts | None

    def powers(self, name: str, *, probabilities: bool) -> tuple[float, float]:
        """The power of an output, and that of its noise."""
        exact, output = self.reference[name], counted(self.outputs[name], self.counts)
        if isinstance(exact, TopTokens):
            logits = as_logits(output, probabilities=probabilities)
            return exact.squared_error(in_shape((len(exact.places), logits.shape[-1]), logits))
        exact = counted(exact, self.counts).astype(np.float64)
        return float((exact**2).sum()), float(((exact - in_shape(exact.shape, output)) ** 2).sum())
