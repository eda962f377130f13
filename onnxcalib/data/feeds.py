"""Data that comes as whole feeds, which are run as they are."""

from __future__ import annotations

import contextlib
import tempfile
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, islice
from typing import Any

import numpy as np

from onnxcalib.data.arrays import map_at
from onnxcalib.data.check import check_feed, check_finite, samples_in
from onnxcalib.data.spec import Array, Dataset, Feed, InputSpec, Labels
from onnxcalib.data.spool import Spool
from onnxcalib.data.steady import fingerprint, other_samples
from onnxcalib.errors import DataError


@dataclass(frozen=True)
class Place:
    """Where a feed lies in the data as it was given."""

    number: int
    sample: int  # the number of its first
    count: int
    content: bytes | None  # its fingerprint, if it may change


@dataclass(frozen=True, eq=False)
class FeedDataset:
    """Whole feeds; `read` yields those of the given numbers, of which a stream can give a range only."""

    source: str
    labels: Labels | None
    places: tuple[Place, ...]
    read: Callable[[Sequence[int]], Iterator[Feed]]
    title: Callable[[int], str]
    streamed: bool = False
    uniform: bool = False  # all feeds are batches of samples of one shape, of one size but for the last
    fixed: int | None = None  # the batch size that the model fixes

    def __len__(self) -> int:
        """The number of samples."""
        return sum(self.sizes())

    def batches(self, size: int) -> Iterator[Feed]:  # noqa: ARG002 - a feed cannot be cut
        """Yield the feeds as they are, whatever `size` says."""
        found = 0
        for place, feed in zip(self.places, self.read([place.number for place in self.places]), strict=False):
            if samples_in(feed) != place.count or (place.content and place.content != fingerprint(feed)):
                break
            yield {name: check_finite(array, partial(self._where, name, place)) for name, array in feed.items()}
            found += 1
        if found < len(self.places):
            raise other_samples(self.source)

    def _where(self, name: str, place: Place, row: int) -> str:
        sample = place.sample + (row if place.count > 1 else 0)
        return f"Array '{name}' of {self.title(place.number)}, sample {sample},"

    def place(self, sample: int) -> int:
        """Where a sample lies in the data as it was given."""
        ends = list(accumulate(self.sizes(), initial=0))
        feed = bisect_right(ends, sample) - 1
        return self.places[feed].sample + sample - ends[feed]

    def sizes(self) -> list[int]:
        """The samples in each piece that cannot be cut."""
        return [place.count for place in self.places]

    def part(self, first: int, last: int) -> FeedDataset:
        """The pieces from first to last."""
        return self._of(range(first, last))

    def chosen(self, pieces: Sequence[int]) -> FeedDataset:
        """The pieces of these numbers; a stream has them only in its own order, from the first on."""
        return self._of(range(len(pieces)) if self.streamed else pieces)

    def shuffled(self, rng: np.random.Generator) -> FeedDataset:
        """The pieces in another order, unless they come as a stream."""
        return self if self.streamed else self._of(rng.permutation(len(self.places)))

    def _of(self, pieces: Iterable[int]) -> FeedDataset:
        chosen, labels = list(pieces), self.labels
        if labels is not None:
            ends = list(accumulate(self.sizes(), initial=0))
            labels = np.concatenate([labels[ends[piece] : ends[piece + 1]] for piece in chosen])
        return replace(self, labels=labels, places=tuple(self.places[piece] for piece in chosen))


def from_files(
    source: str, inputs: Sequence[InputSpec], titles: Sequence[str], load: Callable[[int], object]
) -> FeedDataset:
    """One feed a file or folder; each is looked at once on opening and read again when it is wanted."""

    def read(numbers: Sequence[int]) -> Iterator[Feed]:
        return (check_feed(load(number), inputs, titles[number])[0] for number in numbers)

    found = _survey((load(number) for number in range(len(titles))), inputs, source, titles.__getitem__)
    return FeedDataset(source, found.labels, found.places, read, titles.__getitem__, **found.cut)


def from_iterable(
    source: str, inputs: Sequence[InputSpec], feeds: Iterable[object], *, batched: bool = False
) -> FeedDataset:
    """Feeds that a Python object yields, every time it is asked; a sequence is read at any place."""
    title = partial(_title, f"the {source}")

    def items(numbers: Sequence[int]) -> Iterable[object]:
        if isinstance(feeds, Sequence):
            return (feeds[number] for number in numbers if number < len(feeds))
        return islice(feeds, numbers[0], numbers[-1] + 1)

    def read(numbers: Sequence[int]) -> Iterator[Feed]:
        for number, item in zip(numbers, items(numbers), strict=False):
            yield check_feed(item, inputs, title(number))[0]

    found = _survey(feeds, inputs, source, title, lambda _, feed: fingerprint(feed), batched=batched)
    streamed = not isinstance(feeds, Sequence)
    return FeedDataset(source, found.labels, found.places, read, title, streamed, **found.cut)


def from_one_shot(
    source: str, inputs: Sequence[InputSpec], feeds: Iterable[object], *, batched: bool = False
) -> FeedDataset:
    """Feeds that can be had only once: they are written to a temporary folder, one in memory at a time."""
    spool, title = _SpooledFeeds(inputs), partial(_title, f"the {source}")
    found = _survey(feeds, inputs, source, title, spool.write, batched=batched)
    return FeedDataset(source, found.labels, found.places, spool.read, title, **found.cut)


def from_dataset(dataset: Dataset) -> FeedDataset:
    """Feeds of somebody else's dataset, one sample each if it can, so that parts of it can be taken."""

    def read(numbers: Sequence[int]) -> Iterator[Feed]:
        return islice(dataset.batches(1), numbers[0], numbers[-1] + 1)

    cut = _Cut()
    places = _places([(samples_in(cut.seen(feed)), None) for feed in dataset.batches(1)])
    samples = sum(place.count for place in places)
    if dataset.labels is not None and len(dataset.labels) != samples:
        message = f"{dataset.source} has {len(dataset.labels)} labels for {samples} samples."
        raise DataError(message, "Give one label for every sample.")
    # It gives one sample where it can: more are a batch that the model fixes.
    fixed = places[0].count if places and places[0].count > 1 else None
    uniform = cut.uniform(places) and (fixed is None or places[-1].count == fixed)
    title = partial(_title, dataset.source)
    return FeedDataset(dataset.source, dataset.labels, places, read, title, True, uniform, fixed)


def spooled(dataset: FeedDataset) -> FeedDataset:
    """Feeds of a stream, stored so that they can be had in any order."""
    spool: _SpooledFeeds | None = None
    for number, feed in enumerate(dataset.batches(1)):
        spool = spool or _SpooledFeeds([InputSpec(name, array.dtype, array.shape) for name, array in feed.items()])
        spool.write(number, feed)
    assert spool is not None, "a dataset has feeds"
    places = tuple(replace(place, number=number, content=None) for number, place in enumerate(dataset.places))
    return replace(dataset, read=spool.read, places=places, streamed=False)


def _title(source: str, number: int) -> str:
    return f"feed {number} of {source}"


@dataclass(frozen=True)
class _Survey:
    places: tuple[Place, ...]
    labels: Labels | None
    cut: dict[str, Any]  # whether and how feeds can be cut into samples


class _Cut:
    """Looks at feeds to tell whether they are batches of samples of one shape."""

    def __init__(self) -> None:
        self._kinds: set[tuple[Any, ...]] = set()

    def seen(self, feed: Feed, *, batched: bool = True) -> Feed:
        lengths = {array.shape[:1] for array in feed.values()}
        objects = any(array.dtype.hasobject for array in feed.values())
        whole = not batched or len(lengths) > 1 or () in lengths or objects
        shapes = ((name, array.dtype, array.shape[1:]) for name, array in sorted(feed.items()))
        self._kinds.add(() if whole else tuple(shapes))
        return feed

    def uniform(self, places: Sequence[Place]) -> bool:
        """Feeds of many sizes are sequences of many lengths rather than what a loader batched."""
        counts = [place.count for place in places]
        return (
            len(self._kinds) == 1 and () not in self._kinds and len(set(counts[:-1])) <= 1 and counts[-1] <= counts[0]
        )


def _survey(
    items: Iterable[object],
    inputs: Sequence[InputSpec],
    source: str,
    title: Callable[[int], str],
    keep: Callable[[int, Feed], bytes | None] = lambda _number, _feed: None,
    *,
    batched: bool = False,  # whether dicts are batches of samples
) -> _Survey:
    """Check every feed once; tell where each lies, the labels of all, and whether they can be cut."""
    found, labels, cut = [], [], _Cut()
    for number, item in enumerate(items):
        feed, some = check_feed(item, inputs, title(number))
        # A dict is fed as it is, for its first axis may be time; a loader's batches, and what has labels, are samples.
        labelled = some is not None and len(some) > 1
        samples = batched or not isinstance(item, Mapping) or labelled or samples_in(feed) == 1
        found.append((samples_in(cut.seen(feed, batched=samples)), keep(number, feed)))
        if some is not None:
            labels.append(some)
        if len(labels) not in (0, len(found)):
            hint = "Give labels in every feed, or in none."
            raise DataError(f"Some feeds have labels and others none: see {title(number)}.", hint)
    if not found:
        raise DataError(f"The {source} yields no feeds.", "Give at least one; a generator that was used up is empty.")
    places, sizes = _places(found), {spec.shape[0] for spec in inputs if spec.shape}
    uniform = cut.uniform(places) and len(sizes) == 1
    how = {"uniform": uniform, "fixed": next(iter(sizes)) if uniform else None}
    return _Survey(places, np.concatenate(labels) if labels else None, how)


def _places(found: Sequence[tuple[int, bytes | None]]) -> tuple[Place, ...]:
    starts = accumulate((count for count, _ in found), initial=0)
    return tuple(Place(number, start, *feed) for number, (start, feed) in enumerate(zip(starts, found, strict=False)))


class _SpooledFeeds:
    """Feeds in a temporary file."""

    def __init__(self, inputs: Sequence[InputSpec]) -> None:
        self._inputs = inputs
        self._starts: list[list[int]] = []  # of each feed, by input
        with storing():
            self._spool = Spool()

    def write(self, _number: int, feed: Feed) -> None:
        self._starts.append([])
        for spec in self._inputs:
            with storing(), self._spool.adding() as file:
                self._starts[-1].append(file.tell())
                np.save(file, feed[spec.name], allow_pickle=False)

    def read(self, numbers: Sequence[int]) -> Iterator[Feed]:
        for number in numbers:
            starts = zip(self._inputs, self._starts[number], strict=True)
            yield {spec.name: self._read(spec, start) for spec, start in starts}

    def _read(self, spec: InputSpec, start: int) -> Array:
        mapped = map_at(self._spool.file, f"the stored array of '{spec.name}'", start, self._spool.end)
        # The .npy format has no name for bfloat16 and its relatives, but keeps their bytes.
        return np.array(mapped).view(spec.dtype)


@contextlib.contextmanager
def storing() -> Iterator[None]:
    """What to say where there is no room for data that has to be stored."""
    try:
        yield
    except (OSError, ValueError) as error:
        hint = (
            "Free some disk space, set TMPDIR to a folder with more, or give an npz file, which is read where it lies."
        )
        raise DataError(f"The feeds cannot be stored in {tempfile.gettempdir()}: {error}.", hint) from error
