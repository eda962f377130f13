"""Feeds stored on disk, so that they can be shuffled and cut into samples whatever they came from."""

from __future__ import annotations

import weakref

import numpy as np

from onnxcalib.data.feeds import FeedDataset, spooled, storing
from onnxcalib.data.samples import ArrayRows, SampleDataset
from onnxcalib.data.spec import Array
from onnxcalib.data.spool import Spool


def stored(dataset: FeedDataset) -> SampleDataset | FeedDataset:
    """Single samples where the feeds are batches of such; else the feeds, to be had in any order."""
    if not dataset.uniform:
        return spooled(dataset) if dataset.streamed else dataset
    columns: dict[str, _Column] = {}
    for feed in dataset.batches(1):
        for name, array in feed.items():
            with storing():
                columns.setdefault(name, _Column(array)).add(array)
    rows = {
        name: ArrayRows(column.array(len(dataset)), f"Array '{name}' of the {dataset.source}")
        for name, column in columns.items()
    }
    samples = np.arange(len(dataset))
    return SampleDataset(dataset.source, dataset.labels, rows, frozenset(), dataset.fixed, samples)


class _Column:
    """The samples of one input, one after the other in a temporary file."""

    def __init__(self, like: Array) -> None:
        self._spool, self._dtype, self._shape = Spool(), like.dtype, like.shape[1:]

    def add(self, array: Array) -> None:
        # Written, not mapped: a full disk is then an error and not a signal.
        self._spool.file.write(np.ascontiguousarray(array).tobytes())

    def array(self, count: int) -> Array:
        self._spool.file.flush()
        mapped = np.memmap(self._spool.file, self._dtype, "r", shape=(count, *self._shape))
        weakref.finalize(mapped, id, self._spool)  # the file stays while it is mapped
        return mapped
