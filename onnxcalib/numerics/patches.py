"""What a convolution multiplies its weights with: windows of its input at some positions, as rows of a matrix."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from onnxcalib.numerics.quant_params import Array

Sizes = tuple[int, ...]


@dataclass(frozen=True)
class Windows:
    """How the windows of a convolution lie on its input; pads are those before it along each axis, then those after."""

    kernel: Sizes
    strides: Sizes
    dilations: Sizes
    pads: Sizes
    same: str | None = None  # upper or lower: pads that depend on the size of the input

    @property
    def spans(self) -> Sizes:
        """From the first to the last tap of a window."""
        return tuple((taps - 1) * step for taps, step in zip(self.kernel, self.dilations, strict=True))

    @property
    def transposed(self) -> Windows:
        """The windows of the transposed convolution, on its input with zeros between the values."""
        rank = len(self.kernel)
        pads = tuple(span - pad for span, pad in zip(self.spans * 2, self.pads, strict=True))
        return replace(self, strides=(1,) * rank, pads=pads)

    def padded(self, sizes: Sequence[int]) -> Windows:
        """The same with pads for an input of the given sizes."""
        if self.same is None:
            return self
        totals = [
            max((-(-size // stride) - 1) * stride + span + 1 - size, 0)
            for size, stride, span in zip(sizes, self.strides, self.spans, strict=True)
        ]
        small, large = tuple(total // 2 for total in totals), tuple(total - total // 2 for total in totals)
        return replace(self, pads=small + large if self.same == "upper" else large + small, same=None)

    def outputs(self, sizes: Sequence[int]) -> Sizes:
        """How many windows fit along each axis."""
        rank = len(self.kernel)
        rooms = [sum(each) for each in zip(sizes, self.pads[:rank], self.pads[rank:], strict=True)]
        each = zip(rooms, self.spans, self.strides, strict=True)
        return tuple((room - span - 1) // stride + 1 for room, span, stride in each)


def window_rows(values: Array, windows: Windows, groups: int, positions: npt.NDArray[np.intp], fill: int = 0) -> Array:
    """Windows [groups, samples x positions, channels x taps] of values [samples, channels, ...], pads filled."""
    sizes, pads = values.shape[2:], windows.pads[: len(windows.kernel)]
    begins = np.stack(np.unravel_index(positions, windows.outputs(sizes)), -1) * windows.strides - np.array(pads)
    taps = np.stack(np.unravel_index(np.arange(np.prod(windows.kernel)), windows.kernel), -1) * windows.dilations
    places = begins[:, None] + taps
    # Only what is taken is padded: a copy of all values with pads around them would cost more than the windows.
    outside = ((places < 0) | (places >= np.array(sizes))).any(-1)
    inside = np.clip(places, 0, np.array(sizes) - 1)
    where = np.ravel_multi_index(tuple(np.moveaxis(inside, -1, 0)), sizes)
    found: Array = np.take(values.reshape(*values.shape[:2], -1), where, axis=2)
    if outside.any():
        found[:, :, outside] = fill
    samples, channels = values.shape[:2]
    split = found.reshape(samples, groups, channels // groups, *where.shape).transpose(1, 0, 3, 2, 4)
    rows: Array = split.reshape(groups, samples * len(positions), -1)
    return rows


def spaced(values: Array, strides: Sizes, after: Sizes, fill: int = 0) -> Array:
    """Values with zeros between them, as a transposed convolution sees them, and some more after the last."""
    sizes = [(size - 1) * step + 1 for size, step in zip(values.shape[2:], strides, strict=True)]
    shape = (*values.shape[:2], *(sum(each) for each in zip(sizes, after, strict=True)))
    room = np.full(shape, fill, values.dtype)
    places = [slice(None, size, step) for size, step in zip(sizes, strides, strict=True)]
    room[(slice(None), slice(None), *places)] = values
    return room
