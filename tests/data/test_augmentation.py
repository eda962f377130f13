"""More samples from few."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest

from onnxcalib.data import Dataset, InputSpec, first, open_data, split
from onnxcalib.data.augmentation import PATCH, SHIFT, augmented, endless

HEIGHT, WIDTH = 32, 40


def numbered(count: int, batch: int | None = None) -> tuple[list[InputSpec], dict[str, np.ndarray]]:
    spec = InputSpec("x", np.dtype(np.float32), (batch, 2))
    return [spec], {"x": np.repeat(np.arange(count, dtype=np.float32)[:, None], 2, axis=1)}


def images(count: int, *, last: bool = False) -> Dataset:
    """Every pixel holds its sample and its own place, so that what moved can be read off."""
    rows, columns = np.meshgrid(np.arange(HEIGHT), np.arange(WIDTH), indexing="ij")
    planes = np.arange(count)[:, None, None] * 10_000 + rows * 100 + columns
    array = np.stack([planes] * 3, 3 if last else 1).astype(np.float32)
    spec = InputSpec("x", np.dtype(np.float32), (None, *array.shape[1:]))
    return open_data({"x": array}, [spec])


def whole(dataset: Dataset, size: int) -> np.ndarray:
    return np.concatenate([feed["x"] for feed in dataset.batches(size)])


@pytest.mark.parametrize("size", [1, 4, 5, 40])
def test_every_sample_comes_once_in_another_order(size: int) -> None:
    inputs, arrays = numbered(12)
    feeds = list(islice(endless(open_data(arrays, inputs), size, 0), -(-12 // size)))
    assert [len(feed["x"]) for feed in feeds[:-1]] == [size] * (len(feeds) - 1)
    found = np.concatenate([feed["x"] for feed in feeds])[:, 0].tolist()
    assert sorted(found) == list(range(12))
    assert found != list(range(12))


def test_a_fixed_batch_stays_together() -> None:
    inputs, arrays = numbered(12, batch=3)
    feeds = [feed["x"][:, 0].tolist() for feed in islice(endless(open_data(arrays, inputs), 8, 0), 4)]
    assert sorted(feeds) == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]


def test_whole_feeds_keep_their_order_and_form() -> None:
    inputs, arrays = numbered(6)
    data = open_data([{"x": arrays["x"][:2]}, {"x": arrays["x"][2:]}], inputs)
    feeds = [feed["x"][:, 0].tolist() for feed in islice(endless(data, 1, 0), 4)]
    assert feeds == [[0, 1], [2, 3, 4, 5]] * 2
    assert augmented(data, 2, 0) is data


def test_what_is_no_image_stays_as_it_is() -> None:
    inputs, arrays = numbered(6)
    data = open_data(arrays, inputs)
    assert augmented(data, 2, 0) is data


ROWS, COLUMNS = np.meshgrid(np.arange(HEIGHT), np.arange(WIDTH), indexing="ij")


def taken_apart(plane: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Which pixels are a pasted piece, and of the others the sample, the row and the column that they come from."""
    sample, position = np.divmod(plane.astype(np.int64), 10_000)
    row, column = np.divmod(position, 100)
    pasted = (row == ROWS) & (column == COLUMNS)
    return pasted, *(values[~pasted] for values in (sample, row - ROWS, column))


@pytest.mark.parametrize("last", [False, True])
def test_images_come_as_they_are_and_mirrored_and_shifted_within_bounds(last: bool) -> None:
    data = images(4, last=last)
    np.testing.assert_array_equal(whole(augmented(data, 0, 0), 3), whole(data, 4))
    seen = set()
    for form in range(1, 6):
        found = whole(augmented(data, form, 0), 3)
        for place, plane in enumerate(found[..., 0] if last else found[:, 0]):
            pasted, sample, down, column = taken_apart(plane)
            if pasted.all():  # neither mirrored nor shifted
                continue
            assert set(sample.tolist()) == {place}
            assert np.abs(down).max() <= 2 * np.ceil(SHIFT * HEIGHT)
            straight, mirrored = column - COLUMNS[~pasted], column + COLUMNS[~pasted] - (WIDTH - 1)
            within = [float((np.abs(off) <= np.ceil(SHIFT * WIDTH)).mean()) for off in (straight, mirrored)]
            assert max(within) > 0.9
            seen.add((within[1] > within[0], float(np.median(down)), float(np.median(column))))
    assert {mirrored for mirrored, *_ in seen} == {True, False}
    assert len(seen) > 10


def test_a_piece_comes_from_another_sample_and_is_a_rectangle() -> None:
    shares, lenders = [], set()
    for form in range(1, 40):
        for place, plane in enumerate(whole(augmented(images(3), form, 0), 3)[:, 0]):
            lent = plane // 10_000 != place
            rows, columns = (np.flatnonzero(lent.any(axis)) for axis in (1, 0))
            assert lent.sum() == len(rows) * len(columns)
            assert max(len(rows) / HEIGHT, len(columns) / WIDTH) <= PATCH
            np.testing.assert_array_equal((plane % 10_000)[lent], (100 * ROWS + COLUMNS)[lent])
            shares.append(lent.mean())
            lenders |= set((plane[lent] // 10_000).tolist())
    assert lenders == {0, 1, 2}
    assert 0.05 < np.mean(shares) < 0.15


def test_a_sample_has_one_form_however_it_is_read() -> None:
    data = augmented(split(images(10), 3)[0], 4, 5)
    assert len(data) == 7
    at_once = whole(data, 7)
    np.testing.assert_array_equal(whole(data, 3), at_once)
    np.testing.assert_array_equal(whole(first(data, 5), 2), at_once[:5])
    assert not np.array_equal(whole(augmented(split(images(10), 3)[0], 4, 6), 7), at_once)
    assert at_once.max() < 7 * 10_000


def test_every_epoch_shows_other_forms_in_another_order() -> None:
    data = images(6)
    feeds = islice(endless(data, 3, 0), 6)
    epochs = np.concatenate([feed["x"] for feed in feeds]).reshape(3, 6, 3, HEIGHT, WIDTH)
    orders = [np.median(epoch[:, 0] // 10_000, (1, 2)).tolist() for epoch in epochs]
    assert all(sorted(order) == list(range(6)) for order in orders)
    assert orders[0] != orders[1]
    aligned = [epoch[np.argsort(order)] for epoch, order in zip(epochs, orders, strict=True)]
    np.testing.assert_array_equal(aligned[0], whole(data, 6))
    np.testing.assert_array_equal(aligned[2], whole(augmented(data, 2, 0), 6))
    assert not np.array_equal(aligned[1], aligned[2])


def test_inputs_of_one_sample_move_together() -> None:
    array = whole(images(3), 3)
    specs = [InputSpec(name, np.dtype(np.float32), (None, 3, HEIGHT, WIDTH)) for name in ("x", "z")]
    feed = next(iter(augmented(open_data({"x": array, "z": array + 1}, specs), 1, 0).batches(3)))
    assert not np.array_equal(feed["x"], array)
    np.testing.assert_array_equal(feed["x"] + 1, feed["z"])
