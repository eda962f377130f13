"""Data whose arrays have samples along the first axis, cut into batches."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from onnxcalib.data.arrays import give_back
from onnxcalib.data.check import check_axes, check_counts, check_dtype, check_finite, check_labels
from onnxcalib.data.spec import LABELS, Array, Feed, InputSpec, Labels, show
from onnxcalib.errors import DataError

Numbers: TypeAlias = NDArray[np.int64]


class Rows(Protocol):
    """The samples of one input, read a few at a time."""

    @property
    def count(self) -> int:
        """The number of samples."""

    def read(self, samples: Numbers) -> Array:
        """A fresh array of the samples of these numbers, in this order."""

    def where(self, index: int) -> str:
        """Where a sample lies, for messages."""


class ArrayRows:
    """Samples along the first axis of one array, in memory or mapped."""

    def __init__(self, array: Array, title: str) -> None:
        self._array = array
        self._title = title
        self.count = len(array)

    def read(self, samples: Numbers) -> Array:
        """A copy, so that nobody can write into the data."""
        copy = np.ascontiguousarray(self._array[samples])
        give_back(self._array)
        return copy

    def where(self, index: int) -> str:
        """The array and the sample."""
        return f"{self._title}, sample {index},"


class FileRows:
    """Samples in files, each of which holds one or more; one file at a time is open."""

    def __init__(self, titles: Sequence[str], counts: Sequence[int], load: Callable[[int], Array]) -> None:
        self._titles = titles
        self._ends = list(accumulate(counts))
        self._load = load
        self._last: tuple[int, Array] | None = None  # a file with many samples is not opened for each of them
        self.count = self._ends[-1]

    def read(self, samples: Numbers) -> Array:
        """The samples, from as many files as they lie in."""
        # In the order of the files, so that each is opened once.
        found = {sample: self._row(sample) for sample in sorted(samples.tolist())}
        return np.stack([found[sample] for sample in samples.tolist()])

    def where(self, index: int) -> str:
        """The file and the sample."""
        return f"{self._titles[bisect_right(self._ends, index)]}, sample {index},"

    def _row(self, sample: int) -> Array:
        file = bisect_right(self._ends, sample)
        return np.asarray(self._open(file)[sample - self._ends[file]])  # counted from the file's end

    def _open(self, file: int) -> Array:
        if self._last is None or self._last[0] != file:
            array = self._load(file)
            if len(array) != self._ends[file] - (self._ends[file - 1] if file else 0):
                title = self._titles[file]
                raise DataError(f"{title} changed while it was in use.", "Leave the data alone during a run.")
            self._last = (file, array)
        return self._last[1]


@dataclass(frozen=True, eq=False)
class SampleDataset:
    """Samples of every input, by their numbers in the rows; `batch` is the batch size that the model fixes."""

    source: str
    labels: Labels | None
    rows: Mapping[str, Rows]
    whole: frozenset[str]  # inputs whose every entry is a whole tensor, with no batch axis to cut
    batch: int | None
    samples: Numbers

    def __len__(self) -> int:
        """The number of samples, in whole batches where the model fixes their size."""
        return len(self.samples)

    def batches(self, size: int) -> Iterator[Feed]:
        """Yield feeds of `size` samples, or of the batch size that the model fixes."""
        if size < 1:
            raise DataError(f"The batch size is {size}.", "Give 1 or more.")
        size = self.batch or size
        parts = (self.samples[start : start + size] for start in range(0, len(self), size))
        return ({name: self._read(name, part) for name in self.rows} for part in parts)

    def _read(self, name: str, samples: Numbers) -> Array:
        rows = self.rows[name]
        array = check_finite(rows.read(samples), lambda row: rows.where(int(samples[row])))
        return np.asarray(array[0]) if name in self.whole else array

    def place(self, sample: int) -> int:
        """Where a sample lies in the data as it was given."""
        return int(self.samples[sample])

    def sizes(self) -> list[int]:
        """The samples in each piece that cannot be cut."""
        step = self.batch or 1
        return [step] * (len(self) // step)

    def part(self, first: int, last: int) -> SampleDataset:
        """The pieces from first to last."""
        step = self.batch or 1
        return self._of(slice(first * step, last * step))

    def chosen(self, pieces: Sequence[int]) -> SampleDataset:
        """The pieces of these numbers."""
        step = self.batch or 1
        return self._of((np.asarray(pieces, np.int64)[:, None] * step + np.arange(step)).reshape(-1))

    def shuffled(self, rng: np.random.Generator) -> SampleDataset:
        """The samples in another order, which also decides who shares a batch."""
        return self._of(rng.permutation(len(self)))

    def _of(self, chosen: slice | Numbers) -> SampleDataset:
        return replace(self, labels=None if self.labels is None else self.labels[chosen], samples=self.samples[chosen])


def join_rows(
    source: str,
    inputs: Sequence[InputSpec],
    rows: Mapping[str, Rows],
    labels: Array | None,
    whole: frozenset[str] = frozenset(),
) -> SampleDataset:
    """Put the samples of all inputs together, once they agree on how many there are."""
    hint = "Every array has one entry a sample; give an input without a batch axis one axis more, as [samples, ...]."
    count = check_counts({name: column.count for name, column in rows.items()}, source, hint)
    if count == 0:
        raise DataError(f"{source} holds no samples.", "Give at least one sample.")
    known = None if labels is None else check_labels(labels, count, f"Array '{LABELS}' of {source}")
    batch = _batch([spec for spec in inputs if spec.name not in whole], bool(whole), source)
    if batch is not None and count < batch:
        hint = f"Give at least {batch} samples, or export the model with a batch axis of any size."
        raise DataError(f"{source} holds {count} samples, but the model's batch size is fixed at {batch}.", hint)
    if batch is not None:
        count -= count % batch
    return SampleDataset(source, None if known is None else known[:count], rows, whole, batch, np.arange(count))


def _batch(inputs: Sequence[InputSpec], single: bool, source: str) -> int | None:
    """The one batch size that the inputs fix, if they fix one; 1 if the data has whole tensors."""
    fixed = {spec.name: spec.shape[0] for spec in inputs if spec.shape[0] is not None}
    sizes = {1, *fixed.values()} if single else set(fixed.values())
    if len(sizes) > 1:
        listed = ", ".join(f"'{name}' {size}" for name, size in fixed.items())
        hint = "Give each array whose first axis is no batch axis one axis more, as [samples, ...]."
        raise DataError(f"The inputs do not share a batch axis that {source} can be cut along: {listed}.", hint)
    return sizes.pop() if sizes else None


def from_arrays(
    source: str, inputs: Sequence[InputSpec], arrays: Mapping[str, Array], labels: Array | None
) -> SampleDataset:
    """Samples from one array an input; an array with one axis more than its input holds whole tensors."""
    rows, whole = {}, frozenset(spec.name for spec in inputs if arrays[spec.name].ndim == spec.rank + 1)
    for spec in inputs:
        array = arrays[spec.name]
        title = f"Array '{spec.name}' of {source}"
        check_dtype(array.dtype, spec, title)
        if array.ndim == 0:
            raise DataError(f"{title} is a single number.", f"Give it one axis more, as {show((None, *spec.shape))}.")
        sample = spec.shape if spec.name in whole else spec.shape[1:]
        check_axes(array.shape, (None, *sample), spec, title)
        rows[spec.name] = ArrayRows(array, title)
    return join_rows(source, inputs, rows, labels, whole)
