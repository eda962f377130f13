"""Data that lies: bombs, pipes, damaged bytes, odd keys and paths are told in one sentence, before any harm."""

from __future__ import annotations

import contextlib
import io
import os
import tempfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from said import refused

from onnxcalib.data import InputSpec, Preprocess, open_data
from onnxcalib.errors import DataError, OnnxcalibError

F32 = np.dtype("float32")
X = InputSpec("x", F32, (None, 3))
IMAGE = InputSpec("x", F32, (None, 3, 8, 8))


def npz(path: Path, header: bytes, body: bytes, name: str = "x.npy") -> Path:
    """An npz file with a header of any kind."""
    head = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(name, head + body)
    return path


def header(shape: str, descr: str = "'<f4'") -> bytes:
    return f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}".encode()


@pytest.fixture
def unpacked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes that were written to temporary files."""
    written: list[int] = []

    class Counted(io.BytesIO):
        def write(self, data: bytes) -> int:
            written.append(len(data))
            return super().write(data)

    monkeypatch.setattr(tempfile, "TemporaryFile", lambda **_: Counted())
    return written


BOMBS = {
    "another shape": (header("(500000, 5)"), "5"),
    "another type": (header("(1250000, 1)", "'<f8'"), "float64"),
    "a shape too small for its bytes": (header("(2, 3)"), "more bytes"),
    "no bytes an element": (header("(100000000000, 3)", "'|S0'"), "S0"),
    "fewer bytes than it says": (header("(1000000000000000, 3)"), "cut short"),
    "brackets": (b"(" * 9000, "NumPy"),
    "negative": (header("(-1, 3)"), "-1"),
    "axes": (header("(" + "1," * 80 + ")"), "NumPy"),
}


@pytest.mark.parametrize("what", BOMBS)
def test_what_does_not_fit_is_told_before_it_is_unpacked(what: str, tmp_path: Path, unpacked: list[int]) -> None:
    path = npz(tmp_path / "d.npz", BOMBS[what][0], bytes(10_000_000))
    with refused(DataError, path, BOMBS[what][1]):
        list(open_data(path, [X]).batches(4))
    assert sum(unpacked) == 0


def test_labels_that_do_not_fit_are_not_unpacked(tmp_path: Path, unpacked: list[int]) -> None:
    path = tmp_path / "d.npz"
    np.savez_compressed(path, x=np.zeros((4, 3), F32), labels=np.zeros(1_000_000, np.int64))
    with refused(DataError, "labels", 4):
        open_data(path, [X])
    assert sum(unpacked) == 0


def test_two_arrays_of_one_name(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "d.npz", "w") as archive:
        for name in ("x", "x.npy"):
            archive.writestr(name, b"")
    with refused(DataError, tmp_path / "d.npz"):
        open_data(tmp_path / "d.npz", [X])


@pytest.mark.parametrize("name", ["d.npz", "folder/1.npy", "folder/1.npz", "folder/input_0.pb"])
def test_a_pipe_is_refused_instead_of_waited_for(name: str, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / name)
    with refused(DataError, tmp_path / name):
        open_data((tmp_path / name).parent if "/" in name else tmp_path / name, [X])


@pytest.mark.parametrize("path", ["a" * 5000, "a" * 300 + ".npz", "a\0b.npz"])
def test_a_path_that_no_file_can_have(path: str) -> None:
    with pytest.raises(DataError):
        open_data(path, [X])


def test_keys_that_are_no_names() -> None:
    with refused(DataError, "x", 7):
        open_data({7: np.zeros((2, 3), F32)}, [X])


@given(place=st.integers(0, 10**6), value=st.integers(0, 255), cut=st.integers(0, 1200), packed=st.booleans())
def test_damaged_npz_files(
    tmp_path_factory: pytest.TempPathFactory, place: int, value: int, cut: int, packed: bool
) -> None:
    path = tmp_path_factory.getbasetemp() / "damaged.npz"
    rng = np.random.default_rng(0)
    (np.savez_compressed if packed else np.savez)(path, x=rng.random((5, 3), F32), labels=np.arange(5))
    content = bytearray(path.read_bytes())
    content[place % len(content)] = value
    path.write_bytes(content[: max(len(content) - cut, 0)] if cut < 600 else content)
    with contextlib.suppress(OnnxcalibError):
        feeds = list(open_data(path, [X]).batches(2))
        assert sum(len(feed["x"]) for feed in feeds) >= 1


@given(place=st.integers(0, 10**6), value=st.integers(0, 255), kind=st.sampled_from(["PNG", "JPEG", "BMP", "WEBP"]))
def test_damaged_images(tmp_path_factory: pytest.TempPathFactory, place: int, value: int, kind: str) -> None:
    folder = tmp_path_factory.getbasetemp() / "damaged"
    folder.mkdir(exist_ok=True)
    made = io.BytesIO()
    pixels = np.random.default_rng(0).integers(0, 256, (9, 11, 3), np.uint8)
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(pixels).save(made, kind, **({} if kind == "BMP" else {"exif": exif}))
    content = bytearray(made.getvalue())
    content[place % len(content)] = value
    (folder / "1.png").write_bytes(content)
    with contextlib.suppress(OnnxcalibError):
        (feed,) = open_data(folder, [IMAGE]).batches(1)
        assert feed["x"].shape == (1, 3, 8, 8)


@pytest.mark.parametrize("turn", range(1, 9))
def test_images_are_turned_as_their_camera_was_held(turn: int, tmp_path: Path) -> None:
    """The same scene in all eight orientations of EXIF gives the same sample."""
    scene = np.zeros((12, 12, 3), np.uint8)
    scene[:6, :6], scene[:6, 6:] = (255, 0, 0), (0, 255, 0)
    stored = Image.fromarray(scene)
    if turn in _STORED:
        stored = stored.transpose(_STORED[turn])
    exif = Image.Exif()
    exif[0x0112] = turn
    stored.save(tmp_path / "1.png", exif=exif)
    pixels = Preprocess(resize=12, crop=12, mean=(0.0,), std=(1.0,))
    (feed,) = open_data(tmp_path, [InputSpec("x", F32, (None, 3, 12, 12))], pixels).batches(1)
    np.testing.assert_array_equal(feed["x"][0], scene.transpose(2, 0, 1).astype(F32) / np.float32(255))


# By EXIF's table: row 0 and column 0 of what is stored are these sides of the scene.
_STORED = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,  # top, right
    3: Image.Transpose.ROTATE_180,  # bottom, right
    4: Image.Transpose.FLIP_TOP_BOTTOM,  # bottom, left
    5: Image.Transpose.TRANSPOSE,  # left, top
    6: Image.Transpose.ROTATE_90,  # right, top
    7: Image.Transpose.TRANSVERSE,  # right, bottom
    8: Image.Transpose.ROTATE_270,  # left, bottom
}


def test_images_that_would_not_fit_into_memory(tmp_path: Path) -> None:
    Image.new("RGB", (4000, 1)).save(tmp_path / "1.png")
    with refused(DataError, 10**9):
        Preprocess(resize=10**9)
    with refused(DataError, tmp_path / "1.png"):
        list(open_data(tmp_path, [IMAGE], Preprocess(resize=4000)).batches(1))
