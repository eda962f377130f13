"""Feeds from Python: lists, iterables, generators, data readers, datasets; and parts of them."""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Iterator
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onnxcalib.data import Dataset, Feed, InputSpec, first, open_data, split
from onnxcalib.errors import DataError

F32 = np.dtype("float32")
X = InputSpec("x", F32, (None, 3))
STATE = InputSpec("state", F32, (2, 1, 4))


def feeds(*sizes: int) -> list[Feed]:
    whole = np.arange(sum(sizes) * 3, dtype=np.float32).reshape(-1, 3)
    ends = np.cumsum(sizes)
    return [{"x": whole[end - size : end]} for size, end in zip(sizes, ends, strict=True)]


def joined(data: Dataset, size: int = 4) -> np.ndarray:
    return np.concatenate([feed["x"] for feed in data.batches(size)])


class Reader:
    """What onnxruntime calls a CalibrationDataReader: it is its own iterator too."""

    def __init__(self, items: list[Feed]) -> None:
        self.items = iter(items)

    def get_next(self) -> Feed | None:
        return next(self.items, None)

    def __iter__(self) -> Reader:
        return self

    def __next__(self) -> Feed:
        return next(self.items)


class Again:
    """An iterable that starts anew every time."""

    def __init__(self, items: list[Feed]) -> None:
        self.items = items

    def __iter__(self) -> Iterator[Feed]:
        yield from self.items


class Stale(Again):
    """An iterable that always hands out the same iterator."""

    def __init__(self, items: list[Feed]) -> None:
        self.iterator = iter(items)

    def __iter__(self) -> Iterator[Feed]:
        return self.iterator


@pytest.mark.parametrize("make", [list, tuple, Again, iter, Reader, Stale, lambda items: (item for item in items)])
def test_every_kind_of_iterable_can_be_read_twice(make) -> None:
    data = open_data(make(feeds(2, 3, 1)), [X])
    assert len(data) == 6
    assert data.labels is None
    assert data.source.startswith("python")
    for size in (1, 4):
        assert [len(feed["x"]) for feed in data.batches(size)] == [2, 3, 1]
        assert np.array_equal(joined(data, size), np.concatenate([feed["x"] for feed in feeds(2, 3, 1)]))


@pytest.mark.parametrize("make", [list, iter])
def test_feeds_whose_inputs_share_no_batch_axis_count_one_each(make) -> None:
    inputs = [X, STATE, InputSpec("sr", np.dtype("int64"), ())]
    items = [
        {"x": np.zeros((1, 3), np.float32), "state": np.zeros((2, 1, 4), np.float32), "sr": np.array(number)}
        for number in range(3)
    ]
    data = open_data(make(items), inputs)
    assert len(data) == 3
    assert [int(feed["sr"]) for feed in data.batches(1)] == [0, 1, 2]
    assert next(data.batches(1))["sr"].shape == ()


@pytest.mark.parametrize("make", [list, iter])
def test_labels_in_feeds(make) -> None:
    items = [feed | {"labels": np.arange(len(feed["x"]))} for feed in feeds(2, 3)]
    data = open_data(make(items), [X])
    assert data.labels.tolist() == [0, 1, 0, 1, 2]
    assert all(feed.keys() == {"x"} for feed in data.batches(1))
    assert split(data, 2)[1].labels.tolist() == [0, 1, 2]
    del items[1]["labels"]
    with pytest.raises(DataError, match=r"feed 1.*every feed"):
        open_data(make(items), [X])


def test_one_shot_feeds_are_spooled_without_a_name_that_a_kill_could_leave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    data = open_data(iter(feeds(2, 2, 2)), [X])
    assert list(tmp_path.iterdir()) == []
    tail = split(data, 2)[1]
    del data
    gc.collect()
    assert joined(tail)[0, 0] == 12


def test_a_bad_feed_leaves_no_spool_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(DataError, match="feed 1"):
        open_data(iter([*feeds(1), {"x": 3}]), [X])
    gc.collect()
    assert list(tmp_path.iterdir()) == []


def test_a_temporary_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    with pytest.raises(DataError, match="cannot be stored"):
        open_data(iter(feeds(1)), [X])


def test_bfloat16_survives_the_spool_and_its_nan_is_found() -> None:
    spec = InputSpec("x", np.dtype(ml_dtypes.bfloat16), (None,))
    good, bad = (np.array([1.5, value], ml_dtypes.bfloat16) for value in (2, np.nan))
    data = open_data(iter([{"x": good}, {"x": bad}]), [spec])
    items = data.batches(1)
    feed = next(items)["x"]
    assert feed.dtype == spec.dtype
    assert feed.tolist() == [1.5, 2]
    with pytest.raises(DataError, match="sample 3, holds NaN"):
        next(items)


BAD = [
    ([], "yields no feeds"),
    ([[1, 2, 3]], "feed 0.*3 arrays.*inputs x"),
    ([3], "feed 0.*is a int"),
    ([{"y": 1}], "'x' has no array in feed 0"),
    ([*feeds(1), {"x": [[1.0, 2.0, 3.0]]}], "'x' of feed 1.*float64.*float32"),
    ([{"x": np.zeros((1, 4), np.float32)}], "axis 1 is 4"),
    ([{"x": np.zeros((1, 1, 3), np.float32)}], "3 axes"),
    ([{"x": np.zeros((0, 3), np.float32)}], "empty"),
    ([{"x": np.zeros((1, 3), np.float32), "extra": 1}], "'extra'.*no input"),
    ([{"x": [[1], [1, 2]]}], "not an array"),
    ([feeds(2)[0] | {"labels": [0]}], "'labels' of feed 0.*2 samples"),
    ([None], "is a NoneType"),
]


@pytest.mark.parametrize("make", [list, iter])
@pytest.mark.parametrize(("items", "words"), BAD)
def test_feeds_that_do_not_fit(make, items: list[object], words: str) -> None:
    with pytest.raises(DataError, match=words) as caught:
        open_data(make(items), [X])
    assert caught.value.hint


def test_lists_of_the_right_type_are_taken() -> None:
    data = open_data([{"n": [1, 2, 3]}], [InputSpec("n", np.dtype("int64"), (None,))])
    assert next(data.batches(1))["n"].tolist() == [1, 2, 3]


@pytest.mark.parametrize("make", [list, iter])
def test_nan_names_the_feed_and_the_sample(make) -> None:
    items = feeds(2, 3)
    items[1]["x"][2, 0] = np.nan
    reading = open_data(make(items), [X]).batches(1)
    assert len(next(reading)["x"]) == 2
    with pytest.raises(DataError, match="'x' of feed 1 of the python iterable, sample 4,"):
        next(reading)


@pytest.mark.parametrize("later", [feeds(1), feeds(1, 2), []])
def test_an_iterable_that_gives_other_feeds_later(later: list[Feed]) -> None:
    source = Again(feeds(1, 1))
    data = open_data(source, [X])
    source.items = later
    with pytest.raises(DataError, match="other samples"):
        list(data.batches(1))


class Own:
    """Somebody's own dataset."""

    source = "own"

    def __init__(self, n: int) -> None:
        self.n = n
        self.labels = np.arange(n)

    def __len__(self) -> int:
        return self.n

    def batches(self, size: int) -> Iterator[Feed]:
        whole = np.arange(self.n * 3, dtype=np.float32).reshape(-1, 3)
        return ({"x": whole[start : start + size]} for start in range(0, self.n, size))


def test_a_dataset_gives_its_own_feeds() -> None:
    own = open_data(Own(3), [X])
    assert (len(own), own.source, own.labels.tolist()) == (3, "own", [0, 1, 2])
    assert [len(feed["x"]) for feed in own.batches(2)] == [2, 1]
    assert np.array_equal(joined(own, 2), np.arange(9, dtype=np.float32).reshape(3, 3))
    for ours in (own, open_data({"x": np.zeros((2, 3), np.float32)}, [X]), open_data(feeds(1, 2), [X])):
        assert open_data(ours, [X]) is ours


KINDS = [
    Own,
    lambda n: open_data({"x": np.arange(n * 3, dtype=np.float32).reshape(n, 3), "labels": np.arange(n)}, [X]),
    lambda n: open_data([feed | {"labels": [number]} for number, feed in enumerate(feeds(*[1] * n))], [X]),
]


@pytest.mark.parametrize("kind", KINDS)
@given(n=st.integers(2, 12), cut=st.integers(1, 14), size=st.integers(1, 5))
def test_first_and_split_are_exact_where_samples_are_single(kind, n: int, cut: int, size: int) -> None:
    data = kind(n)
    whole = joined(data)
    head = first(data, cut)
    assert len(head) == len(head.labels) == min(cut, n)
    assert np.array_equal(joined(head, size), whole[:cut])
    if cut >= n:
        return
    kept, held = split(data, cut)
    assert (len(kept), len(held)) == (n - cut, cut)
    assert np.array_equal(np.concatenate([joined(kept, size), joined(held, size)]), whole)
    assert [*kept.labels, *held.labels] == list(range(n))


@given(sizes=st.lists(st.integers(1, 4), min_size=2, max_size=6), cut=st.integers(1, 20), fixed=st.booleans())
def test_first_and_split_round_up_to_whole_pieces(sizes: list[int], cut: int, fixed: bool) -> None:
    sizes = [3] * len(sizes) if fixed else sizes
    whole = np.concatenate([feed["x"] for feed in feeds(*sizes)])
    data = open_data({"x": whole}, [InputSpec("x", F32, (3, 3))]) if fixed else open_data(feeds(*sizes), [X])
    head = first(data, cut)
    ends = [0, *np.cumsum(sizes).tolist()]
    assert len(head) == min([end for end in ends if end >= cut], default=len(data))
    assert np.array_equal(joined(head), whole[: len(head)])
    if cut > len(data) - sizes[0]:
        with pytest.raises(DataError, match="cannot be held out"):
            split(data, cut)
        return
    kept, held = split(data, cut)
    assert len(held) >= cut
    assert len(kept) == max(end for end in ends if end <= len(data) - cut)
    assert np.array_equal(np.concatenate([joined(kept), joined(held)]), whole)


def test_parts_of_parts() -> None:
    for data in (kind(10) for kind in KINDS):
        kept, held = split(data, 4)
        assert joined(first(held, 2))[:, 0].tolist() == [18, 21]
        assert split(kept, 1)[1].labels.tolist() == [5]


def test_an_own_dataset_with_too_few_labels() -> None:
    own = Own(4)
    own.labels = np.arange(3)
    with pytest.raises(DataError, match="3 labels for 4 samples"):
        first(own, 2)
