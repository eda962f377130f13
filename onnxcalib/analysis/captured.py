"""Tensors of the float model and of the file on some samples, on disk while layers are looked at one by one."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import onnx

from onnxcalib.algorithms.held import Held
from onnxcalib.data import Dataset
from onnxcalib.data.padding import positions_that_count
from onnxcalib.model.subgraph import with_outputs
from onnxcalib.numerics.losses import ModelLoss, Reference, kept_of
from onnxcalib.numerics.positions import Counts
from onnxcalib.runtime.session import Session, Tensors, fitting_batch, samples_in


class Batch(NamedTuple):
    """What is known of some samples."""

    floats: Tensors  # inputs, outputs of the float model, and what was asked for
    quantized: Tensors  # what was asked for of the file
    kept: Reference  # what the loss looks at
    counts: Counts | None
    samples: int


@dataclass
class Both:
    """The float model and the file; the loss of the file is gathered with the first tensors that are captured."""

    teacher: onnx.ModelProto
    file: onnx.ModelProto
    data: Dataset
    loss: ModelLoss
    batch: int = 1
    samples: int = 0

    def measure(self, floats: Collection[str], quantized: Collection[str]) -> tuple[dict[str, int], dict[str, int]]:
        """Bytes of tensors on one sample; a batch of all of them fits into memory."""
        sessions = showing(self.teacher, floats), showing(self.file, quantized)
        self.batch = min(fitting_batch(session, self.data) for session in sessions)
        feed = next(iter(self.data.batches(1)))
        found = [{name: getattr(value, "nbytes", 0) for name, value in it.run(feed).items()} for it in sessions]
        return found[0], found[1]

    def capture(self, floats: Collection[str], quantized: Collection[str], folder: Path) -> Captured:
        """Runs both models once."""
        sessions = showing(self.teacher, floats), showing(self.file, quantized)
        outputs = [value.name for value in self.teacher.graph.output]
        names = [name for name in sessions[0].outputs if name in floats and name not in outputs], list(quantized)
        files = [
            {name: _new(folder / f"{side}_{place}.npy") for place, name in enumerate(each)}
            for side, each in enumerate(names)
        ]
        found = Captured(self, files[0], files[1], [])
        is_first = self.samples == 0
        for feed in self.data.batches(self.batch):
            made, counts = [session.run(feed) for session in sessions], positions_that_count(feed)
            kept = kept_of({**feed, **made[0]}, self.loss.kinds, counts)
            if is_first:
                self.loss.update(kept, {**feed, **made[1]}, counts=counts)
                self.samples += samples_in(feed, self.data)
            found.outputs.append(({name: made[0][name] for name in outputs}, kept))
            for held, tensors in zip(files, made, strict=True):
                for name, each in held.items():
                    each.append(tensors[name])
        return found


@dataclass(frozen=True)
class Captured:
    """The files of the tensors, and outputs in memory."""

    both: Both
    floats: Mapping[str, Held]
    quantized: Mapping[str, Held]
    outputs: list[tuple[Tensors, Reference]]

    def batches(self, floats: Collection[str], quantized: Sequence[str]) -> Iterator[Batch]:
        """The named tensors, batch by batch."""
        own = {name: self.floats[name].batches() for name in floats if name in self.floats}
        made = {name: self.quantized[name].batches() for name in quantized}
        for feed, (outputs, kept) in zip(self.both.data.batches(self.both.batch), self.outputs, strict=True):
            tensors = {**feed, **outputs, **{name: next(stream) for name, stream in own.items()}}
            twins = {name: next(stream) for name, stream in made.items()}
            yield Batch(tensors, twins, kept, positions_that_count(feed), samples_in(feed, self.both.data))


def showing(model: onnx.ModelProto, names: Collection[str]) -> Session:
    """The model with inner tensors among its outputs."""
    inputs = {value.name for value in model.graph.input}
    outputs = [value.name for value in model.graph.output]
    shown = [name for name in dict.fromkeys(names) if name not in inputs and name not in outputs]
    return Session(with_outputs(model, [*outputs, *shown]))


def _new(path: Path) -> Held:
    path.touch()
    return Held(path)
