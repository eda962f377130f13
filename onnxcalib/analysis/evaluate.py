"""Measures models on data: accuracy, agreement with the float model, size, latency as a ratio."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from onnxcalib.data import Dataset, Feed, Preprocess, are_classes, open_data
from onnxcalib.data.padding import positions_that_count
from onnxcalib.data.spec import Labels
from onnxcalib.errors import DataError
from onnxcalib.model.io import file_bytes, load
from onnxcalib.model.outputs import find_output_kinds
from onnxcalib.model.shapes import input_specs
from onnxcalib.numerics.fit import in_shape
from onnxcalib.numerics.losses import ModelLoss, sqnr_db
from onnxcalib.numerics.metric import Metric, MetricFunction
from onnxcalib.numerics.output_kind import OutputKind
from onnxcalib.numerics.positions import Counts, counted
from onnxcalib.progress import Progress, silent
from onnxcalib.recipe.metrics import find_metric
from onnxcalib.runtime.session import Session, Tensors, fitting_batch, samples_in

BATCH = 16  # more is no faster, and what lies between layers takes as much more memory
LATENCY_RUNS = 30


@dataclass(frozen=True)
class Evaluation:
    """What one model scored; None where the data or the model has no such figure."""

    model: str
    samples: int
    top1: float | None
    agreement: float | None
    sqnr_db: float | None
    distillation_loss: float | None
    bytes: int
    latency_ratio: float | None
    latency_ms: float
    metric: float | None = None  # the user's own, higher is better


def evaluate(
    models: Sequence[str | Path],
    data: Any,
    reference: str | Path | None = None,
    *,
    metric: str | MetricFunction | None = None,
    preprocess: Preprocess | None = None,
    progress: Progress = silent,
) -> list[Evaluation]:
    """Measures model files on labelled or unlabelled data, against a float reference if there is one.

    A metric is one of `METRICS`, 'module:function', or a function of all outputs and all labels.
    """
    paths = [Path(path) for path in models]
    specs = [input_specs(load(path)) for path in paths]
    # A target may fix the batch; a file with a free one takes the same batches.
    fixed = [each for each in specs if all(spec.shape[:1] not in ((), (None,)) for spec in each)]
    opened = open_data(data, (fixed or specs)[0], preprocess)
    own = find_metric(metric) if metric is not None else None
    return evaluate_files(paths, opened, Path(reference) if reference is not None else None, progress, own)


def evaluate_files(
    paths: Sequence[Path], data: Dataset, reference: Path | None, progress: Progress, metric: Metric | None = None
) -> list[Evaluation]:
    """Runs every model on the same batches; figures against a reference need one."""
    _check_labels(data, metric)
    protos = [load(path) for path in paths]
    float_proto = load(reference) if reference is not None else None
    kinds = find_output_kinds(float_proto if float_proto is not None else protos[0])
    _same_inputs(paths, [tuple(spec.name for spec in input_specs(proto)) for proto in protos])
    sessions = [Session(proto, str(path)) for proto, path in zip(protos, paths, strict=True)]
    own = paths.index(reference) if reference in paths else None  # the reference, among those that are evaluated
    teacher = None if float_proto is None else Session(float_proto, str(reference)) if own is None else sessions[own]
    scores = [_Score(kinds, ModelLoss(kinds), metric) for _ in paths]
    done, batch = 0, min(BATCH, *(fitting_batch(each, data) for each in (sessions[0], teacher or sessions[0])))
    for feed in data.batches(batch):
        samples = samples_in(feed, data)
        labels = data.labels[done : done + samples] if data.labels is not None else None
        expected, counts = teacher.run(feed) if teacher is not None else None, positions_that_count(feed)
        for session, score in zip(sessions, scores, strict=True):
            outputs = expected if session is teacher and expected is not None else session.run(feed)
            score.update(outputs, expected, labels, counts)
        done += samples
        progress("evaluate", done, len(data))
    timed = sessions if teacher is None or own is not None else [*sessions, teacher]
    times = _latencies(timed, next(iter(data.batches(1))))
    base = None if teacher is None else times[timed.index(teacher)]
    return [
        score.evaluation(path, done, spent, base)
        for path, score, spent in zip(paths, scores, times[: len(paths)], strict=True)
    ]


def _same_inputs(paths: Sequence[Path], inputs: Sequence[tuple[str, ...]]) -> None:
    for path, names in zip(paths, inputs, strict=True):
        if set(names) != set(inputs[0]):
            raise DataError(
                f"{path} has inputs {', '.join(names)}, but {paths[0]} has {', '.join(inputs[0])}.",
                "Evaluate models of one kind together.",
            )


def _check_labels(data: Dataset, metric: Metric | None) -> None:
    if metric is not None and data.labels is None:
        raise DataError(f"the metric {metric.name} needs labels.", f"Add an array 'labels' to {data.source}.")
    if metric is None and data.labels is not None and not are_classes(data.labels):
        raise DataError(f"the labels of {data.source} are no class indices.", "Say by `metric` what they are for.")


def _latencies(sessions: Sequence[Session], feed: Feed) -> list[float]:
    """Best times at batch 1; the models take turns, so that a busy moment hits them all."""
    best = [math.inf] * len(sessions)
    for _ in range(LATENCY_RUNS):
        for place, session in enumerate(sessions):
            start = time.perf_counter()
            session.run(feed)
            best[place] = min(best[place], time.perf_counter() - start)
    return best


@dataclass
class _Score:
    kinds: dict[str, OutputKind]
    loss: ModelLoss
    metric: Metric | None = None
    parts: list[Any] = field(default_factory=list)  # of the metric
    right: int = 0
    judged: int = 0
    agreed: int = 0
    compared: int = 0
    signal: float = 0.0
    noise: float = 0.0

    def update(
        self, outputs: Tensors, expected: Tensors | None, labels: Labels | None, counts: Counts | None = None
    ) -> None:
        if self.metric is not None and labels is not None:
            self.parts.append(self.metric.take(outputs, labels))
        distributions = (name for name, kind in self.kinds.items() if kind.is_distribution)
        classes = next((name for name in distributions if outputs[name].size), None)
        if classes is not None and labels is not None and are_classes(labels) and outputs[classes].ndim == 2:
            self.right += int((outputs[classes].argmax(axis=-1) == labels).sum())
            self.judged += len(labels)
        if expected is None:
            return
        outputs = {name: in_shape(expected[name].shape, outputs[name]) for name in self.kinds}
        if classes is not None:
            first, second = (counted(each[classes], counts) for each in (outputs, expected))
            same = first.argmax(axis=-1) == second.argmax(axis=-1)
            self.agreed += int(same.sum())
            self.compared += same.size
        for name in self.kinds:
            exact = counted(expected[name], counts).astype(np.float64)
            self.signal += float((exact**2).sum())
            self.noise += float(((exact - counted(outputs[name], counts)) ** 2).sum())
        self.loss.update(expected, outputs, counts=counts)

    def evaluation(self, path: Path, samples: int, spent: float, base: float | None) -> Evaluation:
        compared = base is not None
        return Evaluation(
            model=str(path),
            samples=samples,
            top1=100 * self.right / self.judged if self.judged else None,
            agreement=100 * self.agreed / self.compared if self.compared else None,
            sqnr_db=sqnr_db(self.signal, self.noise) if compared else None,
            distillation_loss=self.loss.value if compared else None,
            bytes=file_bytes(path),
            latency_ratio=spent / base if base is not None else None,
            latency_ms=1000 * spent,
            metric=self.metric.total(self.parts) if self.metric is not None else None,
        )
