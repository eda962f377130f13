"""What is wrong with data is said in one sentence that names it, with a hint."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from onnxcalib.data import InputSpec, Preprocess, first, open_data, split
from onnxcalib.errors import DataError

X = InputSpec("image", np.dtype("float32"), (None, 3, 4))
GOOD = np.zeros((5, 3, 4), np.float32)


def refused(source: object, *inputs: InputSpec) -> str:
    with pytest.raises(DataError) as caught:
        open_data(source, inputs or [X])
    assert caught.value.hint
    assert caught.value.message.endswith(".")
    return str(caught.value)


CASES = [
    ({"imgae": GOOD}, ["'image'", "imgae", "Near names: imgae"]),
    ({}, ["'image'", "none"]),
    ({"image": GOOD, "mask": GOOD}, ["'mask'", "no input", "image"]),
    ({"image": GOOD.astype("float64")}, ["'image'", "float64", "float32", 'array.astype("float32")']),
    ({"image": GOOD.tolist()}, ["float64", "float32"]),
    ({"image": GOOD.astype(">f4")}, [">f4", "float32"]),
    ({"image": GOOD[:, :2]}, ["'image'", "axis 1 is 2", "must be 3", "[5, 2, 4]"]),
    ({"image": GOOD[0]}, ["[3, 4]", "2 axes", "[any, 3, 4]"]),
    ({"image": GOOD[:0]}, ["no samples"]),
    ({"image": np.float32(1)}, ["single number"]),
    ({"image": [[1], [1, 2]]}, ["not an array"]),
    ({"image": GOOD, "labels": np.zeros(4, int)}, ["'labels'", "[4]", "5 samples"]),
    ({"image": GOOD, "labels": np.zeros((4, 5), int)}, ["'labels'", "[4, 5]"]),
    ({"image": GOOD, "labels": np.array(["a"] * 5)}, ["'labels'", "<U1", "numbers"]),
    ({"image": GOOD, "labels": np.array([0, 1, np.nan, 0, 0])}, ["'labels'", "sample 2", "NaN"]),
    ({"image": GOOD, "labels": np.array([0, 1, -1, 0, 0])}, ["-1", "sample 2"]),
]


@pytest.mark.parametrize(("arrays", "words"), CASES)
def test_arrays_that_do_not_fit(arrays: dict[str, object], words: list[str]) -> None:
    message = refused(arrays)
    assert [word for word in words if word not in message] == []


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_npz_files_are_checked_as_dicts_are(tmp_path: Path, save) -> None:
    path = tmp_path / "d.npz"
    save(path, image=GOOD.astype("float64"))
    assert "float64" in refused(path)
    assert str(path) in refused(path)
    save(path, other=GOOD)
    assert "Near names" in refused(path) or "Known names" in refused(path)
    save(path, image=GOOD[:0])
    assert "no samples" in refused(path)


def test_arrays_with_different_numbers_of_samples() -> None:
    message = refused({"a": GOOD, "b": GOOD[:4]}, *(InputSpec(name, X.dtype, X.shape) for name in "ab"))
    assert "'a' 5, 'b' 4" in message


def test_paths_that_are_no_data(tmp_path: Path) -> None:
    assert "does not exist" in refused(tmp_path / "none.npz")
    assert "holds no data" in refused(tmp_path)
    (tmp_path / "data.csv").write_text("1,2")
    assert "unknown kind" in refused(tmp_path / "data.csv")
    assert "holds no data" in refused(str(tmp_path))
    assert "A int is no data" in refused(3)
    with pytest.raises(DataError, match="no inputs"):
        open_data({}, [])


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
@pytest.mark.parametrize("keep", [0, 10, 0.5, 0.99])
def test_a_truncated_npz(tmp_path: Path, save, keep: float) -> None:
    path = tmp_path / "d.npz"
    save(path, image=np.random.default_rng(0).random((50, 3, 4), np.float32))
    whole = path.read_bytes()
    path.write_bytes(whole[: int(keep * len(whole)) if keep < 1 else int(keep)])
    message = refused(path)
    assert str(path) in message
    assert "damaged" in message


def test_a_compressed_npz_with_a_flipped_bit(tmp_path: Path) -> None:
    path = tmp_path / "d.npz"
    np.savez_compressed(path, image=np.random.default_rng(0).random((50, 3, 4), np.float32))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 255
    path.write_bytes(data)
    assert str(path) in refused(path)


def test_an_npz_member_that_is_shorter_than_its_header_says(tmp_path: Path) -> None:
    import io
    import zipfile

    memory = io.BytesIO()
    np.save(memory, GOOD)
    with zipfile.ZipFile(tmp_path / "d.npz", "w") as archive:
        archive.writestr("image.npy", memory.getvalue()[:-8])
    message = refused(tmp_path / "d.npz")
    assert "cut short" in message
    assert "232 of its 240 bytes" in message
    with zipfile.ZipFile(tmp_path / "d.npz", "w") as archive:
        archive.writestr("image.npy", b"not an array at all")
    assert "not a readable NumPy array" in refused(tmp_path / "d.npz")


def test_pickles_are_never_loaded(tmp_path: Path) -> None:
    np.savez(tmp_path / "d.npz", image=np.array([{"a": 1}], dtype=object))
    assert "Python objects" in refused(tmp_path / "d.npz")
    (tmp_path / "f").mkdir()
    np.save(tmp_path / "f" / "0.npy", np.array([{"a": 1}], dtype=object))
    assert "Python objects" in refused(tmp_path / "f")


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_nan_and_inf_are_found_as_they_are_read(bad: float) -> None:
    array = GOOD.copy()
    array[3, 1, 2] = bad
    feeds = open_data({"image": array}, [X]).batches(2)
    assert next(feeds)["image"].shape == (2, 3, 4)
    with pytest.raises(DataError, match=r"'image'.*sample 3, holds NaN or Inf"):
        next(feeds)


def test_nan_in_a_whole_tensor_and_in_half_precision() -> None:
    state = InputSpec("s", np.dtype("float16"), ())
    data = open_data({"s": np.array([0, 1, np.nan], np.float16)}, [state])
    with pytest.raises(DataError, match="'s' of python dict, sample 2,"):
        list(data.batches(1))


def test_options_without_effect_or_sense() -> None:
    data = open_data({"image": GOOD}, [X])
    with pytest.raises(DataError, match="no images"):
        open_data({"image": GOOD}, [X], Preprocess())
    with pytest.raises(DataError, match="batch size is 0"):
        data.batches(0)
    with pytest.raises(DataError, match="first 0"):
        first(data, 0)
    for held_out in (-1, 0, 5, 6):
        with pytest.raises(DataError, match="cannot be held out"):
            split(data, held_out)


def test_preprocess_is_refused_for_every_kind_that_is_no_images(tmp_path: Path) -> None:
    np.savez(tmp_path / "d.npz", image=GOOD)
    for source in (tmp_path / "d.npz", tmp_path, [{"image": GOOD}], open_data({"image": GOOD}, [X])):
        with pytest.raises(DataError, match="no images"):
            open_data(source, [X], Preprocess())
