"""Folders of .npy files, .npz files and ONNX test sets."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

from onnxcalib.data import InputSpec, open_data, split
from onnxcalib.errors import DataError

F32 = np.dtype("float32")
X = InputSpec("x", F32, (None, 3))
Y = InputSpec("y", F32, (None, 2))
STATE = InputSpec("state", F32, (2, 1, 4))


def numbers(*shape: int, start: int = 0) -> np.ndarray:
    return np.arange(start, start + np.prod(shape), dtype=np.float32).reshape(shape)


def joined(data, name: str = "x", size: int = 2) -> np.ndarray:
    return np.concatenate([feed[name] for feed in data.batches(size)])


def test_npy_files_in_natural_order_with_and_without_batch_axis(tmp_path: Path) -> None:
    whole = numbers(5, 3)
    np.save(tmp_path / "s1.npy", whole[0])
    np.save(tmp_path / "s2.npy", whole[1:2])
    np.save(tmp_path / "s10.npy", whole[2:])
    (tmp_path / "README.txt").write_text("about")
    data = open_data(tmp_path, [X])
    assert len(data) == 5
    assert data.labels is None
    for size in (1, 2, 3, 5, 9):
        assert np.array_equal(joined(data, size=size), whole)


def test_npy_files_with_a_fixed_batch(tmp_path: Path) -> None:
    for index in range(5):
        np.save(tmp_path / f"{index}.npy", numbers(3, start=index))
    data = open_data(tmp_path, [InputSpec("x", F32, (2, 3))])
    assert [feed["x"].shape for feed in data.batches(1)] == [(2, 3), (2, 3)]


def test_what_is_wrong_with_an_npy_file_names_it(tmp_path: Path) -> None:
    np.save(tmp_path / "0.npy", numbers(3))
    for bad, words in ((numbers(4), "axis 1 is 4"), (np.zeros(3), "float64"), (numbers(0, 3), "no samples")):
        np.save(tmp_path / "1.npy", bad)
        with pytest.raises(DataError, match=f"1.npy.*{words}"):
            open_data(tmp_path, [X])
    np.save(tmp_path / "1.npy", np.array([0, np.nan, 0], np.float32))
    with pytest.raises(DataError, match=r"1\.npy, sample 1, holds NaN"):
        joined(open_data(tmp_path, [X]))
    np.save(tmp_path / "1.npy", numbers(3))
    whole = (tmp_path / "1.npy").read_bytes()
    for length, words in ((len(whole) - 1, "cut short"), (20, "not a readable"), (0, "not a readable")):
        (tmp_path / "1.npy").write_bytes(whole[:length])
        with pytest.raises(DataError, match=rf"1\.npy.*{words}"):
            open_data(tmp_path, [X])


@pytest.mark.parametrize("shape", [b"[2, 3)", b"{2, 3)", b"(-2,3)", b"(2, 3}", b"'2, 3)", b"(2,1j)", b"(2.,3)"])
def test_an_npy_header_with_a_wrong_byte(tmp_path: Path, shape: bytes) -> None:
    np.save(tmp_path / "0.npy", numbers(2, 3))
    content = (tmp_path / "0.npy").read_bytes()
    assert b"(2, 3)" in content
    (tmp_path / "0.npy").write_bytes(content.replace(b"(2, 3)", shape))
    with pytest.raises(DataError, match=r"0\.npy is not a readable NumPy array"):
        open_data(tmp_path, [X])


def test_a_file_that_changes_after_opening(tmp_path: Path) -> None:
    np.save(tmp_path / "0.npy", numbers(2, 3))
    data = open_data(tmp_path, [X])
    np.save(tmp_path / "0.npy", numbers(1, 3))
    with pytest.raises(DataError, match="changed"):
        joined(data)


def test_npy_files_need_a_single_input(tmp_path: Path) -> None:
    np.save(tmp_path / "0.npy", numbers(3))
    with pytest.raises(DataError, match=r"2 inputs.*npz"):
        open_data(tmp_path, [X, Y])


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_npz_files_with_labels(tmp_path: Path, save) -> None:
    save(tmp_path / "2.npz", x=numbers(3), y=numbers(1, 2), labels=np.int32(7))
    save(tmp_path / "10.npz", x=numbers(4, 3), y=numbers(4, 2), labels=np.arange(4))
    data = open_data(tmp_path, [X, Y])
    assert len(data) == 5
    assert data.labels.tolist() == [7, 0, 1, 2, 3]
    assert np.array_equal(joined(data, "x"), np.concatenate([numbers(1, 3), numbers(4, 3)]))
    assert np.array_equal(joined(data, "y", 4), np.concatenate([numbers(1, 2), numbers(4, 2)]))


NPZ_ERRORS = [
    ({"x": numbers(2, 3), "y": numbers(3, 2)}, "'x' 2, 'y' 3"),
    ({"x": numbers(2, 3)}, "'y' has no array"),
    ({"x": numbers(1, 3), "y": numbers(1, 2), "z": numbers(1)}, "'z'.*no input"),
    ({"x": numbers(1, 3), "y": numbers(1, 2).astype(int)}, "'y'.*int64"),
    ({"x": numbers(1, 3), "y": numbers(1, 2)}, "no labels"),
    ({"x": numbers(1, 3), "y": numbers(1, 2), "labels": np.arange(2)}, "shape .2., but there are 1 samples"),
]


@pytest.mark.parametrize(("arrays", "words"), NPZ_ERRORS)
def test_what_is_wrong_with_one_npz_of_many(tmp_path: Path, arrays: dict[str, np.ndarray], words: str) -> None:
    np.savez(tmp_path / "0.npz", x=numbers(1, 3), y=numbers(1, 2), labels=np.array([1]))
    np.savez(tmp_path / "1.npz", **arrays)
    with pytest.raises(DataError, match=words):
        open_data(tmp_path, [X, Y])


def test_npz_files_are_feeds_where_inputs_share_no_batch_axis(tmp_path: Path) -> None:
    sr = InputSpec("sr", np.dtype("int64"), ())
    for index in range(3):
        np.savez(tmp_path / f"{index}.npz", x=numbers(1, 3, start=index), state=numbers(2, 1, 4), sr=np.int64(index))
    data = open_data(tmp_path, [X, STATE, sr])
    feeds = list(data.batches(2))
    assert len(data) == len(feeds) == 3
    assert [int(feed["sr"]) for feed in feeds] == [0, 1, 2]
    assert feeds[2]["state"].shape == (2, 1, 4)
    assert np.array_equal(feeds[2]["x"], numbers(1, 3, start=2))


def test_mixed_folders_are_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "0.npy", numbers(3))
    np.savez(tmp_path / "0.npz", x=numbers(3))
    with pytest.raises(DataError, match=r"more than one kind.*\.npy, \.npz"):
        open_data(tmp_path, [X])


def write_set(folder: Path, *arrays: np.ndarray, names: tuple[str, ...] = ()) -> None:
    folder.mkdir(parents=True)
    for index, array in enumerate(arrays):
        tensor = onnx.numpy_helper.from_array(array, names[index] if names else None)
        onnx.save_tensor(tensor, folder / f"input_{index}.pb")
        onnx.save_tensor(tensor, folder / f"output_{index}.pb")


def test_test_sets_in_natural_order_and_by_position(tmp_path: Path) -> None:
    for index in (10, 9):
        write_set(tmp_path / f"test_data_set_{index}", numbers(2, 3, start=index), numbers(2, 2))
    np.savez(tmp_path / "test_data_0.npz", inputs=numbers(1))
    data = open_data(tmp_path, [X, Y])
    feeds = list(data.batches(1))
    assert len(data) == 4
    assert [feed["x"][0, 0] for feed in feeds] == [9, 10]
    assert [feed["y"].shape for feed in feeds] == [(2, 2), (2, 2)]
    alone = open_data(tmp_path / "test_data_set_9", [X, Y])
    assert len(alone) == 2


def test_names_in_a_test_set_win_over_positions(tmp_path: Path) -> None:
    write_set(tmp_path / "test_data_set_0", numbers(1, 2), numbers(1, 3), names=("y", "x"))
    feed = next(open_data(tmp_path, [X, Y]).batches(1))
    assert feed["x"].shape == (1, 3)
    write_set(tmp_path / "s", numbers(1, 3), numbers(1, 2), names=("foreign", "names"))
    assert next(open_data(tmp_path / "s", [X, Y]).batches(1))["y"].shape == (1, 2)
    write_set(tmp_path / "t", numbers(1, 3), numbers(1, 2), names=("", "x"))
    with pytest.raises(DataError, match="second tensor for the input 'x'"):
        open_data(tmp_path / "t", [X, Y])


def test_what_is_wrong_with_a_test_set(tmp_path: Path) -> None:
    folder = tmp_path / "test_data_set_0"
    write_set(folder, numbers(1, 4))
    with pytest.raises(DataError, match=r"test_data_set_0.*axis 1 is 4"):
        open_data(tmp_path, [X])
    with pytest.raises(DataError, match=r"1 input files.*2 inputs"):
        open_data(tmp_path, [X, Y])
    for content in (b"", b"\xff\xff\xff", b"hello"):
        (folder / "input_0.pb").write_bytes(content)
        with pytest.raises(DataError, match=r"input_0\.pb is not a readable TensorProto"):
            open_data(tmp_path, [X])


def test_nan_in_a_test_set_is_found_when_it_is_read(tmp_path: Path) -> None:
    write_set(tmp_path / "test_data_set_0", numbers(2, 3))
    write_set(tmp_path / "test_data_set_1", np.array([[0, 0, 0], [0, 0, np.nan]], np.float32))
    data = open_data(tmp_path, [X])
    with pytest.raises(DataError, match=r"'x' of .*test_data_set_1, sample 3,"):
        list(data.batches(1))
    kept, _ = split(data, 1)
    assert joined(kept).shape == (2, 3)


@pytest.mark.parametrize("batched", [True, False])
def test_sequences_of_different_lengths_are_feeds_of_their_own(tmp_path: Path, batched: bool) -> None:
    ids, mask = (InputSpec(name, np.dtype("int64"), (None, None)) for name in ("ids", "mask"))
    lengths = [3, 5, 3, 4]
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    for index, length in enumerate(lengths):
        sentence = np.arange(length).reshape((1, length) if batched else (length,))
        np.save(tmp_path / "one" / f"{index}.npy", sentence)
        np.savez(tmp_path / "two" / f"{index}.npz", ids=sentence, mask=np.ones_like(sentence), labels=index)
    one, two = open_data(tmp_path / "one", [ids]), open_data(tmp_path / "two", [ids, mask])
    assert [feed["ids"].shape for feed in one.batches(8)] == [(1, length) for length in lengths]
    assert [feed["mask"].shape for feed in two.batches(8)] == [(1, length) for length in lengths]
    assert list(two.labels) == [0, 1, 2, 3]
    kept, held_out = split(two, 1)
    assert (len(kept), len(held_out)) == (3, 1)
