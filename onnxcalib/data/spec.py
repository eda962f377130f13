"""What a model input looks like, and what a set of data can do."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
from numpy.typing import NDArray

Array: TypeAlias = NDArray[Any]
Labels: TypeAlias = NDArray[Any]  # samples first; class indices are int64 with no other axis
Feed: TypeAlias = dict[str, Array]

LABELS = "labels"  # the one array name that data may hold beside the model's inputs


@dataclass(frozen=True)
class InputSpec:
    """One model input; an axis that is None takes any size, and the first axis is normally the batch."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int | None, ...]

    @property
    def rank(self) -> int:
        """The number of axes."""
        return len(self.shape)


@runtime_checkable
class Dataset(Protocol):
    """Samples that can be read again and again, always in the same order."""

    @property
    def labels(self) -> Labels | None:
        """What is known of every sample, such as its class; None when the data has no labels."""

    @property
    def source(self) -> str:
        """Where the data came from, for messages."""

    def __len__(self) -> int:
        """The number of samples."""

    def batches(self, size: int) -> Iterator[Feed]:
        """Yield feeds of `size` samples, or of what the model or the data fixes."""


def show(shape: tuple[int | None, ...]) -> str:
    """A shape for a message, such as [any, 3, 8, 8]."""
    return f"[{', '.join('any' if axis is None else str(axis) for axis in shape)}]"
