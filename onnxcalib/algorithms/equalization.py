"""How far apart the channels of a tensor lie: it has one scale, of which its quietest channels use few steps."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from onnxcalib.algorithms.channel_factors import Channels, Reader, best_exponents
from onnxcalib.algorithms.held import Held
from onnxcalib.data import Dataset, first
from onnxcalib.model.channel_groups import ChannelGroup
from onnxcalib.model.equalize import QUARTERS, Exponents, IntArray
from onnxcalib.model.graph import GraphIndex
from onnxcalib.model.prepare import Model
from onnxcalib.model.subgraph import with_outputs
from onnxcalib.progress import Progress
from onnxcalib.recipe import Precision
from onnxcalib.runtime.session import DRAWN_BYTES, Session, fitting_batch, stream

FloatArray = npt.NDArray[np.float64]

SAMPLES = 256
# That tell ranges of channels well enough to scale them before layers whose weights pay for it: ResNet-20 at w4a4 lost
# 46 to 121 % more by it with one, 35 and 50 % with four, a fifth less with sixteen, but 9 and 21 % more with 64.
ENOUGH = 16
VALUES = 2048  # of a channel that are looked at, as many of each sample


@dataclass(frozen=True)
class Equalization:
    """What brings the channels of layers nearer to the range of their loudest."""

    exponents: Exponents


def measure_channels(
    model: Model,
    groups: Sequence[ChannelGroup],
    precisions: Mapping[str, Precision],
    data: Dataset,
    progress: Progress,
) -> Equalization:
    """Requires groups that can be equalized, and what layers will have; those that are even already are left out."""
    if len(data) < ENOUGH:
        groups = [group for group in groups if group.is_free]
    if not groups:
        return Equalization({})
    found: dict[str, IntArray] = {}
    index = GraphIndex(model.proto.graph)
    with tempfile.TemporaryDirectory(prefix="onnxcalib_") as folder:
        watched = _watched(model, groups, first(data, SAMPLES), Path(folder), progress)
        for group in groups:
            seen = {name: Channels.of(watched.magnitudes(name), group.channels) for name in group.read}
            room = np.full(group.channels, np.inf)
            for name in group.clipped:
                peaks = watched.peaks[name]
                left = np.log2(group.limit / np.where(peaks > 0, peaks, 1.0))
                room = np.minimum(room, np.floor(QUARTERS * left))
            readers = {it.name: Reader.of(it, index.value(it.weight), group.channels) for it in group.readers}
            exponents = best_exponents(group, seen, room, readers, precisions)
            if exponents.any():
                found |= {maker.name: exponents for maker in group.makers}
    return Equalization(found)


@dataclass
class _Watched:
    """Of some tensors: the peak of each channel, and drawn magnitudes that wait on disk."""

    peaks: dict[str, FloatArray]
    held: dict[str, Held]

    def magnitudes(self, name: str) -> FloatArray:
        """A row for each channel."""
        return np.concatenate(list(self.held[name].batches()), axis=1).astype(np.float64)


def _watched(model: Model, groups: Sequence[ChannelGroup], data: Dataset, folder: Path, progress: Progress) -> _Watched:
    names = list(dict.fromkeys(name for group in groups for name in (*group.read, *group.clipped)))
    held = {name: Held(folder / f"{place}.bin") for place, name in enumerate(names)}
    watched, rng = _Watched(dict.fromkeys(names, np.zeros(())), held), np.random.default_rng(0)
    of_each, done = -(-VALUES // len(data)), 0
    session = Session(with_outputs(model.proto, names), model.source)
    for samples, tensors in stream(session, data, fitting_batch(session, data, DRAWN_BYTES)):
        for name in names:
            values = np.abs(np.moveaxis(tensors[name], 1, 0).reshape(tensors[name].shape[1], -1))
            watched.peaks[name] = np.maximum(watched.peaks[name], values.max(1))
            held[name].append(values[:, rng.integers(values.shape[1], size=of_each * samples)])
        done += samples
        progress("equalize", min(done, len(data)), len(data))
    return watched
