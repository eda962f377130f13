"""One order for all who take a part of the data: whatever holds the samples, and with their labels."""

from __future__ import annotations

import shutil
import tempfile
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from models import build, normal
from onnxcalib.algorithms.teacher import Teacher
from onnxcalib.data import (
    Dataset,
    Feed,
    InputSpec,
    Preprocess,
    first,
    open_data,
    shuffled,
    split,
    strata,
    train_validation_split,
)
from onnxcalib.data.augmentation import augmented, endless
from onnxcalib.errors import DataError
from onnxcalib.model.prepare import prepare
from onnxcalib.numerics.output_kind import LossKind

F32 = np.dtype("float32")
IMAGE = InputSpec("x", F32, (None, 1, 2, 2))
RAW = Preprocess(resize=2, mean=(0.0,), std=(1.0,), scale=1.0)
COUNT, CLASSES = 24, 3
SAMPLES = np.repeat(np.arange(COUNT, dtype=np.float32), 4).reshape(COUNT, 1, 2, 2)  # each holds its own number
SORTED = np.arange(COUNT) // (COUNT // CLASSES)


def arrays(_: Path, samples: np.ndarray = SAMPLES, labels: np.ndarray = SORTED) -> Dataset:
    return open_data({"x": samples, "labels": labels}, [IMAGE])


def npz(folder: Path, samples: np.ndarray = SAMPLES, save: Callable[..., None] = np.savez) -> Dataset:
    save(folder / "data.npz", x=samples, labels=SORTED)
    return open_data(folder / "data.npz", [IMAGE])


def compressed(folder: Path) -> Dataset:
    return npz(folder, save=np.savez_compressed)


def feeds(samples: np.ndarray = SAMPLES, labels: np.ndarray = SORTED) -> Iterator[Feed]:
    return ({"x": samples[[at]], "labels": labels[[at]]} for at in range(COUNT))


def feed_list(_: Path, samples: np.ndarray = SAMPLES, labels: np.ndarray = SORTED) -> Dataset:
    return open_data(list(feeds(samples, labels)), [IMAGE])


def one_shot(_: Path, samples: np.ndarray = SAMPLES) -> Dataset:
    return open_data(feeds(samples), [IMAGE])


def npy_files(folder: Path, samples: np.ndarray = SAMPLES) -> Dataset:
    for at, sample in enumerate(samples):
        np.save(folder / f"sample{at}.npy", sample)
    return open_data(folder, [IMAGE])


def npz_files(folder: Path, samples: np.ndarray = SAMPLES, each: int = 5) -> Dataset:
    for at in range(0, COUNT, each):
        np.savez_compressed(folder / f"{at}.npz", x=samples[at : at + each], labels=SORTED[at : at + each])
    return open_data(folder, [IMAGE])


def image_files(folder: Path) -> Dataset:
    for at in range(COUNT):
        Image.new("L", (2, 2), at).save(folder / f"{at}.png")
    return open_data(folder, [IMAGE], RAW)


def class_folders(folder: Path) -> Dataset:
    for at, label in enumerate(SORTED):
        (folder / f"class{label}").mkdir(exist_ok=True)
        Image.new("L", (2, 2), at).save(folder / f"class{label}" / f"{at}.png")
    return open_data(folder, [IMAGE], RAW)


def protobuf_sets(folder: Path) -> Dataset:
    for at in range(COUNT):
        (folder / f"test_data_set_{at}").mkdir()
        onnx.save_tensor(onnx.numpy_helper.from_array(SAMPLES[[at]]), folder / f"test_data_set_{at}" / "input_0.pb")
    return open_data(folder, [IMAGE])


class Stream:
    """What can be read from its beginning only."""

    def __iter__(self) -> Iterator[Feed]:
        return feeds()


def stream(_: Path) -> Dataset:
    return open_data(Stream(), [IMAGE])


def function(_: Path) -> Dataset:
    return open_data(feeds, [IMAGE])


def batched(_: Path, each: int = 5) -> Dataset:
    return open_data([(SAMPLES[at : at + each], SORTED[at : at + each]) for at in range(0, COUNT, each)], [IMAGE])


class Own:
    """Somebody's own dataset."""

    labels, source = SORTED, "own"

    def __len__(self) -> int:
        return COUNT

    def batches(self, size: int) -> Iterator[Feed]:
        return ({"x": SAMPLES[at : at + size]} for at in range(0, COUNT, size))


def own(_: Path) -> Dataset:
    return open_data(Own(), [IMAGE])


KINDS = [
    stream, function, batched, own,
    arrays, npz, compressed, feed_list, one_shot, npy_files, npz_files, image_files, class_folders, protobuf_sets,
]  # fmt: skip
Kind = Callable[..., Dataset]


def numbers(data: Dataset, size: int = 4) -> list[int]:
    return [int(sample[0, 0, 0]) for feed in data.batches(size) for sample in feed["x"]]


@pytest.mark.parametrize("kind", KINDS)
def test_the_order_is_one_whatever_holds_the_samples(kind: Kind, tmp_path: Path) -> None:
    data = kind(tmp_path)
    found = {seed: shuffled(data, seed) for seed in (0, 1)}
    orders = {seed: numbers(each) for seed, each in found.items()}
    assert orders[0] == numbers(shuffled(arrays(tmp_path), 0)) == numbers(shuffled(data, 0), 1)
    assert sorted(orders[0]) == sorted(orders[1]) == numbers(data) == list(range(COUNT))
    assert len({tuple(order) for order in (*orders.values(), range(COUNT))}) == 3
    if data.labels is not None:
        assert all(each.labels.tolist() == SORTED[orders[seed]].tolist() for seed, each in found.items())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_any_part_of_sorted_data_has_all_classes(kind: Kind, seed: int, tmp_path: Path) -> None:
    data = shuffled(kind(tmp_path), seed)
    kept, held_out = train_validation_split(data)
    assert sorted(numbers(kept) + numbers(held_out)) == list(range(COUNT))
    for part in (held_out, first(data, 10), kept):
        assert {int(SORTED[number]) for number in numbers(part)} == set(range(CLASSES))
        if part.labels is not None:
            assert part.labels.tolist() == SORTED[numbers(part)].tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_samples_that_are_asked_for_are_a_part_of_their_own(kind: Kind, tmp_path: Path) -> None:
    data = shuffled(kind(tmp_path), 0)
    order = numbers(data)
    asked, others = strata(data, 10, [COUNT - 1, 2, COUNT - 3])
    assert numbers(asked) == [order[2], order[COUNT - 3], order[COUNT - 1]]
    assert numbers(others) == [*order[:2], *order[3:8]]
    for part in (asked, others):
        if part.labels is not None:
            assert part.labels.tolist() == SORTED[numbers(part)].tolist()
    assert strata(data, COUNT, [3]) == (data,)


@pytest.mark.parametrize("kind", KINDS)
def test_samples_that_are_asked_for_take_half_of_the_room_at_most(kind: Kind, tmp_path: Path) -> None:
    data = shuffled(kind(tmp_path), 0)
    order = numbers(data)
    asked, others = strata(data, 6, range(COUNT - 1, COUNT - 6, -1))
    assert numbers(asked) == order[COUNT - 3 :]
    assert numbers(others) == order[:3]
    assert [numbers(part) for part in strata(data, 6, [])] == [order[:6]]


@given(
    sizes=st.lists(st.integers(1, 4), min_size=2, max_size=8),
    seed=st.integers(0, 5),
    cut=st.integers(1, 9),
    size=st.integers(1, 5),
)
def test_whole_feeds_stay_whole(sizes: list[int], seed: int, cut: int, size: int) -> None:
    sizes = [*sizes, 5]  # the last is the longest, which no loader does
    ends = np.cumsum(sizes)
    given = [np.arange(end - count, end) for count, end in zip(sizes, ends, strict=True)]
    values = [{"n": places, "labels": 2 * places} for places in given]
    data = shuffled(open_data(values, [InputSpec("n", np.dtype("int64"), (None,))]), seed)
    found = [feed["n"].tolist() for feed in data.batches(size)]
    assert sorted(found) == [places.tolist() for places in given]
    assert data.labels.tolist() == [2 * place for places in found for place in places]
    head = first(data, cut)
    assert [feed["n"].tolist() for feed in head.batches(1)] == found[: len(head.sizes())]
    assert [head.place(at) for at in range(len(head))] == (head.labels // 2).tolist()


@given(count=st.integers(6, 20), batch=st.integers(1, 3), seed=st.integers(0, 5))
def test_samples_are_shuffled_before_they_are_cut_into_fixed_batches(count: int, batch: int, seed: int) -> None:
    whole = {"x": np.arange(count, dtype=np.float32)[:, None], "labels": np.arange(count)}
    data = open_data(whole, [InputSpec("x", F32, (batch, 1))])
    mixed = shuffled(data, seed)
    assert len(mixed) == len(data)
    found = np.array([feed["x"][:, 0] for feed in mixed.batches(9)])
    assert found.shape == (count // batch, batch)
    assert sorted(found.ravel().tolist()) == list(range(len(data)))
    assert mixed.labels.tolist() == found.ravel().tolist()
    kept, held_out = split(mixed, 1)
    assert [*kept.labels, *held_out.labels] == found.ravel().tolist()


def test_a_fixed_batch_does_not_keep_its_neighbours() -> None:
    data = shuffled(open_data({"x": SAMPLES}, [InputSpec("x", F32, (4, 1, 2, 2))]), 0)
    batches = [{int(sample[0, 0, 0]) for sample in feed["x"]} for feed in data.batches(1)]
    assert not [batch for batch in batches if max(batch) - min(batch) == 3]


@pytest.mark.parametrize("kind", [arrays, npz, npy_files, npz_files, feed_list, one_shot])
def test_a_bad_sample_is_named_by_its_place_in_the_data_as_it_was_given(kind: Kind, tmp_path: Path) -> None:
    bad = SAMPLES.copy()
    bad[17] = np.nan
    with pytest.raises(DataError, match="sample 17,"):
        _ = [numbers(part) for part in train_validation_split(shuffled(kind(tmp_path, bad), 3))]


@pytest.mark.parametrize("kind", [arrays, feed_list])
def test_a_label_beyond_the_classes_names_its_sample(kind: Kind, tmp_path: Path) -> None:
    labels = np.where(np.arange(COUNT) == 17, 9, 0)
    text = "net (float[N,1,2,2] x) => (float[N,5] y) { f = Flatten (x)  g = Gemm (f, w)  y = Softmax (g) }"
    model = prepare(build(text, w=normal(4, 5)), "small.onnx")
    with pytest.raises(DataError, match="label 9 for sample 17"):
        Teacher(model, shuffled(kind(tmp_path, SAMPLES, labels), 3), LossKind.CROSS_ENTROPY)


def test_files_of_many_samples_are_unpacked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = shuffled(npz_files(tmp_path), 0)
    made: list[str] = []
    make = tempfile.TemporaryFile
    monkeypatch.setattr(tempfile, "TemporaryFile", lambda **options: made.append("spool") or make(**options))
    copy = shutil.copyfileobj
    monkeypatch.setattr(shutil, "copyfileobj", lambda *arguments: made.append("copy") or copy(*arguments))
    for size in (1, 4):
        numbers(data, size)
    assert made.count("copy") == -(-COUNT // 5)
    assert made.count("spool") == 1  # one file for all: a folder may hold more than a process may open


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_memory_does_not_grow_with_the_samples(save: Callable[..., None], tmp_path: Path) -> None:
    save(tmp_path / "large.npz", x=np.ones((1000, 1000), np.float32))
    data = shuffled(open_data(tmp_path / "large.npz", [InputSpec("x", F32, (None, 1000))]), 0)
    tracemalloc.start()
    total = sum(len(feed["x"]) for feed in data.batches(8))
    used = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert total == 1000
    assert used < 400_000  # the array has 4,000,000 bytes


def pictures(data: Dataset, size: int) -> np.ndarray:
    return np.concatenate([feed["x"] for feed in data.batches(size)])


def test_augmentation_keeps_to_the_samples_of_its_part() -> None:
    images = np.broadcast_to(np.arange(12, dtype=np.float32)[:, None, None, None], (12, 1, 16, 16))
    data = shuffled(open_data({"x": images}, [InputSpec("x", F32, (None, 1, 16, 16))]), 4)
    kept, held_out = split(data, 4)
    lent = {int(value) for form in range(1, 20) for value in np.unique(pictures(augmented(kept, form, 0), 3))}
    mixup_scores = {int(value) for value in np.unique(pictures(held_out, 4))}
    assert lent == set(range(12)) - mixup_scores
    np.testing.assert_array_equal(pictures(augmented(kept, 2, 0), 8), pictures(augmented(kept, 2, 0), 3))
    stream = endless(kept, 4, 0)
    epoch = np.concatenate([next(stream)["x"] for _ in range(2)])
    assert {int(value) for value in np.unique(epoch)} == lent
