"""From an image to what a model reads: resize, crop, scale, normalise, lay out."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from onnxcalib.data.spec import Array, InputSpec, show
from onnxcalib.errors import DataError

Layout = Literal["nchw", "nhwc"]
MOST_SIDE = 2**14  # pixels
_MEAN = (0.485, 0.456, 0.406)
_STD = (0.229, 0.224, 0.225)


@dataclass(frozen=True)
class Preprocess:
    """How images are prepared; the defaults are those of most ImageNet models.

    Attributes:
        resize: The shorter side in pixels; by default the longer side of the crop * 256 / 224.
        crop: Centre crop, one number or height and width; by default the size that the model fixes.
        mean: What is subtracted, one number or one a channel.
        std: What is divided by after that, one number or one a channel.
        scale: What pixels are divided by first; 1.0 keeps 0..255.
        layout: "nchw" or "nhwc"; by default told from the axis of the model input that has size 1 or 3.
    """

    resize: int | None = None
    crop: int | tuple[int, int] | None = None
    mean: tuple[float, ...] = _MEAN
    std: tuple[float, ...] = _STD
    scale: float = 255.0
    layout: Layout | None = None

    def __post_init__(self) -> None:
        """Refuse what cannot work for any model."""
        for name, values in (("mean", self.mean), ("std", self.std)):
            if len(values) not in (1, 3) or not all(map(math.isfinite, values)):
                raise DataError(f"{name} is {values}.", "Give 1 number, or 3 for red, green and blue.")
        if min(self.std) <= 0 or not 0 < self.scale < math.inf:
            raise DataError(f"std is {self.std} and scale is {self.scale}.", "Both divide: give positive numbers.")
        if self.layout not in (None, "nchw", "nhwc"):
            raise DataError(f"layout is '{self.layout}'.", "Give 'nchw' or 'nhwc'.")
        size = _pair(self.crop)
        if size is not None and (len(size) != 2 or min(size) < 1):
            raise DataError(f"crop is {self.crop}.", "Give one positive number, or height and width.")
        if max(self.resize or 1, *(size or (1,))) > MOST_SIDE:
            raise DataError(f"resize is {self.resize} and crop is {self.crop}.", f"Give at most {MOST_SIDE} pixels.")
        if self.resize is not None and self.resize < 1:
            raise DataError(f"resize is {self.resize}.", "Give the pixels of the shorter side, 1 or more.")
        if self.resize is not None and self.resize < max(size or (1,)):
            hint = "The shorter side must be at least as long as the crop."
            raise DataError(f"resize is {self.resize} and crop is {self.crop}.", hint)

    def fit(self, spec: InputSpec) -> Pixels:
        """Fill in what the model's input tells, and refuse what contradicts it."""
        if spec.rank != 4:
            hint = "Images need one input with 4 axes; give arrays in a .npz file instead."
            raise DataError(f"The input '{spec.name}' is {show(spec.shape)}, so it cannot read images.", hint)
        layout = self.layout or _layout(spec)
        channels, height, width = (spec.shape[axis] for axis in ((1, 2, 3) if layout == "nchw" else (3, 1, 2)))
        channels = 3 if channels is None else channels
        if channels not in (1, 3):
            hint = "Images have 1 or 3 channels; check the layout, or give arrays in a .npz file instead."
            raise DataError(f"The input '{spec.name}' is {show(spec.shape)}: as {layout}, {channels} channels.", hint)
        size = self._size(height, width, spec)
        resize = round(max(size) * 256 / 224) if self.resize is None else self.resize
        if resize < max(size):
            hint = f"Give a resize of at least {max(size)}."
            raise DataError(f"resize is {resize}, but the crop is {show(size)}.", hint)
        self._check_dtype(spec)
        mean, std = self._values("mean", _MEAN, channels), self._values("std", _STD, channels)
        return Pixels(size, resize, channels == 1, mean, std, self.scale, layout, spec.dtype)

    def _size(self, height: int | None, width: int | None, spec: InputSpec) -> tuple[int, int]:
        size = _pair(self.crop)
        if size is None:
            if height is None or width is None:
                hint = "Give the crop: the height and width that the model was trained with."
                raise DataError(f"The input '{spec.name}' is {show(spec.shape)}: its image size is not fixed.", hint)
            return height, width
        if height not in (None, size[0]) or width not in (None, size[1]):
            hint = "Leave the crop out, or give the size that the model fixes."
            raise DataError(f"The crop is {show(size)}, but the input '{spec.name}' is {show(spec.shape)}.", hint)
        return size

    def _values(self, name: str, default: tuple[float, ...], channels: int) -> NDArray[np.float32]:
        values: tuple[float, ...] = getattr(self, name)
        if channels == 1 and values == default:
            values = (sum(values) / len(values),)
        if len(values) not in (1, channels):
            hint = "Give one number, or one a channel."
            raise DataError(f"{name} has {len(values)} values, but the model reads {channels} channel(s).", hint)
        return np.array(values, np.float32)

    def _check_dtype(self, spec: InputSpec) -> None:
        raw = set(self.mean) == {0} and set(self.std) == {1} and self.scale == 1
        if spec.dtype.kind not in "fV" and not (raw and np.can_cast(np.uint8, spec.dtype)):
            hint = "For a model that reads pixels as they are, give mean 0, std 1 and scale 1 (and an input of uint8)."
            raise DataError(f"The input '{spec.name}' is {spec.dtype}, which cannot hold normalised pixels.", hint)


@dataclass(frozen=True)
class Pixels:
    """A preprocessing with nothing left open: it turns decoded pixels into one sample."""

    size: tuple[int, int]
    resize: int
    grey: bool
    mean: NDArray[np.float32]
    std: NDArray[np.float32]
    scale: float
    layout: Layout
    dtype: np.dtype[Any]

    def scaled(self, width: int, height: int) -> tuple[int, int]:
        """The width and height that an image is resized to."""
        short = min(width, height)
        return self.resize * width // short, self.resize * height // short

    def window(self, width: int, height: int) -> tuple[int, int, int, int]:
        """The left, upper, right and lower edge of the centre crop."""
        left, upper = round((width - self.size[1]) / 2), round((height - self.size[0]) / 2)
        return left, upper, left + self.size[1], upper + self.size[0]

    def sample(self, pixels: NDArray[np.uint8]) -> Array:
        """Normalise pixels [height, width, channels] and lay them out with a batch axis of 1."""
        values = (pixels.astype(np.float32) / np.float32(self.scale) - self.mean) / self.std
        if self.layout == "nchw":
            values = values.transpose(2, 0, 1)
        return np.ascontiguousarray(values[np.newaxis]).astype(self.dtype)


def _pair(crop: int | tuple[int, int] | None) -> tuple[int, int] | None:
    return (crop, crop) if isinstance(crop, int) else crop


def _layout(spec: InputSpec) -> Layout:
    first, last = spec.shape[1] in (1, 3), spec.shape[3] in (1, 3)
    if first == last:
        hint = "Give the layout, 'nchw' or 'nhwc'."
        raise DataError(f"The input '{spec.name}' is {show(spec.shape)}: which axis is colour cannot be told.", hint)
    return "nchw" if first else "nhwc"
