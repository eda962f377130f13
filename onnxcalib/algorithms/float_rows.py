"""What layers read in the float network, at the positions that are drawn: one run for many layers, kept on disk."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from onnxcalib.algorithms.drawn_rows import BATCH, DrawnRows, Reads, RowsByReads, counts_of
from onnxcalib.algorithms.held import Held
from onnxcalib.algorithms.layer_matrix import LayerMatrix
from onnxcalib.data import Dataset, first
from onnxcalib.model.graph import GraphIndex
from onnxcalib.model.layers import Layer
from onnxcalib.model.prepare import Model
from onnxcalib.model.subgraph import upstream
from onnxcalib.numerics.positions import Counts
from onnxcalib.numerics.quant_params import Array
from onnxcalib.runtime.memory import buffer_bytes
from onnxcalib.runtime.session import Session, Tensors, samples_in

# What the float network's rows take on disk at most; further layers are run for when their turn comes.
DISK_BYTES = 6 * 2**30
# What a batch of all tensors of one run takes in memory.
CAPTURE_BYTES = 256 * 2**20


@dataclass
class FloatRows:
    """The rows of the float network, run again for layers whose rows do not lie on disk."""

    model: Model
    layers: Sequence[Layer]
    data: Dataset
    folder: Path
    disk_bytes: int = DISK_BYTES
    _shapes: dict[str, list[tuple[int, ...]]] = field(default_factory=dict)  # of each batch of a tensor
    _held: dict[tuple[str, Reads | None], Held] = field(default_factory=dict)  # rows, or None: the whole tensor
    _files: int = 0

    def __post_init__(self) -> None:
        index = GraphIndex(self.model.proto.graph)
        tensors = dict.fromkeys(layer.input for layer in self.layers)
        matrices = {name: [LayerMatrix.of(it, index) for it in self.layers if it.input == name] for name in tensors}
        rows = (DrawnRows.of(name, of_it, len(self.data)) for name, of_it in matrices.items())
        self._rows = {each.tensor: each for each in rows if each.matrices}
        self._sizes: dict[str, float] = {}  # of a sample
        self._counts: list[Counts | None] = []

    def batches(self, tensor: str) -> Generator[tuple[tuple[int, ...], RowsByReads], None, None]:
        """The shape of each batch of a tensor, and the rows that its layers read of it."""
        if tensor not in self._shapes:
            self._capture(self._from(tensor))
        rows, shapes = self._rows[tensor], self._shapes[tensor]
        if (tensor, None) in self._held:
            wholes = self._held[tensor, None].batches()
            for number, (shape, values, counts) in enumerate(zip(shapes, wholes, self._counts, strict=True)):
                yield shape, rows.draw(values, number, counts)
            return
        streams = {reads: self._held[tensor, reads].batches() for reads in rows.matrices}
        for shape in shapes:
            yield shape, {reads: next(stream) for reads, stream in streams.items()}

    def _from(self, tensor: str) -> list[str]:
        """The tensor and those after it whose rows are found in the same run."""
        sizes, names = self._bytes_a_sample(), list(self._rows)
        chosen, disk, memory = list[str](), 0.0, 0.0
        for name in names[names.index(tensor) :]:
            disk += self._kept_bytes(name)
            memory += sizes[name] * BATCH
            if chosen and (disk > self.disk_bytes or memory > buffer_bytes(CAPTURE_BYTES)):
                break
            chosen.append(name)
        held = sum(each.size for each in self._held.values())
        if held + sum(map(self._kept_bytes, chosen)) > self.disk_bytes:  # earlier layers' rows make room
            self.close()
        return chosen

    def close(self) -> None:
        """Removes what lies on disk."""
        for held in self._held.values():
            held.path.unlink(missing_ok=True)
        self._held.clear()
        self._shapes.clear()

    def _capture(self, names: Sequence[str]) -> None:
        given = {value.name for value in self.model.proto.graph.input}
        made = [name for name in names if name not in given]
        part, reads = upstream(self.model.proto, made)
        session = Session(part) if made else None
        self._counts = self._counts or counts_of(self.data)
        for number, feed in enumerate(self.data.batches(BATCH)):
            found = {**feed, **(session.run({name: feed[name] for name in reads}) if session is not None else {})}
            for name in names:
                self._shapes.setdefault(name, []).append(found[name].shape)
                rows = self._rows[name]
                drawn = {} if self._whole(name) else rows.draw(found[name], number, self._counts[number])
                self._keep(name, found[name], drawn)

    def _keep(self, name: str, values: Array, rows: RowsByReads) -> None:
        for reads, each in rows.items() if rows else [(None, values)]:
            if (name, reads) not in self._held:
                self._files += 1
                self._held[name, reads] = Held(self.folder / f"float_{self._files}.bin")
            self._held[name, reads].append(each)

    def _whole(self, name: str) -> bool:
        """Whether a tensor takes less than its rows do: windows overlap."""
        return self._bytes_a_sample()[name] <= self._row_bytes(name)

    def _row_bytes(self, name: str) -> float:
        """Of a sample, if as many rows are drawn as may be."""
        rows = self._rows[name]
        return sum(4 * rows.most(it) * it.columns * it.layer.groups for it in rows.matrices.values())

    def _kept_bytes(self, name: str) -> float:
        return min(self._bytes_a_sample()[name], self._row_bytes(name)) * len(self.data)

    def _bytes_a_sample(self) -> dict[str, float]:
        """Measured once, on one sample."""
        if not self._sizes:
            feed = next(iter(first(self.data, 1).batches(1)))
            part, reads = upstream(self.model.proto, [name for name in self._rows if name not in feed])
            found: Tensors = Session(part, pool=False).run({name: feed[name] for name in reads})
            samples = samples_in(feed, self.data)
            self._sizes = {name: {**feed, **found}[name].nbytes / samples for name in self._rows}
        return self._sizes
