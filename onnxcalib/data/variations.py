"""More samples from few: images mirrored and shifted, as what trains on a few hundred soon knows them by heart."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from onnxcalib.data.parts import pieces_of
from onnxcalib.data.samples import Rows, SampleDataset
from onnxcalib.data.spec import Array, Dataset, Feed

SHIFT = 1 / 9  # of an image's height and width, at most
CHANNELS = (1, 3, 4)
SMALLEST = 16  # pixels along a side of what is taken for an image


def varied(dataset: Dataset, times: int, seed: int, since: int = 0) -> Dataset:
    """Each sample so many times in a row, in its forms from number `since` on, of which 0 is as it is.

    Other data than images comes back as it is.
    """
    pieces = pieces_of(dataset)
    if not isinstance(pieces, SampleDataset) or not any(_axes(rows.read(0, 1)) for rows in pieces.rows.values()):
        return dataset
    start, stop = pieces.start, pieces.stop
    rows = {name: _VariedRows(given, start, stop, since, times, seed) for name, given in pieces.rows.items()}
    labels = None if pieces.labels is None else np.repeat(pieces.labels, times)
    return replace(pieces, rows=rows, labels=labels, start=0, stop=times * (stop - start))


def endless(dataset: Dataset, size: int, seed: int) -> Iterator[Feed]:
    """The samples again and again, `size` at a time, each time in other forms and another order."""
    for epoch in itertools.count():
        again = varied(dataset, 1, seed, epoch)
        yield from _shuffled(again, size, np.random.default_rng([seed, epoch]))


def _shuffled(dataset: Dataset, size: int, rng: np.random.Generator) -> Iterator[Feed]:
    """All samples once; in their own order where they come as whole feeds."""
    pieces = pieces_of(dataset)
    if not isinstance(pieces, SampleDataset):
        yield from pieces.batches(size)
        return
    order = rng.permutation(len(pieces.sizes())).tolist()
    together = 1 if pieces.batch else size
    for start in range(0, len(order), together):
        feeds = [next(iter(pieces.part(at, at + 1).batches(1))) for at in order[start : start + together]]
        if len(feeds) == 1:
            yield feeds[0]
        else:
            yield {name: np.concatenate([feed[name] for feed in feeds]) for name in feeds[0]}


@dataclass(frozen=True)
class _VariedRows:
    """Rows in several forms; each depends on nothing but its numbers and the seed."""

    rows: Rows
    start: int
    stop: int
    since: int
    times: int
    seed: int

    @property
    def count(self) -> int:
        return self.times * (self.stop - self.start)

    def read(self, start: int, stop: int) -> Array:
        return np.concatenate([self._read(self.start + at // self.times, at % self.times) for at in range(start, stop)])

    def _read(self, sample: int, form: int) -> Array:
        plain, number = self.rows.read(sample, sample + 1), self.since + form
        return _in_another_form(plain, [self.seed, sample, number]) if number else plain

    def where(self, index: int) -> str:
        return self.rows.where(self.start + index // self.times)


def _in_another_form(images: Array, seed: list[int]) -> Array:
    """Mirrored or not, and shifted; what comes in at the border mirrors what is there."""
    axes = _axes(images)
    if axes is None:
        return images
    # All inputs of a sample draw alike: one may show what another does.
    mirror, *shares = np.random.default_rng(seed).uniform(-1, 1, 3)
    changed = np.flip(images, axes[1]) if mirror < 0 else images
    for axis, share in zip(axes, shares, strict=True):
        size = images.shape[axis]
        places = np.abs(np.arange(size) + round(SHIFT * share * size))
        changed = np.take(changed, np.minimum(places, 2 * (size - 1) - places), axis)
    return changed


def _axes(images: Array) -> tuple[int, int] | None:
    """Where height and width are, if the samples look like images."""
    if images.ndim == 4:
        for channels, axes in ((1, (2, 3)), (3, (1, 2))):
            if images.shape[channels] in CHANNELS and min(images.shape[axis] for axis in axes) >= SMALLEST:
                return axes
    return None
