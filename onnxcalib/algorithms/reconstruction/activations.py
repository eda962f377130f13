"""Tensors of a model on the calibration data, kept in files and read a few samples at a time."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx

from onnxcalib.data import Dataset, Feed
from onnxcalib.errors import OutputError
from onnxcalib.model.subgraph import upstream
from onnxcalib.numerics.quant_params import QuantParams, fake_quantize
from onnxcalib.runtime.memory import buffer_bytes
from onnxcalib.runtime.session import Session, Tensors, samples_in
from onnxcalib.runtime.threads import ahead, default_workers

FloatArray = npt.NDArray[np.float32]

BATCH = 16
PIECE = 1 << 16
# Batches that are run side by side, each by one thread, take this at most: tensors come out the same on any machine.
AHEAD_BYTES = 256 * 2**20


class DiskActivations:
    """The samples of one tensor in a file; memory holds only what is being read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.shape: tuple[int, ...] | None = None  # of a sample, with as many rows as it takes
        self.samples = 0
        self._squares = 0.0
        path.write_bytes(b"")

    @property
    def energy(self) -> float:
        """The mean square of all elements."""
        assert self.shape is not None
        return self._squares / max(self.samples * int(np.prod(self.shape)), 1)

    def append(self, rows: FloatArray, samples: int) -> bool:
        """Takes a batch; False where its rows do not belong to samples one by one."""
        if rows.ndim == 0 or len(rows) % samples:
            return False
        shape = (len(rows) // samples, *rows.shape[1:])
        if self.shape not in (None, shape):
            return False
        self.shape = shape
        self.samples += samples
        flat = np.ascontiguousarray(rows, np.float32).reshape(-1)
        self._squares += _squared(flat)
        # A large model has more tensors than a process may hold files open.
        try:
            with self.path.open("ab") as file:
                file.write(flat.data)
        except OSError as error:
            raise OutputError(f"{self.path} cannot be written: {error.strerror}.", "Free some space.") from error
        return True

    def read(self, chosen: Sequence[int]) -> FloatArray:
        """The rows of some samples, one sample after the other."""
        assert self.shape is not None
        each = int(np.prod(self.shape))
        rows = np.empty((len(chosen), each), np.float32)
        with self.path.open("rb", buffering=0) as file:
            for place, sample in enumerate(chosen):
                file.seek(4 * each * sample)
                file.readinto(rows[place].data)
        return rows.reshape(len(chosen) * self.shape[0], *self.shape[1:])

    def fake_quantized(self, qparams: QuantParams, path: Path) -> DiskActivations:
        """The same samples, moved onto a grid, in another file."""
        moved = DiskActivations(path)
        for start in range(0, self.samples, BATCH):
            chosen = range(start, min(start + BATCH, self.samples))
            moved.append(fake_quantize(self.read(chosen), qparams), len(chosen))
        return moved

    def close(self) -> None:
        """Removes the file."""
        self.path.unlink(missing_ok=True)


def _squared(flat: FloatArray) -> float:
    """The sum of squares; a BLAS would give another in its last bits for another number of threads."""
    pieces = (flat[start : start + PIECE] for start in range(0, flat.size, PIECE))
    return sum(float(np.einsum("i,i->", piece, piece, dtype=np.float64)) for piece in pieces)


def capture(
    model: onnx.ModelProto,
    names: Sequence[str],
    data: Dataset,
    folder: Path,
    qparams: Mapping[str, QuantParams] = {},
    known: Mapping[str, DiskActivations] = {},
) -> dict[str, DiskActivations]:
    """Runs the model up to the named tensors, from known ones where it can; a grid moves its tensor onto it."""
    given = {value.name for value in model.graph.input}
    made = [name for name in dict.fromkeys(names) if name not in given]
    part, reads = upstream(model, made, known)
    session = Session(part, threads=1) if made else None
    activations = {name: DiskActivations(folder / f"{place}.bin") for place, name in enumerate(dict.fromkeys(names))}

    def run(given: tuple[range, Feed]) -> tuple[int, Tensors]:
        chosen, feed = given
        if session is None:
            return len(chosen), feed
        read = {name: known[name].read(chosen) if name in known else feed[name] for name in reads}
        return len(chosen), feed | session.run(read)

    batches = _numbered(data)
    for samples, tensors in itertools.chain(first := [run(next(batches))], ahead(run, batches, _at_once(first[0][1]))):
        for name in list(activations):
            rows = fake_quantize(tensors[name], qparams[name]) if name in qparams else tensors[name]
            if not activations[name].append(rows, samples):
                activations.pop(name).close()
    return activations


def _numbered(data: Dataset) -> Iterator[tuple[range, Feed]]:
    """The numbers of the samples of each feed, and the feed."""
    done = 0
    for feed in data.batches(BATCH):
        samples = samples_in(feed, data)
        yield range(done, done + samples), feed
        done += samples


def _at_once(tensors: Tensors) -> int:
    """How many batches such as this may be held."""
    held = sum(value.nbytes for value in tensors.values() if isinstance(value, np.ndarray))
    return int(np.clip(buffer_bytes(AHEAD_BYTES) // max(held, 1), 1, default_workers()))
