"""More samples from few: images mirrored, shifted, with a piece of another: a few hundred are soon known by heart."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from onnxcalib.data.samples import Numbers, Rows, SampleDataset
from onnxcalib.data.spec import Array, Dataset, Feed
from onnxcalib.data.split import pieces_of

SHIFT = 1 / 9  # of an image's height and width, at most
PATCH = 0.7  # the same, of a piece of another image
CHANNELS = (1, 3, 4)
SMALLEST = 16  # pixels along a side of what is taken for an image


def augmented(dataset: Dataset, form: int, seed: int) -> Dataset:
    """Each sample in its form of that number, of which 0 is as it is; other data than images comes back as it is."""
    pieces = pieces_of(dataset)
    if not isinstance(pieces, SampleDataset) or not any(map(_shows_images, pieces.rows.values())):
        return dataset
    rows = {name: _AugmentedRows(rows, pieces.samples, form, seed) for name, rows in pieces.rows.items()}
    return replace(pieces, rows=rows)


def endless(dataset: Dataset, size: int, seed: int) -> Iterator[Feed]:
    """The samples again and again, `size` at a time, each time in other forms and another order."""
    for epoch in itertools.count():
        again = augmented(dataset, epoch, seed)
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
class _AugmentedRows:
    """Rows in another form, which depends on nothing but the sample's number, its own and the seed."""

    rows: Rows
    others: Numbers  # samples that lend pieces; those that are held out do not
    form: int
    seed: int

    @property
    def count(self) -> int:
        return self.rows.count

    def read(self, samples: Numbers) -> Array:
        if not self.form:
            return self.rows.read(samples)
        return np.concatenate([self._read(sample) for sample in samples.tolist()])

    def _read(self, sample: int) -> Array:
        # All inputs of a sample draw alike: one may show what another does.
        rng = np.random.default_rng([self.seed, sample, self.form])
        images = self.rows.read(np.array([sample]))
        axes = _axes(images)
        if axes is None:
            return images
        other = rng.choice(self.others, 1)
        changed = _moved(images, axes, rng.uniform(-1, 1, 3))
        return _pasted(changed, self.rows.read(other), axes, rng.uniform(0, 1, 4))

    def where(self, index: int) -> str:
        return self.rows.where(index)


def _shows_images(rows: Rows) -> bool:
    return _axes(rows.read(np.zeros(1, np.int64))) is not None


def _moved(images: Array, axes: tuple[int, int], draws: Array) -> Array:
    """Mirrored or not, and shifted; what comes in at the border mirrors what is there."""
    mirror, *shares = draws
    changed = np.flip(images, axes[1]) if mirror < 0 else images
    for axis, share in zip(axes, shares, strict=True):
        size = images.shape[axis]
        places = np.abs(np.arange(size) + round(SHIFT * share * size))
        changed = np.take(changed, np.minimum(places, 2 * (size - 1) - places), axis)
    return changed


def _pasted(images: Array, others: Array, axes: tuple[int, int], draws: Array) -> Array:
    """With a piece of another image in its place: no pixel has a value that images do not have."""
    if images.shape != others.shape:
        return images
    changed, where = images.copy(), [slice(None)] * images.ndim
    for axis, share, begin in zip(axes, draws[:2], draws[2:], strict=True):
        size = images.shape[axis]
        side = round(PATCH * share * size)
        first = round(begin * (size - side))
        where[axis] = slice(first, first + side)
    changed[tuple(where)] = others[tuple(where)]
    return changed


def _axes(images: Array) -> tuple[int, int] | None:
    """Where height and width are, if the samples look like images."""
    if images.ndim == 4:
        for channels, axes in ((1, (2, 3)), (3, (1, 2))):
            if images.shape[channels] in CHANNELS and min(images.shape[axis] for axis in axes) >= SMALLEST:
                return axes
    return None
