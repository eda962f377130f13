"""Folders of images and their preprocessing."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from onnxcalib.data import InputSpec, Preprocess, open_data
from onnxcalib.data import images as images_module
from onnxcalib.errors import DataError

F32 = np.dtype("float32")
RAW = {"mean": (0.0,), "std": (1.0,), "scale": 1.0}


def model(*shape: int | None, dtype: str = "float32") -> list[InputSpec]:
    return [InputSpec("image", np.dtype(dtype), shape)]


def paint(path: Path, colour: tuple[int, ...] | int, size: tuple[int, int] = (8, 8)) -> None:
    path.parent.mkdir(exist_ok=True)
    Image.new("L" if isinstance(colour, int) else "RGB", size, colour).save(path)


def one(folder: Path, inputs: list[InputSpec], preprocess: Preprocess | None = None) -> np.ndarray:
    (feed,) = open_data(folder, inputs, preprocess).batches(99)
    return feed["image"]


def test_defaults_are_those_of_imagenet(tmp_path: Path) -> None:
    paint(tmp_path / "a.png", (255, 0, 51))
    sample = one(tmp_path, model(None, 3, 4, 6))
    wanted = [(1 - 0.485) / 0.229, (0 - 0.456) / 0.224, (0.2 - 0.406) / 0.225]
    assert sample.shape == (1, 3, 4, 6)
    assert sample.dtype == F32
    assert np.allclose(sample, np.reshape(wanted, (1, 3, 1, 1)), atol=1e-6)


def test_nhwc_half_precision_and_raw_bytes(tmp_path: Path) -> None:
    paint(tmp_path / "a.bmp", (10, 20, 30))
    half = one(tmp_path, model(None, 4, 4, 3, dtype="float16"), Preprocess(**RAW))
    assert half.dtype == np.float16
    assert half.shape == (1, 4, 4, 3)
    raw = one(tmp_path, model(None, 4, 4, 3, dtype="uint8"), Preprocess(**RAW))
    assert raw.dtype == np.uint8
    assert raw[0, 2, 2].tolist() == [10, 20, 30]
    with pytest.raises(DataError, match="uint8, which cannot hold normalised pixels"):
        open_data(tmp_path, model(None, 4, 4, 3, dtype="uint8"))


def test_resize_and_centre_crop_keep_the_middle(tmp_path: Path) -> None:
    picture = np.zeros((10, 30, 3), np.uint8)
    picture[3:7, 13:17] = 255
    Image.fromarray(picture).save(tmp_path / "a.png")
    sample = one(tmp_path, model(None, 3, 4, 4), Preprocess(resize=10, **RAW))
    assert np.array_equal(sample, np.full((1, 3, 4, 4), 255, np.float32))
    wide = one(tmp_path, model(None, 3, None, None), Preprocess(resize=10, crop=(6, 8), **RAW))
    assert wide.shape == (1, 3, 6, 8)
    assert wide[0, 0].sum() == 255 * 16
    halved = one(tmp_path, model(None, 3, None, None), Preprocess(resize=5, crop=5, **RAW))
    # The bilinear filter is wide enough to see every pixel when it shrinks, so the sum of light is kept.
    assert halved[0, 0].sum() == pytest.approx(255 * 16 / 4, rel=0.02)


@pytest.mark.parametrize("pixels", [0, -1])
def test_a_size_that_is_none_is_refused(pixels: int) -> None:
    with pytest.raises(DataError, match=rf"resize is {pixels}\."):
        Preprocess(resize=pixels)


def test_the_default_resize_is_a_seventh_more_than_the_crop() -> None:
    assert Preprocess().fit(model(None, 3, 224, 224)[0]).resize == 256
    assert Preprocess(crop=(100, 224)).fit(model(None, 3, None, None)[0]).resize == 256
    assert Preprocess().fit(model(None, 3, 32, 32)[0]).resize == 37


def test_grey_models_take_the_mean_of_the_defaults(tmp_path: Path) -> None:
    paint(tmp_path / "a.png", (255, 255, 255))
    sample = one(tmp_path, model(None, 1, 4, 4))
    assert sample.shape == (1, 1, 4, 4)
    assert np.allclose(sample, (1 - np.mean((0.485, 0.456, 0.406))) / np.mean((0.229, 0.224, 0.225)))
    assert np.allclose(one(tmp_path, model(None, 4, 4, 1), Preprocess(mean=(0.5,), std=(0.5,))), 1)
    with pytest.raises(DataError, match=r"mean has 3 values.*1 channel"):
        open_data(tmp_path, model(None, 1, 4, 4), Preprocess(mean=(0.1, 0.2, 0.3)))


def test_colour_models_read_grey_and_transparent_images(tmp_path: Path) -> None:
    paint(tmp_path / "a.png", 7)
    Image.new("RGBA", (8, 8), (7, 7, 7, 0)).save(tmp_path / "b.webp", lossless=True, exact=True)
    Image.new("P", (8, 8), 0).save(tmp_path / "c.png")
    batch = one(tmp_path, model(None, 3, 4, 4), Preprocess(**RAW))
    assert batch[:2].min() == batch[:2].max() == 7
    assert batch.shape == (3, 3, 4, 4)


def test_class_folders_give_labels_and_files_natural_order(tmp_path: Path) -> None:
    for name, colours in (
        ("dog", {"10.png": 4, "2.JPG": 3}),
        ("cat", {"a.png": 1, "b.jpeg": 2}),
        (".hidden", {"x.png": 9}),
    ):
        for file, colour in colours.items():
            paint(tmp_path / name / file, (colour * 20,) * 3)
    (tmp_path / "cow").mkdir()
    (tmp_path / "notes.txt").write_text("about")
    data = open_data(tmp_path, model(None, 3, 4, 4), Preprocess(**RAW))
    assert data.labels.tolist() == [0, 0, 2, 2]
    (feed,) = data.batches(8)
    assert np.allclose(feed["image"][:, 0, 0, 0], [20, 40, 60, 80], atol=2)


@pytest.mark.parametrize(
    ("names", "classes"),
    [
        (("0", "2", "10"), {"0": 0, "2": 2, "10": 10}),  # some of the classes
        (("0007", "0003"), {"0003": 3, "0007": 7}),
        (("1", "2", "3", "10", "4", "5", "6", "7", "8", "9"), {"1": 0, "2": 1, "10": 9}),  # all, counted from 1
        (("cat", "7"), {"7": 0, "cat": 1}),
    ],
)
def test_folders_with_numbers_for_names_are_those_classes(
    names: tuple[str, ...], classes: dict[str, int], tmp_path: Path
) -> None:
    for name in names:
        paint(tmp_path / name / "a.png", 5)
    data = open_data(tmp_path, model(None, 3, 4, 4), Preprocess(**RAW))
    found = dict(zip(sorted(names), data.labels.tolist(), strict=True))
    assert classes.items() <= found.items()


def test_a_flat_folder_has_no_labels_and_fixed_batches_hold(tmp_path: Path) -> None:
    for index in range(5):
        paint(tmp_path / f"{index}.png", index)
    data = open_data(tmp_path, model(2, 3, 4, 4), Preprocess(**RAW))
    assert data.labels is None
    assert len(data) == 4
    assert [feed["image"][:, 0, 0, 0].tolist() for feed in data.batches(1)] == [[0, 1], [2, 3]]


def test_images_are_decoded_a_batch_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for index in range(6):
        paint(tmp_path / f"{index}.png", index)
    decoded = []
    real = images_module.decode
    monkeypatch.setattr(images_module, "decode", lambda path, pixels: decoded.append(path.name) or real(path, pixels))
    feeds = open_data(tmp_path, model(None, 3, 4, 4)).batches(2)
    assert decoded == []
    next(feeds)
    assert decoded == ["0.png", "1.png"]


def test_files_that_cannot_be_decoded_are_named(tmp_path: Path) -> None:
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8)).save(tmp_path / "a.png")
    whole = (tmp_path / "a.png").read_bytes()
    for content in (b"", b"not an image", whole[: len(whole) // 2], whole[:40]):
        (tmp_path / "a.png").write_bytes(content)
        with pytest.raises(DataError, match=r"a\.png cannot be decoded"):
            one(tmp_path, model(None, 3, 4, 4))
    Image.fromarray(np.full((8, 8), 40000, np.uint16)).save(tmp_path / "a.png")
    with pytest.raises(DataError, match=r"a\.png has more than 8 bits"):
        one(tmp_path, model(None, 3, 4, 4))


UNFIT = [
    ((None, 3, None, None), Preprocess(), "size is not fixed.*crop"),
    ((None, None, None, None), Preprocess(crop=4), "which axis is colour.*layout"),
    ((None, 3, 4, 3), Preprocess(), "which axis is colour"),
    ((None, 4, 8, 8), Preprocess(layout="nchw"), "4 channels"),
    ((None, 3, 8, 8), Preprocess(crop=4), "crop is .4, 4."),
    ((None, 3, 8, 8), Preprocess(resize=7), "resize is 7"),
    ((None, 3), Preprocess(), "cannot read images"),
]


@pytest.mark.parametrize(("shape", "preprocess", "words"), UNFIT)
def test_preprocessing_that_does_not_fit_the_model(tmp_path: Path, shape, preprocess: Preprocess, words: str) -> None:
    paint(tmp_path / "a.png", 7)
    with pytest.raises(DataError, match=words):
        open_data(tmp_path, model(*shape), preprocess)


def test_layout_settles_what_the_shape_leaves_open(tmp_path: Path) -> None:
    paint(tmp_path / "a.png", 7)
    assert one(tmp_path, model(None, 3, 4, 3), Preprocess(layout="nchw")).shape == (1, 3, 4, 3)
    assert one(tmp_path, model(None, None, None, None), Preprocess(layout="nhwc", crop=4)).shape == (1, 4, 4, 3)


SENSELESS = [
    {"std": (0.0,)},
    {"std": (1.0, -1.0, 1.0)},
    {"scale": 0.0},
    {"scale": float("nan")},
    {"mean": (1.0, 2.0)},
    {"mean": ()},
    {"mean": (float("nan"),)},
    {"crop": 0},
    {"crop": (4, -1)},
    {"resize": 0},
    {"resize": 4, "crop": 5},
    {"resize": 4, "crop": (2, 5)},
    {"layout": "chw"},
]


@pytest.mark.parametrize("options", SENSELESS)
def test_senseless_preprocessing_is_refused(options: dict[str, object]) -> None:
    with pytest.raises(DataError, match=next(iter(options))):
        Preprocess(**options)


def test_what_is_wrong_with_an_image_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paint(tmp_path / "a.png", 7)
    with pytest.raises(DataError, match="2 inputs"):
        open_data(tmp_path, model(None, 3, 4, 4) * 2)
    paint(tmp_path / "cat" / "a.png", 7)
    with pytest.raises(DataError, match="both itself and in sub-folders"):
        open_data(tmp_path, model(None, 3, 4, 4))
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(DataError, match=r"pip install onnxcalib\[images\]"):
        open_data(tmp_path / "cat", model(None, 3, 4, 4))
