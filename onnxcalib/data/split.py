"""The order of a dataset and its parts: the first samples, and samples held out."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from onnxcalib.data.feeds import FeedDataset, from_dataset
from onnxcalib.data.samples import SampleDataset
from onnxcalib.data.spec import Dataset
from onnxcalib.data.stored import stored
from onnxcalib.errors import DataError

HELD_OUT = 128  # samples at most; half as many judge too roughly whether training helps
FEWEST = 8  # samples, of which some are held out
ORDER = 0x0D0E  # beside the seed, so that training draws other numbers from it


def shuffled(dataset: Dataset, seed: int) -> Dataset:
    """The samples in the one order that the seed names, whatever holds them; feeds of many sizes stay whole."""
    pieces = pieces_of(dataset)
    pieces = pieces if isinstance(pieces, SampleDataset) else stored(pieces)
    return pieces.shuffled(np.random.default_rng([seed, ORDER]))


def place_of(dataset: Dataset, sample: int) -> int:
    """Where a sample lies in the data as it was given, for messages."""
    return dataset.place(sample) if isinstance(dataset, SampleDataset | FeedDataset) else sample


def first(dataset: Dataset, n: int) -> Dataset:
    """Only the first n samples, rounded up to whole feeds or to the batch size that the model fixes."""
    if n < 1:
        raise DataError(f"The first {n} samples of {dataset.source} are none.", "Ask for 1 or more.")
    if n >= len(dataset):
        return dataset
    pieces = pieces_of(dataset)
    return pieces.part(0, _enough(pieces.sizes(), n))


def strata(dataset: Dataset, n: int, samples: Sequence[int]) -> tuple[Dataset, ...]:
    """Some n samples in two parts: at most half are of those asked for, and the first ones of what that leaves.

    All in one part where there are no more than n.
    """
    if n >= len(dataset):
        return (dataset,)
    pieces = pieces_of(dataset)
    sizes = pieces.sizes()
    ends = list(accumulate(sizes))
    wanted = list(dict.fromkeys(bisect_right(ends, sample) for sample in samples))
    wanted = wanted[: _enough([sizes[each] for each in wanted], n // 2)]
    others = [each for each in range(len(sizes)) if each not in set(wanted)]
    others = others[: _enough([sizes[each] for each in others], n - sum(sizes[each] for each in wanted))]
    return tuple(pieces.chosen(sorted(part)) for part in (wanted, others) if part)


def split(dataset: Dataset, held_out: int) -> tuple[Dataset, Dataset]:
    """All but the last samples, and the last `held_out`, rounded up to whole feeds or fixed batches."""
    parts = _cut(dataset, held_out) if held_out >= 1 else None
    if parts is None:
        message = f"{held_out} samples cannot be held out of the {len(dataset)} in {dataset.source}."
        raise DataError(message, "Hold out at least 1 and leave at least one batch, or give more data.")
    return parts


def train_validation_split(dataset: Dataset) -> tuple[Dataset, Dataset]:
    """Most of the samples to learn from, and the others to judge by; all of them twice if they cannot be split."""
    parts = _cut(dataset, min(HELD_OUT, len(dataset) // 4)) if len(dataset) >= FEWEST else None
    return parts or (dataset, dataset)


def why_not_parted(dataset: Dataset) -> str | None:
    """Why no samples are held out to judge by, and what would help; None where some are."""
    judged = "training is judged on the samples that it learns from"
    if len(dataset) < FEWEST:
        few = f"only {len(dataset)} sample{'s' * (len(dataset) > 1)}"
        return f"{few}: channels are not tuned, and {judged}; give at least {FEWEST}."
    if train_validation_split(dataset)[1] is dataset:
        pieces = len(pieces_of(dataset).sizes())
        batches = "one batch" if pieces == 1 else f"{pieces} batches"
        where = f"the {len(dataset)} samples come in {batches} that cannot be split"
        return f"{where}: tuning and {judged}; give more batches."
    return None


def _cut(dataset: Dataset, held_out: int) -> tuple[Dataset, Dataset] | None:
    """The first and the last pieces; None if the last would be all, as where a fixed batch holds every sample."""
    pieces = pieces_of(dataset)
    sizes = pieces.sizes()
    middle = len(sizes) - _enough(sizes[::-1], held_out)
    return (pieces.part(0, middle), pieces.part(middle, len(sizes))) if middle else None


def pieces_of(dataset: Dataset) -> SampleDataset | FeedDataset:
    """The same data, of which parts can be taken."""
    return dataset if isinstance(dataset, SampleDataset | FeedDataset) else from_dataset(dataset)


def _enough(sizes: list[int], wanted: int) -> int:
    """The fewest leading pieces that hold the samples wanted, or all of them."""
    return next((number for number, total in enumerate(accumulate(sizes), 1) if total >= wanted), len(sizes))
