"""The float network and the quantized one run side by side, from tensor to tensor, every node once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import onnx

from onnxcalib.data import Dataset
from onnxcalib.data.padding import positions_that_count
from onnxcalib.model.layers import Layer
from onnxcalib.model.pieces import Piece, Pieces
from onnxcalib.model.prepare import Model
from onnxcalib.model.qdq import write_plain
from onnxcalib.numerics.positions import Counts
from onnxcalib.numerics.quant_params import Array
from onnxcalib.plan import QuantPlan
from onnxcalib.runtime.session import Session, Tensors
from onnxcalib.targets import Target

BATCH = 16
# What lies on disk at a time; a piece that makes more is run again with the next one.
DISK_BYTES = 8 * 2**30

# A batch of a tensor, in the float network and in the quantized one, and the positions of its sequences that count.
Take = Callable[[Array, Array, Counts | None], None]


@dataclass
class Held:
    """The batches of one tensor in a file, of any shape and type."""

    path: Path
    size: int = 0

    def append(self, values: Array) -> None:
        """Takes the next batch."""
        with self.path.open("ab") as file:
            np.save(file, values)
        self.size += values.nbytes

    def batches(self) -> Iterator[Array]:
        """All batches in their order."""
        with self.path.open("rb") as file:
            while file.peek(1):
                yield np.load(file)


Pair = tuple[Held, Held]  # of the float network and of the quantized one


@dataclass
class Lockstep:
    """Both networks, run as far as the last tensor that was asked for."""

    model: Model
    layers: Sequence[Layer]
    target: Target
    data: Dataset
    folder: Path
    disk_bytes: int = DISK_BYTES
    _held: dict[str, Pair] = field(default_factory=dict)
    _files: int = 0

    def __post_init__(self) -> None:
        self._pieces = Pieces(self.model.proto, [layer.input for layer in self.layers])

    def advance(self, tensor: str, plan: QuantPlan, take: Take) -> None:
        """Runs both up to a tensor, and hands over its batches; layers before it are quantized by the plan."""
        piece = self._pieces.until(tensor)
        if piece is None:
            for counts, given in self._batches([tensor]):
                take(given[0][tensor], given[1][tensor], counts)
            return
        sessions = Session(piece.model), Session(self._quantized(piece, plan))
        made = {name: (self._new(), self._new()) for name in piece.makes}
        for counts, given in self._batches(piece.reads):
            found = tuple(session.run(feed) for session, feed in zip(sessions, given, strict=True))
            take(found[0][tensor], found[1][tensor], counts)
            made = self._with(made, found)
        if made:
            self._held |= made
            self._drop(set(self._held) - self._pieces.finish(piece))

    def _with(self, made: dict[str, Pair], found: Sequence[Tensors]) -> dict[str, Pair]:
        """Keeps a batch; nothing is kept once it is more than the disk may hold."""
        for name, pair in made.items():
            for held, tensors in zip(pair, found, strict=True):
                held.append(tensors[name])
        if sum(held.size for pair in (*made.values(), *self._held.values()) for held in pair) <= self.disk_bytes:
            return made
        for pair in made.values():
            _remove(pair)
        return {}

    def _drop(self, names: set[str]) -> None:
        for name in names:
            _remove(self._held.pop(name))

    def _batches(self, names: Sequence[str]) -> Iterator[tuple[Counts | None, Sequence[Tensors]]]:
        """The named tensors of both networks, which earlier pieces made or which are inputs of the model."""
        kept = [name for name in names if name in self._held]
        streams = [[self._held[name][side].batches() for name in kept] for side in (0, 1)]
        for feed in self.data.batches(BATCH):
            own = {name: feed[name] for name in names if name not in self._held}
            both = [{**own, **dict(zip(kept, map(next, side), strict=True))} for side in streams]
            yield positions_that_count(feed), both

    def _new(self) -> Held:
        self._files += 1
        held = Held(self.folder / f"{self._files}.npy")
        held.path.touch()
        return held

    def _quantized(self, piece: Piece, plan: QuantPlan) -> onnx.ModelProto:
        """The piece with the layers in it, and what they and others read, quantized by the plan."""
        inside = [layer for layer in self.layers if layer.name in piece.nodes]
        present = {name for node in piece.model.graph.node for name in (*node.input, *node.output)}
        read = {layer.input for layer in inside}
        part = replace(
            plan,
            layers={name: params for name, params in plan.layers.items() if name in piece.nodes or params.table},
            shared={name: qparams for name, qparams in plan.shared.items() if name in present},
            inputs={name: qparams for name, qparams in plan.inputs.items() if name in read},
            dynamic=tuple(name for name in plan.dynamic if name in read),
        )
        return write_plain(replace(self.model, proto=piece.model), inside, part, self.target)


def _remove(pair: Pair) -> None:
    for held in pair:
        held.path.unlink(missing_ok=True)
