"""Data that gives other samples when it is read again is refused, whoever yields it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models import conv_net, feed_for
from onnxcalib import quantize
from onnxcalib.data import Dataset, Feed, InputSpec, first, open_data, split, train_validation_split
from onnxcalib.data.steady import fingerprint
from onnxcalib.errors import DataError

X = InputSpec("x", np.dtype("float32"), (None, 3))
Order = Callable[[int], Sequence[int]]  # of the samples, by how often they were asked for
Kind = Callable[[Order], "Loader | Own"]


def in_order(_reading: int) -> Sequence[int]:
    return range(12)


def at_random(reading: int) -> Sequence[int]:
    return np.random.default_rng(reading).permutation(12).tolist()


def swapped(_reading: int) -> Sequence[int]:
    return [*range(10), 11, 10]


class Loader:
    """Single samples in an order of its own, again and again."""

    def __init__(self, order: Order) -> None:
        self.order, self.read = order, -1

    def __iter__(self) -> Iterator[Feed]:
        self.read += 1
        return ({"x": np.full((1, 3), sample, np.float32)} for sample in self.order(self.read))


class Own:
    """The same as a dataset of somebody's own class."""

    labels, source = None, "own data"

    def __init__(self, order: Order) -> None:
        self.order, self.read = order, -1

    def __len__(self) -> int:
        return 12

    def batches(self, size: int) -> Iterator[Feed]:
        self.read += 1
        values = np.repeat(np.array(self.order(self.read), np.float32)[:, None], 3, axis=1)
        return ({"x": values[start : start + size]} for start in range(0, len(values), size))


def read(data: Dataset, size: int = 4) -> int:
    return sum(len(feed["x"]) for feed in data.batches(size))


@pytest.mark.parametrize("kind", [Loader, Own])
def test_other_samples_are_refused_with_what_to_do(kind: Kind) -> None:
    data = open_data(kind(at_random), [X])
    with pytest.raises(DataError, match="other samples when it was read again") as caught:
        _ = [read(data) for _ in range(2)]
    assert data.source in str(caught.value)
    assert "shuffling" in caught.value.hint
    assert "list" in caught.value.hint


@pytest.mark.parametrize("kind", [Loader, Own])
def test_the_same_samples_are_taken_any_number_of_times(kind: Kind) -> None:
    data = open_data(kind(in_order), [X])
    for size in (1, 4, 1, 4, 5):
        assert read(data, size) == 12
        assert read(first(data, 5), size) == 5
        next(iter(data.batches(size)))


@pytest.mark.parametrize("kind", [Loader, Own])
def test_what_is_the_same_comes_before_what_is_not(kind: Kind) -> None:
    source = kind(in_order)
    data = open_data(source, [X])
    read(data, 1)
    source.order = swapped
    feeds = data.batches(1)
    assert [next(feeds)["x"][0, 0] for _ in range(10)] == list(range(10))
    with pytest.raises(DataError, match="other samples"):
        next(feeds)


@pytest.mark.parametrize("kind", [Loader, Own])
def test_parts_are_compared_too(kind: Kind) -> None:
    source = kind(in_order)
    _, held_out = split(open_data(source, [X]), 3)
    assert [read(held_out) for _ in range(2)] == [3, 3]
    source.order = swapped
    with pytest.raises(DataError, match="other samples"):
        read(held_out)


def test_a_dataset_that_does_not_repeat_is_not_taken_for_one_that_cannot_be_split() -> None:
    data = open_data(Own(at_random), [X])
    read(data, 1)
    with pytest.raises(DataError, match="other samples"):
        train_validation_split(data)


@pytest.mark.parametrize("count", [11, 13])
def test_a_dataset_that_becomes_shorter_or_longer(count: int) -> None:
    source = Own(in_order)
    data = open_data(source, [X])
    read(data)
    source.order = lambda _: range(count)
    with pytest.raises(DataError, match="other samples"):
        read(data)


def test_batches_of_an_own_dataset_may_be_padded_to_the_longest() -> None:
    class Padded(Own):
        def batches(self, size: int) -> Iterator[Feed]:
            return ({"x": np.zeros((size, start + size), np.float32)} for start in range(0, 12, size))

    data = open_data(Padded(in_order), [X])
    for size in (1, 4, 6, 1, 4, 6):
        assert read(data, size) == 12


def test_a_sequence_that_changes_what_it_holds() -> None:
    items = list(Loader(in_order))
    data = open_data(items, [X])
    read(data)
    items[3]["x"] = items[3]["x"] + 1
    with pytest.raises(DataError, match="other samples"):
        read(data)
    del items[2:]
    with pytest.raises(DataError, match="other samples"):
        read(data)


def test_a_shuffling_loader_never_comes_to_a_quantized_model() -> None:
    model = conv_net()
    samples = feed_for(model, 12)["x"]

    class Images(Loader):
        def __iter__(self) -> Iterator[Feed]:
            self.read += 1
            return ({"x": samples[[sample]]} for sample in self.order(self.read))

    quantize(model, Images(in_order))
    with pytest.raises(DataError, match="other samples"):
        quantize(model, Images(at_random))


arrays = st.sampled_from([np.float32, np.int32, np.uint8, ml_dtypes.bfloat16]).flatmap(
    lambda kind: st.lists(st.integers(0, 3), min_size=1, max_size=6).map(lambda values: np.array(values, kind))
)


@given(one=arrays, two=arrays)
def test_fingerprints_are_equal_where_name_type_shape_and_values_are(one: np.ndarray, two: np.ndarray) -> None:
    same = one.dtype == two.dtype and one.shape == two.shape and np.array_equal(one, two)
    assert (fingerprint({"x": one}) == fingerprint({"x": two})) == same
    assert fingerprint({"x": one, "y": two}) == fingerprint({"y": two, "x": one})
    assert (fingerprint({"x": one, "y": two}) == fingerprint({"x": two, "y": one})) == same
    assert fingerprint({"x": one}) != fingerprint({"x": one[None]})
    spaced = np.repeat(one, 2)[::2]
    assert fingerprint({"x": spaced}) == fingerprint({"x": one})


def test_text_is_compared_by_what_it_says() -> None:
    def words(last: str) -> Feed:
        return {"x": np.array(["a", "".join(["b", last])], object)}

    assert fingerprint(words("c")) == fingerprint(words("c"))
    assert fingerprint(words("c")) != fingerprint(words("d"))
    assert fingerprint({"x": np.array(3)}) != fingerprint({"x": np.array(4)})
