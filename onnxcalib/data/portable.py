"""Data that can go to another process: the feeds of one batch size, whatever they were made from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from onnxcalib.data.spec import Dataset, Feed, Labels


@dataclass(frozen=True, eq=False)
class Portable:
    """A dataset that is read in batches of one size; on its way it becomes a list of these."""

    own: Dataset
    size: int

    @property
    def labels(self) -> Labels | None:
        """What is known of every sample."""
        return self.own.labels

    @property
    def source(self) -> str:
        """Where the data came from."""
        return self.own.source

    def __len__(self) -> int:
        """The number of samples."""
        return len(self.own)

    def batches(self, size: int) -> Iterator[Feed]:
        """The feeds, which come in no other size."""
        assert size == self.size, "data on its way to other processes is read in batches of one size"
        return self.own.batches(size)

    def __reduce__(self) -> tuple[Any, ...]:
        return Feeds, (self.source, self.labels, len(self), self.size, list(self.batches(self.size)))


@dataclass(frozen=True, eq=False)
class Feeds:
    """The same data, seen from another process."""

    source: str
    labels: Labels | None
    samples: int
    size: int
    feeds: Sequence[Feed]

    def __len__(self) -> int:
        """The number of samples."""
        return self.samples

    def batches(self, size: int) -> Iterator[Feed]:
        """The feeds, which come in no other size."""
        assert size == self.size, "data that came from another process is read in batches of one size"
        return iter(self.feeds)
