"""Statistics of every tensor that will be quantized, streamed over the calibration data."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from onnxcalib.algorithms.lockstep import Held
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
from onnxcalib.runtime.session import Session, Tensors, fitting_batch, samples_in
from onnxcalib.runtime.threads import default_workers, in_threads

DISK_BYTES = 4 * 2**30  # of what histograms take of all tensors

Take = Callable[[str, Array, int], None]  # a tensor's batch, and how many samples it has


@dataclass(frozen=True)
class Statistics:
    """What calibration learned, by tensor."""

    tensors: Mapping[str, TensorStatistics]
    samples: int


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
    extremes = {name: Extremes() for name in names}
    with tempfile.TemporaryDirectory(prefix="onnxcalib_") as folder:
        waiting = _Waiting(names, Path(folder), disk_bytes / max(len(data), 1))

        def see(name: str, values: Array, samples: int) -> None:
            extremes[name].update(values, samples)
            if values.size:
                waiting.keep(name, thinned(values, samples))

        done = 0
        for samples in _passed(names, see, session, data, batch):
            done += samples
            waiting.check(done)
            progress("calibrate", done, 2 * len(data))
        _check_finite(extremes, model.source)
        histograms = {name: Histogram(extremes[name]) for name in names}
        if waiting.is_whole:
            in_threads(lambda name: _filled(histograms[name], waiting.held[name]), names)
            progress("calibrate", 2 * len(data), 2 * len(data))
        else:
            for samples in _passed(names, lambda name, *given: histograms[name].update(*given), session, data, batch):
                done += samples
                progress("calibrate", done, 2 * len(data))
    return Statistics({name: histogram.statistics() for name, histogram in histograms.items()}, len(data))


class _Waiting:
    """What histograms take of tensors, on disk until their ends are known; nothing of it where it takes too much."""

    def __init__(self, names: Sequence[str], folder: Path, most: float) -> None:
        self.held = {name: Held(folder / f"{place}.npy") for place, name in enumerate(names)}
        self.is_whole, self._most = True, most  # bytes a sample

    def keep(self, name: str, rows: Array) -> None:
        """Takes the next batch of a tensor."""
        try:
            if self.is_whole:
                self.held[name].append(rows)
        except OSError:  # the disk is full: the network can still run again
            self.is_whole = False

    def check(self, samples: int) -> None:
        """Gives up where so many samples took too much."""
        self.is_whole &= sum(held.size for held in self.held.values()) <= self._most * samples


def _filled(histogram: Histogram, held: Held) -> None:
    for rows in held.batches() if held.size else ():
        histogram.take(rows)


def _check_finite(extremes: Mapping[str, Extremes], source: str) -> None:
    for name, seen in extremes.items():
        if not seen.is_finite:
            raise ModelError(
                f"{source}: tensor '{name}' becomes NaN or infinite on the calibration data.",
                "Check that the data is preprocessed as the model expects.",
            )


def _passed(names: Sequence[str], take: Take, session: Session, data: Dataset, batch: int) -> Iterator[int]:
    """One pass over the data, of which every core takes some of the tensors; gives the samples of each batch."""
    workers = default_workers()
    for feed in data.batches(batch):
        samples, tensors, counts = samples_in(feed, data), session.run(feed), positions_that_count(feed)

        def update(
            first: int, tensors: Tensors = tensors, samples: int = samples, counts: Counts | None = counts
        ) -> None:
            for name in names[first::workers]:
                take(name, repeated(tensors[name], counts), samples)

        in_threads(update, range(workers))
        yield samples
