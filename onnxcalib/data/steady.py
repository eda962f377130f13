"""That data gives the same samples whenever it is read: what models make of them is compared by their place."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from onnxcalib.data.spec import Dataset, Feed, Labels
from onnxcalib.errors import DataError

END = b""  # in place of the feed after the last


def fingerprint(feed: Feed) -> bytes:
    """Names the content of a feed: its inputs, their types, shapes and values."""
    total = hashlib.blake2b(digest_size=16)
    for name, array in sorted(feed.items()):
        total.update(f"{name} {array.dtype} {array.shape} ".encode())
        # The bytes of an array of objects are addresses.
        plain = np.array(repr(array.tolist())) if array.dtype.hasobject else array
        total.update(np.ascontiguousarray(plain).reshape(-1).view(np.uint8).data)
    return total.digest()


def other_samples(source: str) -> DataError:
    """What to say of data that changed from one pass to the next."""
    hint = "Turn shuffling and random augmentation off, or give arrays or a list, which stay as they are."
    return DataError(f"{source} gave other samples when it was read again.", hint)


@dataclass(frozen=True, eq=False)
class SteadyDataset:
    """A dataset of somebody's own class; each feed is compared with the one that batches of this size gave before."""

    own: Dataset
    _seen: dict[tuple[int, int], bytes] = field(default_factory=dict, init=False)

    @property
    def labels(self) -> Labels | None:
        """The class of every sample, or None when the data has none."""
        return self.own.labels

    @property
    def source(self) -> str:
        """Where the data came from."""
        return self.own.source

    def __len__(self) -> int:
        """The number of samples."""
        return len(self.own)

    def batches(self, size: int) -> Iterator[Feed]:
        """Yield the dataset's own feeds, as long as they are those of the first time."""
        number = -1
        for number, feed in enumerate(self.own.batches(size)):
            self._compare(size, number, fingerprint(feed))
            yield feed
        self._compare(size, number + 1, END)

    def _compare(self, size: int, number: int, found: bytes) -> None:
        # Batches of another size are not comparable: they may be padded to the longest of their samples.
        if self._seen.setdefault((size, number), found) != found:
            raise other_samples(self.source)
