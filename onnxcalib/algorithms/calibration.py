"""Statistics of every tensor that will be quantized, streamed over the calibration data."""

from __future__ import annotations

import itertools
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from onnxcalib.algorithms.held import Held
from onnxcalib.data import Dataset
from onnxcalib.data.padding import positions_that_count
from onnxcalib.errors import ModelError
from onnxcalib.model.placement import InsertionPoints
from onnxcalib.model.prepare import Model
from onnxcalib.model.subgraph import with_outputs
from onnxcalib.numerics.positions import Counts, repeated
from onnxcalib.numerics.quant_params import Array
from onnxcalib.numerics.statistics import Extremes, Histogram, TensorStatistics, thinned
from onnxcalib.progress import Progress
from onnxcalib.runtime.memory import buffer_bytes
from onnxcalib.runtime.session import Session, Tensors, fitting_batch, samples_in
from onnxcalib.runtime.threads import default_workers, in_threads

DISK_BYTES = 4 * 2**30  # of what histograms take of all tensors
BUFFER_BYTES = 2 * 2**20  # of that, in memory: files of single rows take longer to write than to compute
EXTREME_SAMPLES = 16  # that are remembered

Take = Callable[[str, Array, int], None]  # a tensor's batch, and how many samples it has


@dataclass(frozen=True)
class Statistics:
    """What calibration learned, by tensor."""

    tensors: Mapping[str, TensorStatistics]
    samples: int
    extreme_samples: tuple[int, ...] = ()  # that have the extremes of tensors, those of the most tensors first


def calibrate(
    model: Model, points: InsertionPoints, data: Dataset, progress: Progress, disk_bytes: int = DISK_BYTES
) -> Statistics:
    """Requires a prepared model; the extremes come first, for the histograms lie between them.

    What histograms take of a tensor waits on disk for that; where it does not fit, the network runs a second time.
    """
    # Tensors that keep another's grid need no statistics of their own.
    names = [tensor.name for tensor in points.tensors.values() if tensor.same_qparams_as is None]
    if not names:  # only weights are quantized
        return Statistics({}, len(data))
    session = Session(with_outputs(model.proto, names), model.source)
    batch = fitting_batch(session, data)
    extremes, of_all = {name: Extremes() for name in names}, len(data)
    with tempfile.TemporaryDirectory(prefix="onnxcalib_") as folder:
        waiting = _Waiting(names, Path(folder), disk_bytes / max(of_all, 1))

        def see(name: str, values: Array, samples: int) -> None:
            extremes[name].update(values, samples, done)
            if values.size:
                waiting.keep(name, thinned(values, samples, of_all))

        done = 0
        for samples in _passed(names, see, session, data, batch):
            done += samples
            waiting.write(done)
            progress("calibrate", done, 2 * of_all)
        _check_finite(extremes, model.source)
        if waiting.is_whole:
            del session  # its memory is free for histograms
            tensors = dict(
                zip(names, in_threads(lambda name: waiting.histogram(name, extremes[name]), names), strict=True)
            )
            progress("calibrate", 2 * of_all, 2 * of_all)
        else:
            histograms = {name: Histogram(extremes[name]) for name in names}

            def take(name: str, values: Array, samples: int) -> None:
                histograms[name].take(thinned(values, samples, of_all))

            for samples in _passed(names, take, session, data, batch):
                done += samples
                progress("calibrate", done, 2 * of_all)
            tensors = {name: histogram.statistics() for name, histogram in histograms.items()}
    held = Counter(sample for seen in extremes.values() for sample in seen.samples.values())
    return Statistics(tensors, of_all, tuple(sample for sample, _ in held.most_common(EXTREME_SAMPLES)))


class _Waiting:
    """What histograms take of tensors, on disk until their ends are known; nothing of it where it takes too much."""

    def __init__(self, names: Sequence[str], folder: Path, most: float) -> None:
        self._held = {name: Held(folder / f"{place}.bin") for place, name in enumerate(names)}
        self._buffers: dict[str, list[Array]] = {name: [] for name in names}
        self.is_whole, self._most = True, most  # bytes a sample

    def keep(self, name: str, rows: Array) -> None:
        """Takes the next batch of a tensor."""
        if self.is_whole:
            self._buffers[name].append(rows.copy())

    def write(self, samples: int) -> None:
        """Empties full buffers; gives up where so many samples took too much, or the disk is full."""
        buffered = sum(rows.nbytes for buffer in self._buffers.values() for rows in buffer)
        if buffered + sum(held.size for held in self._held.values()) > self._most * samples:
            self.is_whole = False
        elif buffered > buffer_bytes(BUFFER_BYTES):
            try:
                for name, buffer in self._buffers.items():
                    for rows in _joined(buffer):
                        self._held[name].append(rows)
            except OSError:  # the network can still run again
                self.is_whole = False
        if buffered > buffer_bytes(BUFFER_BYTES) or not self.is_whole:
            self._buffers = {name: [] for name in self._buffers}

    def histogram(self, name: str, extremes: Extremes) -> TensorStatistics:
        """Of all of a tensor."""
        found, written = Histogram(extremes), self._held[name].batches() if self._held[name].size else ()
        for rows in itertools.chain(written, _joined(self._buffers.pop(name))):
            found.take(rows)
        return found.statistics()


def _joined(batches: Sequence[Array]) -> Iterator[Array]:
    """Batches whose rows have one length, together: each call of NumPy costs more than a row."""
    for _, alike in itertools.groupby(batches, key=lambda rows: rows.shape[1]):
        yield np.concatenate(list(alike))


def _check_finite(extremes: Mapping[str, Extremes], source: str) -> None:
    for name, seen in extremes.items():
        if not seen.is_finite:
            raise ModelError(
                f"{source}: tensor '{name}' becomes NaN or infinite on the calibration data.",
                "Check that the data is preprocessed as the model expects.",
            )


def _passed(names: Sequence[str], take: Take, session: Session, data: Dataset, batch: int) -> Iterator[int]:
    """One pass over the data; gives the samples of each batch, of which nothing is left when the next one is run."""
    for feed in data.batches(batch):
        samples = samples_in(feed, data)
        _share(names, take, session.run(feed), samples, positions_that_count(feed))
        yield samples


def _share(names: Sequence[str], take: Take, tensors: Tensors, samples: int, counts: Counts | None) -> None:
    """Every core takes some of the tensors."""
    workers = default_workers()

    def update(first: int) -> None:
        for name in names[first::workers]:
            take(name, repeated(tensors[name], counts), samples)

    in_threads(update, range(workers))
