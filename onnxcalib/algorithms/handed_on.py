"""What stretches of a network hand on to later ones, batch after batch, on disk."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from onnxcalib.algorithms.held import Held
from onnxcalib.model.stretches import Stretch
from onnxcalib.numerics.quant_params import Array
from onnxcalib.runtime.session import Session, Tensors


@dataclass
class HandedOn:
    """Of one network, whose stretches run one after the other, each over all batches."""

    folder: Path
    _held: dict[str, Held] = field(default_factory=dict)
    _files: int = 0

    def open(self, stretch: Stretch, session: Session) -> RunningStretch:
        """A stretch that reads what earlier ones made; requires that these are through."""
        self.folder.mkdir(exist_ok=True)
        made = {}
        for name in stretch.makes:
            self._files += 1
            made[name] = self._held[name] = Held(self.folder / f"{self._files}.bin")
        read = {name: self._held[name].batches() for name in stretch.reads if name in self._held}
        return RunningStretch(session, read, made)


@dataclass(frozen=True)
class RunningStretch:
    """A stretch in the midst of its batches."""

    session: Session
    read: dict[str, Iterator[Array]]
    made: dict[str, Held]

    def run(self, feed: Tensors) -> Tensors:
        """What the next batch comes to, fed with this beside what was handed on."""
        own = {name: value for name, value in feed.items() if name in self.session.inputs}
        outputs = self.session.run(own | {name: next(batches) for name, batches in self.read.items()})
        for name, held in self.made.items():
            held.append(outputs.pop(name))
        return outputs
