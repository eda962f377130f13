"""Statistics of every tensor that will be quantized, streamed over the calibration data in two passes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from onnxcalib.data import Dataset
from onnxcalib.data.padding import positions_that_count
from onnxcalib.errors import ModelError
from onnxcalib.model.placement import InsertionPoints
from onnxcalib.model.prepare import Model
from onnxcalib.model.subgraph import with_outputs
from onnxcalib.numerics.positions import Counts, repeated
from onnxcalib.numerics.statistics import Extremes, Histogram, TensorStatistics
from onnxcalib.progress import Progress
from onnxcalib.runtime.session import Session, Tensors, fitting_batch, samples_in
from onnxcalib.runtime.threads import default_workers, in_threads


@dataclass(frozen=True)
class Statistics:
    """What calibration learned, by tensor."""

    tensors: Mapping[str, TensorStatistics]
    samples: int


def calibrate(model: Model, points: InsertionPoints, data: Dataset, progress: Progress) -> Statistics:
    """Requires a prepared model; the extremes come first, for the histograms lie between them."""
    # Tensors that keep another's grid need no statistics of their own.
    names = [tensor.name for tensor in points.tensors.values() if tensor.same_qparams_as is None]
    if not names:  # only weights are quantized
        return Statistics({}, len(data))
    session = Session(with_outputs(model.proto, names), model.source)
    batch = fitting_batch(session, data)
    extremes = {name: Extremes() for name in names}
    done = _fill(extremes, session, data, batch, progress, 0)
    for name, seen in extremes.items():
        if not seen.is_finite:
            raise ModelError(
                f"{model.source}: tensor '{name}' becomes NaN or infinite on the calibration data.",
                "Check that the data is preprocessed as the model expects.",
            )
    histograms = {name: Histogram(extremes[name]) for name in names}
    _fill(histograms, session, data, batch, progress, done)
    return Statistics({name: histogram.statistics() for name, histogram in histograms.items()}, len(data))


def _fill(
    seen: Mapping[str, Extremes | Histogram], session: Session, data: Dataset, batch: int, progress: Progress, done: int
) -> int:
    """One pass over the data, of which every core takes some of the tensors; gives the samples of all passes so far."""
    workers, names = default_workers(), list(seen)
    for feed in data.batches(batch):
        samples, tensors, counts = samples_in(feed, data), session.run(feed), positions_that_count(feed)

        def update(
            first: int, tensors: Tensors = tensors, samples: int = samples, counts: Counts | None = counts
        ) -> None:
            for name in names[first::workers]:
                seen[name].update(repeated(tensors[name], counts), samples)

        in_threads(update, range(workers))
        done += samples
        progress("calibrate", done, 2 * len(data))
    return done
