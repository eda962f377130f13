"""How far apart the channels of a tensor lie: it has one scale, of which its quietest channels use few steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from onnxcalib.data import Dataset, first
from onnxcalib.model.equalize import DIGITS, QUARTERS, EqualizationPair, Exponents, IntArray
from onnxcalib.model.prepare import Model
from onnxcalib.model.subgraph import with_outputs
from onnxcalib.progress import Progress
from onnxcalib.runtime.session import DRAWN_BYTES, Session, fitting_batch, stream

FloatArray = npt.NDArray[np.float64]

SAMPLES = 256
VALUES = 2048  # of a channel that are looked at, as many of each sample
STEPS = 15  # of the grid that a channel's range is found for
SILENT = 1e-3  # of the loudest channel's range: what lies below is not worth a factor
SHARES = np.linspace(0.2, 1.0, 17)  # of its peak that a channel's range may be


@dataclass(frozen=True)
class Equalization:
    """What brings the channels of layers to the range of their loudest."""

    exponents: Exponents


def measure_channels(
    model: Model, pairs: Sequence[EqualizationPair], data: Dataset, progress: Progress
) -> Equalization:
    """Requires layers that can be equalized; those whose channels are even already are left out."""
    if not pairs:
        return Equalization({})
    data, rng = first(data, SAMPLES), np.random.default_rng(0)
    names = [each.maker.activated for each in pairs]
    kept: dict[str, list[FloatArray]] = {name: [] for name in names}
    peaks = dict.fromkeys(names, np.zeros(()))
    of_each, done = -(-VALUES // len(data)), 0
    session = Session(with_outputs(model.proto, names), model.source)
    for samples, tensors in stream(session, data, fitting_batch(session, data, DRAWN_BYTES)):
        for name in names:
            values = np.abs(np.moveaxis(tensors[name], 1, 0).reshape(tensors[name].shape[1], -1))
            peaks[name] = np.maximum(peaks[name], values.max(1))
            kept[name].append(values[:, rng.integers(values.shape[1], size=of_each * samples)].astype(np.float64))
        done += samples
        progress("equalize", min(done, len(data)), len(data))
    found = {}
    for each, name in zip(pairs, names, strict=True):
        exponents = _exponents(np.concatenate(kept[name], axis=1), peaks[name], each.limit)
        if exponents.any():
            found[each.maker.name] = exponents
    return Equalization(found)


def _exponents(values: FloatArray, peaks: FloatArray, limit: float) -> IntArray:
    ranges = best_ranges(values)
    loud = ranges > SILENT * ranges.max()
    exponents = np.zeros(len(ranges))
    exponents[loud] = np.rint(QUARTERS * np.log2(ranges.max() / ranges[loud]))
    # Where the activation cuts, a channel must not begin to be cut.
    room = np.floor(QUARTERS * np.log2(limit / np.where(peaks > 0, peaks, 1.0)))
    return np.asarray(np.clip(np.minimum(exponents, room), 0, len(DIGITS) - 1), np.int64)


def best_ranges(values: FloatArray) -> FloatArray:
    """For each row the top of the grid that rounds it with the least squared error."""
    peaks: FloatArray = values.max(1)
    least, best = np.full(len(values), np.inf), peaks.copy()
    for share in SHARES:
        step = np.maximum(share * peaks / STEPS, np.finfo(np.float64).tiny)[:, None]
        errors = ((np.minimum(np.rint(values / step), STEPS) * step - values) ** 2).mean(1)
        better = errors < least
        least, best = np.where(better, errors, least), np.where(better, share * peaks, best)
    return best
