"""Samples mixed in pairs: like samples that a network has not seen, made of samples that it may know by heart."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from onnxcalib.data.check import samples_in
from onnxcalib.data.spec import Dataset, Feed

SHARE = 0.6  # of the sample itself; the rest is its partner's


@dataclass(frozen=True, eq=False)
class MixedPairs:
    """The samples of a dataset, each mixed with the one that stands some places before it in its batch.

    A feed of one sample is mixed with the feed before it, if that has the same shapes.
    """

    plain: Dataset
    places: int
    labels = None  # a mixture has no class

    @property
    def source(self) -> str:
        """Where the samples came from."""
        return self.plain.source

    def __len__(self) -> int:
        """The number of samples."""
        return len(self.plain)

    def batches(self, size: int) -> Iterator[Feed]:
        """Yield the feeds of the dataset, mixed."""
        before: Feed | None = None
        for feed in self.plain.batches(size):
            if samples_in(feed) > 1:
                yield _mixed(feed, {name: np.roll(array, self.places, axis=0) for name, array in feed.items()})
            else:
                yield _mixed(feed, before if before is not None else feed)
            before = feed


def can_be_mixed(dataset: Dataset) -> bool:
    """Whether every input holds real numbers; a token or an index has no mixture."""
    feed = next(iter(dataset.batches(1)))
    return all(np.issubdtype(array.dtype, np.floating) for array in feed.values())


def _mixed(feed: Feed, partners: Feed) -> Feed:
    if any(array.shape != partners[name].shape for name, array in feed.items()):
        return feed
    return {
        name: (SHARE * array + (1 - SHARE) * partners[name]).astype(array.dtype, copy=False)
        for name, array in feed.items()
    }
