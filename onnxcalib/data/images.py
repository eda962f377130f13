"""Folders of images, decoded as they are read."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from onnxcalib.data.arrays import natural
from onnxcalib.data.preprocess import Pixels, Preprocess
from onnxcalib.data.samples import FileRows, SampleDataset, join_rows
from onnxcalib.data.spec import Array, InputSpec
from onnxcalib.errors import DataError, first_line
from onnxcalib.files import check_regular

MOST_PIXELS = 2**28  # of a resized image, nearly 1 GB
SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".webp"})


def open_images(folder: Path, inputs: Sequence[InputSpec], preprocess: Preprocess | None) -> SampleDataset:
    """Images of a folder, or of one sub-folder a class, labelled by the numbers or the order of their names."""
    if len(inputs) != 1:
        hint = "Give arrays by input name in a .npz file instead."
        raise DataError(f"{folder} holds images, but the model has {len(inputs)} inputs, not one.", hint)
    pixels = (preprocess or Preprocess()).fit(inputs[0])
    _pillow()  # a missing library is told on opening, not in the middle of the first batch
    paths, labels = _listed(folder)
    titles = [str(path) for path in paths]
    rows = FileRows(titles, [1] * len(paths), lambda index: decode(paths[index], pixels))
    return join_rows(str(folder), inputs, {inputs[0].name: rows}, labels)


def images_in(folder: Path) -> list[Path]:
    """The images that lie directly in a folder, 2 before 10."""
    found = (path for path in folder.iterdir() if path.suffix.lower() in SUFFIXES and path.name[0] != ".")
    return sorted((path for path in found if path.is_file()), key=natural)


def class_folders(folder: Path) -> list[Path]:
    """The sub-folders, if at least one of them holds images; an empty one still counts as a class."""
    folders = sorted(path for path in folder.iterdir() if path.is_dir() and path.name[0] != ".")
    return folders if any(images_in(path) for path in folders) else []


def decode(path: Path, pixels: Pixels) -> Array:
    """One image as one sample, with a batch axis of 1."""
    image_module = _pillow()
    try:
        check_regular(path)
        with image_module.open(path) as image:
            if image.mode[0] in "IF":
                hint = "Convert it to 8 bits first; how to scale it depends on the data."
                raise DataError(f"{path} has more than 8 bits a channel.", hint)
            image = _upright(image).convert("L" if pixels.grey else "RGB")  # noqa: PLW2901 - open until the end
            size = pixels.scaled(*image.size)
            if math.prod(size) > MOST_PIXELS:
                hint = f"It is {image.width} by {image.height}: remove it, or give a smaller resize."
                raise DataError(f"{path} would have {size[0]} by {size[1]} pixels when it is resized.", hint)
            image = image.resize(size, image_module.Resampling.BILINEAR)  # noqa: PLW2901
            data = np.asarray(image.crop(pixels.window(*image.size)))
    except DataError:
        raise
    except Exception as error:  # what decoders raise at damaged files knows no bounds
        raise DataError(f"{path} cannot be decoded: {first_line(error)}.", "Replace it or remove it.") from error
    return pixels.sample(data[:, :, np.newaxis] if pixels.grey else data)


def _upright(image: Any) -> Any:
    """The image as a viewer shows it: cameras say in EXIF how it was held, instead of turning the pixels."""
    from PIL import ImageOps

    try:
        return ImageOps.exif_transpose(image)
    except Exception:  # damaged EXIF says nothing; the pixels may still be sound
        return image


def _listed(folder: Path) -> tuple[list[Path], Array | None]:
    flat, classes = images_in(folder), class_folders(folder)
    if flat and classes:
        hint = "Move the images into class folders, or all into one folder."
        raise DataError(f"{folder} holds images both itself and in sub-folders.", hint)
    if flat:
        return flat, None
    groups = [images_in(path) for path in classes]
    labels = np.repeat(_numbered([path.name for path in classes]), [len(group) for group in groups])
    return [path for group in groups for path in group], labels


def _numbered(names: list[str]) -> list[int]:
    """The class of each folder: its number where all are numbered, from 0 or without a gap from 1; else its place."""
    if not all(name.isascii() and name.isdecimal() for name in names):
        return list(range(len(names)))
    numbers = [int(name) for name in names]
    start = 1 if sorted(numbers) == list(range(1, len(names) + 1)) else 0
    return [number - start for number in numbers]


def _pillow() -> ModuleType:
    try:
        from PIL import Image
    except ImportError as error:
        raise DataError("Reading images needs Pillow.", "Type: pip install onnxcalib[images]") from error
    return Image
