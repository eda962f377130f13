"""Parts of a dataset: the first samples, and samples held out."""

from __future__ import annotations

import contextlib
from itertools import accumulate

from onnxcalib.data.feeds import FeedDataset, from_dataset
from onnxcalib.data.samples import SampleDataset
from onnxcalib.data.spec import Dataset
from onnxcalib.errors import DataError

HELD_OUT = 128  # samples at most; half as many judge too roughly whether training helps


def first(dataset: Dataset, n: int) -> Dataset:
    """Only the first n samples, rounded up to whole feeds or to the batch size that the model fixes."""
    if n < 1:
        raise DataError(f"The first {n} samples of {dataset.source} are none.", "Ask for 1 or more.")
    if n >= len(dataset):
        return dataset
    pieces = pieces_of(dataset)
    return pieces.part(0, _enough(pieces.sizes(), n))


def split(dataset: Dataset, held_out: int) -> tuple[Dataset, Dataset]:
    """All but the last samples, and the last `held_out`, rounded up to whole feeds or fixed batches."""
    pieces = pieces_of(dataset)
    sizes = pieces.sizes()
    last = _enough(sizes[::-1], held_out)
    if held_out < 1 or last >= len(sizes):
        message = f"{held_out} samples cannot be held out of the {len(dataset)} in {dataset.source}."
        raise DataError(message, "Hold out at least 1 and leave at least one batch, or give more data.")
    middle = len(sizes) - last
    return pieces.part(0, middle), pieces.part(middle, len(sizes))


def parted(dataset: Dataset) -> tuple[Dataset, Dataset]:
    """Most of the samples to learn from, and the others to judge by."""
    if len(dataset) >= 8:
        # Samples that come in one piece, as a model with a fixed batch takes them, cannot be parted.
        with contextlib.suppress(DataError):
            return split(dataset, min(HELD_OUT, len(dataset) // 4))
    return dataset, dataset


def pieces_of(dataset: Dataset) -> SampleDataset | FeedDataset:
    """The same data, of which parts can be taken."""
    return dataset if isinstance(dataset, SampleDataset | FeedDataset) else from_dataset(dataset)


def _enough(sizes: list[int], wanted: int) -> int:
    """The fewest leading pieces that hold the samples wanted, or all of them."""
    return next((number for number, total in enumerate(accumulate(sizes), 1) if total >= wanted), len(sizes))
