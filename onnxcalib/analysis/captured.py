"""What layers make in the float model, in the file, and in the file when the float model feeds them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import onnx

from onnxcalib.algorithms.held import Held
from onnxcalib.data import Dataset
from onnxcalib.data.padding import positions_that_count
from onnxcalib.model.subgraph import Cutter, Part, with_outputs
from onnxcalib.numerics.losses import Reference
from onnxcalib.numerics.positions import Counts
from onnxcalib.numerics.quant_params import Array
from onnxcalib.runtime.session import Session, Tensors, batch_of, samples_in


class Twin(NamedTuple):
    """A tensor of the file, and the one of the float model that it stands for."""

    tensor: str
    columns: int | None  # of a tensor that is a matrix in the file alone

    def as_read(self, value: Array) -> Array:
        """The float model's value as the file has it."""
        return value if self.columns is None else value.reshape(-1, self.columns)


Twins = Mapping[str, Twin]


class Seen(NamedTuple):
    """One batch of samples, by the names of the model that made each."""

    floats: Tensors  # inputs, outputs, and what was asked for
    quantized: Tensors
    alone: Tensors  # of layers of the file that the float model fed
    counts: Counts | None
    samples: int


class Outputs(NamedTuple):
    """The float model's, what a loss looks at of them, and positions that count."""

    tensors: Tensors
    kept: Reference
    counts: Counts | None


class Watched:
    """Both models with what layers make among their outputs, and the layers of the file cut off from each other."""

    def __init__(
        self, model: onnx.ModelProto, floats: Collection[str], file: Cutter, parts: Mapping[str, Part]
    ) -> None:
        self._models = [showing(model, floats), showing(file.model, list(parts))]
        self._parts = [Session(file.together(group)) for group in _apart(list(parts.values()))]

    def run(self, data: Dataset, size: int, reads: Twins, take: Callable[[Seen], None]) -> None:
        """Hands every batch over, of which nothing is left when the next one is run."""
        for feed in data.batches(size):
            take(self._seen(feed, reads, samples_in(feed, data)))

    def measure(self, data: Dataset, reads: Twins) -> tuple[dict[str, int], int]:
        """Bytes of what the float model makes of one sample, and how many samples' tensors fit into memory."""
        seen = self._seen(next(iter(data.batches(1))), reads, 1)
        held = [{name: getattr(value, "nbytes", 0) for name, value in made.items()} for made in seen[:3]]
        return held[0], batch_of(sum(sum(sizes.values()) for sizes in held))

    def close(self) -> None:
        """Lets go of its sessions."""
        self._models, self._parts = [], []

    def _seen(self, feed: Tensors, reads: Twins, samples: int) -> Seen:
        floats, quantized = ({**feed, **session.run(feed)} for session in self._models)
        alone: Tensors = {}
        for session in self._parts:  # what a part of the file reads is the float model's
            alone |= session.run({name: reads[name].as_read(floats[reads[name].tensor]) for name in session.inputs})
        return Seen(floats, quantized, alone, positions_that_count(feed), samples)


@dataclass(frozen=True)
class Captured:
    """What is fed to what follows layers, in files; outputs and what losses look at, in memory."""

    made: Mapping[str, Held]  # by quantized layers alone
    fed: Mapping[str, Held]
    outputs: list[Outputs]

    @classmethod
    def within(cls, folder: Path, made: Collection[str], fed: Collection[str]) -> Captured:
        """Nothing yet."""
        return cls(_files(made, folder / "made"), _files(fed, folder / "fed"), [])

    def append(self, made: Tensors, seen: Seen, outputs: Outputs) -> None:
        """Takes a batch."""
        for files, tensors in ((self.made, made), (self.fed, seen.floats)):
            for name, held in files.items():
                held.append(tensors[name])
        self.outputs.append(outputs)

    def batches(self, made: str, fed: Sequence[str]) -> Iterator[tuple[Tensors, Outputs]]:
        """What a layer made and what else is fed, and the float model's outputs."""
        streams = {name: self.fed[name].batches() for name in fed} | {made: self.made[made].batches()}
        for outputs in self.outputs:
            yield {name: next(stream) for name, stream in streams.items()}, outputs


def showing(model: onnx.ModelProto, names: Collection[str]) -> Session:
    """The model with inner tensors among its outputs."""
    inputs = {value.name for value in model.graph.input}
    outputs = [value.name for value in model.graph.output]
    shown = [name for name in dict.fromkeys(names) if name not in inputs and name not in outputs]
    return Session(with_outputs(model, [*outputs, *shown]))


def _files(names: Collection[str], folder: Path) -> dict[str, Held]:
    folder.mkdir()
    held = {name: Held(folder / f"{place}.bin") for place, name in enumerate(names)}
    for each in held.values():
        each.path.touch()
    return held


def _apart(parts: Sequence[Part]) -> list[list[Part]]:
    """Groups of parts of which none makes what another is fed: two are enough for a chain."""
    groups, sets = list[list[Part]](), list[tuple[set[str], set[str]]]()
    for part in parts:
        free = (it for it, (made, fed) in enumerate(sets) if made.isdisjoint(part.fed) and fed.isdisjoint(part.made))
        place = next(free, len(groups))
        if place == len(groups):
            groups.append([])
            sets.append((set(), set()))
        groups[place].append(part)
        sets[place][0].update(part.made)
        sets[place][1].update(part.fed)
    return groups
