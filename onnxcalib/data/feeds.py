"""Data that comes as whole feeds, which are run as they are."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import numpy as np

from onnxcalib.data.check import check_feed, check_finite, samples_in
from onnxcalib.data.spec import Dataset, Feed, InputSpec, Labels
from onnxcalib.errors import DataError


@dataclass(frozen=True, eq=False)
class FeedDataset:
    """Feeds from number `start` on; `counts` holds the samples in each, `read(a, b)` yields feeds a to b."""

    source: str
    labels: Labels | None
    counts: tuple[int, ...]
    read: Callable[[int, int], Iterator[Feed]]
    title: Callable[[int], str]
    start: int = 0

    def __len__(self) -> int:
        """The number of samples."""
        return sum(self.counts)

    def batches(self, size: int) -> Iterator[Feed]:  # noqa: ARG002 - a feed cannot be cut
        """Yield the feeds as they are, whatever `size` says."""
        found = 0
        for number, feed in enumerate(self.read(self.start, self.start + len(self.counts)), self.start):
            if samples_in(feed) != self.counts[found]:
                break
            yield {name: check_finite(array, self._where(name, number, found)) for name, array in feed.items()}
            found += 1
        if found < len(self.counts):
            hint = "Give a list, or an object whose iterator gives the same feeds every time."
            raise DataError(f"{self.source} gave other feeds when it was read again.", hint)

    def _where(self, name: str, number: int, found: int) -> Callable[[int], str]:
        def where(row: int) -> str:
            sample = sum(self.counts[:found]) + (row if self.counts[found] > 1 else 0)
            return f"Array '{name}' of {self.title(number)}, sample {sample},"

        return where

    def sizes(self) -> list[int]:
        """The samples in each piece that cannot be cut."""
        return list(self.counts)

    def part(self, first: int, last: int) -> FeedDataset:
        """The pieces from first to last."""
        low, high = sum(self.counts[:first]), sum(self.counts[:last])
        labels = None if self.labels is None else self.labels[low:high]
        return replace(self, labels=labels, counts=self.counts[first:last], start=self.start + first)


def from_files(
    source: str, inputs: Sequence[InputSpec], titles: Sequence[str], load: Callable[[int], object]
) -> FeedDataset:
    """One feed a file or folder; each is looked at once on opening and read again when it is wanted."""

    def read(first: int, last: int) -> Iterator[Feed]:
        return (check_feed(load(number), inputs, titles[number])[0] for number in range(first, last))

    counts, labels = _survey((load(number) for number in range(len(titles))), inputs, source, titles.__getitem__)
    return FeedDataset(source, labels, counts, read, titles.__getitem__)


def from_iterable(source: str, inputs: Sequence[InputSpec], feeds: Iterable[object]) -> FeedDataset:
    """Feeds that a Python object yields, every time it is asked."""

    def title(number: int) -> str:
        return f"feed {number} of the {source}"

    def read(first: int, last: int) -> Iterator[Feed]:
        for number, item in enumerate(islice(feeds, first, last), first):
            yield check_feed(item, inputs, title(number))[0]

    counts, labels = _survey(feeds, inputs, source, title)
    return FeedDataset(source, labels, counts, read, title)


def from_one_shot(source: str, inputs: Sequence[InputSpec], feeds: Iterable[object]) -> FeedDataset:
    """Feeds that can be had only once: they are written to a temporary folder, one in memory at a time."""
    spool = _Spool(inputs)

    def title(number: int) -> str:
        return f"feed {number} of the {source}"

    counts, labels = _survey(feeds, inputs, source, title, spool.write)
    return FeedDataset(source, labels, counts, spool.read, title)


def from_dataset(dataset: Dataset) -> FeedDataset:
    """Feeds of somebody else's dataset, one sample each if it can, so that parts of it can be taken."""

    def read(first: int, last: int) -> Iterator[Feed]:
        return islice(dataset.batches(1), first, last)

    counts = tuple(samples_in(feed) for feed in dataset.batches(1))
    if dataset.labels is not None and len(dataset.labels) != sum(counts):
        message = f"{dataset.source} has {len(dataset.labels)} labels for {sum(counts)} samples."
        raise DataError(message, "Give one label for every sample.")
    return FeedDataset(
        dataset.source, dataset.labels, counts, read, lambda number: f"feed {number} of {dataset.source}"
    )


def _survey(
    items: Iterable[object],
    inputs: Sequence[InputSpec],
    source: str,
    title: Callable[[int], str],
    keep: Callable[[int, Feed], None] | None = None,
) -> tuple[tuple[int, ...], Labels | None]:
    """Check every feed once; return the samples in each and the labels of all."""
    counts = []
    labels = []
    for number, item in enumerate(items):
        feed, some = check_feed(item, inputs, title(number))
        counts.append(samples_in(feed))
        if some is not None:
            labels.append(some)
        if len(labels) not in (0, len(counts)):
            hint = "Give labels in every feed, or in none."
            raise DataError(f"Some feeds have labels and others none: see {title(number)}.", hint)
        if keep is not None:
            keep(number, feed)
    if not counts:
        raise DataError(f"The {source} yields no feeds.", "Give at least one; a generator that was used up is empty.")
    return tuple(counts), np.concatenate(labels) if labels else None


class _Spool:
    """A temporary folder of feeds, one .npy file an array; it goes when nobody holds it any more."""

    def __init__(self, inputs: Sequence[InputSpec]) -> None:
        self._inputs = inputs
        with _writable():
            self._folder = Path(tempfile.mkdtemp(prefix="onnxcalib-"))
        weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)

    def write(self, number: int, feed: Feed) -> None:
        with _writable():
            for index, spec in enumerate(self._inputs):
                np.save(self._path(number, index), feed[spec.name], allow_pickle=False)

    def read(self, first: int, last: int) -> Iterator[Feed]:
        for number in range(first, last):
            feed = {}
            for index, spec in enumerate(self._inputs):
                array = np.load(self._path(number, index), allow_pickle=False)
                # The .npy format has no name for bfloat16 and its relatives, but keeps their bytes.
                feed[spec.name] = array.view(spec.dtype)
            yield feed

    def _path(self, number: int, index: int) -> Path:
        return self._folder / f"{number}_{index}.npy"


@contextlib.contextmanager
def _writable() -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:
        hint = "Free some disk space or set TMPDIR; or give a list, which is read again instead of being stored."
        raise DataError(f"The feeds cannot be stored in {tempfile.gettempdir()}: {error}.", hint) from error
