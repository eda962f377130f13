"""The quantized network, run from tensor to tensor while its layers are being rounded, every node once."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from onnxcalib.algorithms.drawn_rows import BATCH, counts_of
from onnxcalib.algorithms.held import Held
from onnxcalib.data import Dataset, Feed
from onnxcalib.model.code_borders import CodeBorders, with_code_borders
from onnxcalib.model.graph import GraphIndex
from onnxcalib.model.layers import Layer
from onnxcalib.model.pieces import Piece, Pieces
from onnxcalib.model.prepare import Model
from onnxcalib.model.qdq import write_plain_part
from onnxcalib.numerics.positions import Counts
from onnxcalib.numerics.quant_params import Array
from onnxcalib.plan import QuantPlan
from onnxcalib.runtime.session import Session, Tensors
from onnxcalib.targets import Target

# What lies on disk at a time; a piece that makes more is run again with the next one.
DISK_BYTES = 8 * 2**30

# A batch of a tensor, quantized values where all its readers take these, and the positions of its sequences that count.
Take = Callable[[Array, Counts | None], None]


@dataclass
class Stepwise:
    """The network, run as far as the last tensor that was asked for."""

    model: Model
    layers: Sequence[Layer]
    target: Target
    data: Dataset
    folder: Path
    disk_bytes: int = DISK_BYTES
    _held: dict[str, Held] = field(default_factory=dict)
    _files: int = 0

    def __post_init__(self) -> None:
        self._pieces = Pieces(self.model.proto, [layer.input for layer in self.layers])
        self._counts = counts_of(self.data)
        index = GraphIndex(self.model.proto.graph)
        self._readers = {
            layer.input: {node.name for node in index.readers[layer.input]}
            for layer in self.layers
            if layer.input not in index.outputs
        }

    def advance(self, tensor: str, plan: QuantPlan, take: Take) -> None:
        """Runs up to a tensor, and hands over its batches; layers before it are quantized by the plan."""
        piece = self._pieces.until(tensor)
        if piece is None:
            for counts, given in self._batches([tensor]):
                take(given[tensor], counts)
            return
        quantized = self._quantized(piece, plan)
        session, made = Session(quantized.model), {name: self._new() for name in piece.makes}
        for counts, given in self._batches(piece.reads):
            feed = {quantized.reads.get(name, name): values for name, values in given.items()}
            outputs = session.run(feed)
            found = {name: outputs[quantized.makes.get(name, name)] for name in piece.makes}
            take(found[tensor], counts)
            made = self._with(made, found)
        if made:
            self._held |= made
            self._drop(set(self._held) - self._pieces.finish(piece))

    def _with(self, made: dict[str, Held], found: Tensors) -> dict[str, Held]:
        """Keeps a batch; nothing is kept once it is more than the disk may hold."""
        for name, held in made.items():
            held.append(found[name])
        if sum(held.size for held in (*made.values(), *self._held.values())) <= self.disk_bytes:
            return made
        for held in made.values():
            held.path.unlink(missing_ok=True)
        return {}

    def _drop(self, names: set[str]) -> None:
        for name in names:
            self._held.pop(name).path.unlink(missing_ok=True)

    def _batches(self, names: Sequence[str]) -> Iterator[tuple[Counts | None, Tensors]]:
        """The named tensors, which earlier pieces made or which are inputs of the model."""
        streams = {name: self._held[name].batches() for name in names if name in self._held}
        needed = [name for name in names if name not in streams]
        feeds = self.data.batches(BATCH) if needed else itertools.repeat(Feed())
        for counts, feed in zip(self._counts, feeds, strict=False):
            own = {name: feed[name] for name in needed}
            yield counts, {**own, **{name: next(stream) for name, stream in streams.items()}}

    def _new(self) -> Held:
        self._files += 1
        held = Held(self.folder / f"{self._files}.bin")
        held.path.touch()
        return held

    def _quantized(self, piece: Piece, plan: QuantPlan) -> CodeBorders:
        """The piece, quantized by the plan; what nobody but layers reads on a grid is as good as shared."""
        alone = {name: it for name, it in plan.inputs.items() if name not in plan.shared and self._is_codes(name, plan)}
        inputs = {name: qparams for name, qparams in plan.inputs.items() if name not in alone}
        plan = replace(plan, shared={**plan.shared, **alone}, inputs=inputs)
        written = write_plain_part(self.model, piece.model, self.layers, plan, self.target)
        # A model input is quantized anew by each piece that reads it.
        return with_code_borders(written, [name for name in plan.shared if name in self._held or name in piece.makes])

    def _is_codes(self, tensor: str, plan: QuantPlan) -> bool:
        """Whether nobody reads a tensor but layers, all on the grid of its own."""
        return tensor in self._readers and self._readers[tensor] <= plan.layers.keys()
