"""Gradient rules of convolutions; which form of a weight gradient is fastest was measured on onnxruntime's CPU."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from onnxcalib.autodiff.standard.step import Rule, Step
from onnxcalib.autodiff.writer import NoRuleError, Writer

# Below this many output positions one large product beats a product a sample.
FEW_POSITIONS = 100
# Products of fewer columns than this waste the kernel: several taps share one.
FEW_COLUMNS = 64
# Above this width a depthwise product of whole rows computes too much that is thrown away.
WIDE_ROW = 128


@dataclass(frozen=True)
class Windows:
    """How the windows of a convolution or a pool lie on its input."""

    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    begins: tuple[int, ...]
    ends: tuple[int, ...]
    group: int = 1

    @classmethod
    def of(cls, step: Step, kernel: tuple[int, ...]) -> Windows:
        """The windows that a node's attributes describe."""
        ones, rank = [1] * len(kernel), len(kernel)
        padding = step.attribute("auto_pad", "NOTSET")
        if padding not in ("NOTSET", "VALID"):
            raise NoRuleError(f"auto_pad={padding} is not covered; make the pads explicit")
        pads = step.attribute("pads", [0] * 2 * rank) if padding == "NOTSET" else [0] * 2 * rank
        strides, dilations = (tuple(step.attribute(name, ones)) for name in ("strides", "dilations"))
        return cls(kernel, strides, dilations, tuple(pads[:rank]), tuple(pads[rank:]), step.attribute("group", 1))

    @property
    def axes(self) -> range:
        """The axes along the kernel."""
        return range(len(self.kernel))

    @property
    def spans(self) -> tuple[int, ...]:
        """From the first to the last tap of a window."""
        return tuple((k - 1) * d for k, d in zip(self.kernel, self.dilations, strict=True))

    @property
    def dense(self) -> bool:
        """Whether no position is stepped over."""
        return max(self.strides, default=1) == 1

    def grouped(self, group: int) -> Windows:
        """The same windows in so many groups."""
        return replace(self, group=group)

    def outputs(self, sizes: tuple[int, ...]) -> tuple[int, ...]:
        """How many windows fit along each axis."""
        return tuple(self._room(axis, sizes[axis]) // self.strides[axis] + 1 for axis in self.axes)

    def remainders(self, sizes: tuple[int, ...]) -> list[int]:
        """The positions after the last window that no window reaches."""
        return [self._room(axis, sizes[axis]) % self.strides[axis] for axis in self.axes]

    def _room(self, axis: int, size: int) -> int:
        return size + self.begins[axis] + self.ends[axis] - self.spans[axis] - 1

    @property
    def settings(self) -> dict[str, Any]:
        """The attributes of a node with these windows."""
        pads = [*self.begins, *self.ends]
        steps = {"strides": self.strides, "dilations": self.dilations, "pads": pads}
        return {"kernel_shape": self.kernel, **steps, "group": self.group}

    def taps(self) -> Iterator[tuple[int, ...]]:
        """The positions in the kernel, in order."""
        return np.ndindex(*self.kernel)


def spread(write: Writer, windows: Windows, gradient: str, weight: str, sizes: tuple[int, ...]) -> str:
    """The transposed convolution: from the gradient of the windows to that of their input of the given sizes."""
    padding = windows.remainders(sizes)
    return write.op("ConvTranspose", gradient, weight, output_padding=padding, **windows.settings)


def _conv(step: Step) -> None:
    weight = step.known_dims(step.input(1))
    windows = Windows.of(step, weight[2:])
    if 0 in step.needs_grad:
        step.grad_input(0, _input_gradient(step, windows, weight))
    if 1 in step.needs_grad:
        step.grad_input(1, _weight_gradient(step, windows, step.x, step.dy, weight, step.x))
    _give_bias(step, len(weight))


def _give_bias(step: Step, rank: int) -> None:
    if 2 in step.needs_grad:
        step.grad_input(2, step.writer.reduce_sum(step.dy, (0, *range(2, rank))))


def _input_gradient(step: Step, windows: Windows, weight: tuple[int, ...]) -> str:
    begins, ends = (
        tuple(span - pad for span, pad in zip(windows.spans, side, strict=True))
        for side in (windows.begins, windows.ends)
    )
    if not windows.dense or min(*begins, *ends) < 0:
        return spread(step.writer, windows, step.dy, step.input(1), step.known_dims(step.x, 2))
    # Conv with the kernel turned round has a faster kernel in the runtime than ConvTranspose.
    turned = _turned_round(step.writer, step.input(1), weight, windows.group)
    return step.writer.op("Conv", step.dy, turned, **replace(windows, begins=begins, ends=ends).settings)


def _turned_round(write: Writer, name: str, weight: tuple[int, ...], group: int) -> str:
    """A weight with its kernel axes reversed, and input and output channels of each group swapped."""
    outputs, inputs, *kernel = weight
    if max(kernel) > 1:
        axes = len(kernel)
        last, before = write.integers([-1] * axes), write.integers([-(2**31)] * axes)
        name = write.op("Slice", name, last, before, write.integers(range(2, axes + 2)), last)
    if group == 1:
        return write.op("Transpose", name, perm=[1, 0, *range(2, len(weight))])
    if outputs == group and inputs == 1:
        return name
    split = write.reshape(name, (group, outputs // group, inputs, *kernel))
    swapped = write.op("Transpose", split, perm=[0, 2, 1, *range(3, len(weight) + 1)])
    return write.reshape(swapped, (group * inputs, outputs // group, *kernel))


def _conv_transpose(step: Step) -> None:
    weight = step.known_dims(step.input(1))
    windows = Windows.of(step, weight[2:])
    padding = step.attribute("output_padding", [0] * len(windows.kernel))
    if step.attribute("output_shape", None) is not None:
        raise NoRuleError("output_shape is not covered; make the pads explicit")
    if any(extra >= stride for extra, stride in zip(padding, windows.strides, strict=True)):
        raise NoRuleError("output_padding of a stride or more is not covered")
    if 0 in step.needs_grad:
        step.grad_input(0, step.writer.op("Conv", step.dy, step.input(1), **windows.settings))
    if 1 in step.needs_grad:
        step.grad_input(1, _weight_gradient(step, windows, step.dy, step.x, weight, step.y))
    _give_bias(step, len(weight))


def _weight_gradient(
    step: Step, windows: Windows, image: str, gradient: str, weight: tuple[int, ...], sized: str
) -> str:
    """Correlates an image of the size of a tensor with the gradient of what the windows on it gave."""
    outputs, inputs, *_ = weight
    shape = step.shape(sized)
    fixed = shape is not None and all(isinstance(dim, int) for dim in shape[2:])
    sizes = step.known_dims(sized, 2) if fixed or not windows.dense else None
    depthwise = windows.group == outputs and inputs == 1
    if sizes is not None and depthwise and not windows.dense:
        return _from_convolution(step.writer, windows, image, gradient, sizes)
    if sizes is not None and depthwise and len(sizes) == 2 and sizes[1] <= WIDE_ROW:
        return _from_rows(step.writer, windows, image, gradient, sizes)
    if sizes is not None and windows.group == 1 and math.prod(windows.outputs(sizes)) < FEW_POSITIONS:
        return _from_one_product(step.writer, windows, image, gradient, weight, sizes)
    alone = shape is not None and shape[0] == 1
    return _from_products(_Cuts(step.writer, windows, image, sizes), gradient, weight, alone=alone)


class _Cuts:
    """The part of an image that each tap of the kernel meets; the kernel's axes come last, or first."""

    def __init__(
        self, write: Writer, windows: Windows, image: str, sizes: tuple[int, ...] | None, *, first: bool = False
    ) -> None:
        self.write, self.windows, self.sizes, self.first = write, windows, sizes, first
        padded = any(windows.begins) or any(windows.ends)
        self.image = image if windows.dense or not padded else self._pad(image, windows.begins, windows.ends)

    def at(self, tap: tuple[int, ...]) -> str:
        """The values under one tap, in the shape of the output positions."""
        windows = self.windows
        starts = [index * dilation for index, dilation in zip(tap, windows.dilations, strict=True)]
        if self.sizes is None or windows.dense:
            # One Pad that also cuts, where its pads are negative.
            begins = [pad - start for pad, start in zip(windows.begins, starts, strict=True)]
            ends = [pad - span + start for pad, span, start in zip(windows.ends, windows.spans, starts, strict=True)]
            return self._pad(self.image, begins, ends) if any(begins) or any(ends) else self.image
        counts = windows.outputs(self.sizes)
        stops = [s + (n - 1) * by + 1 for s, n, by in zip(starts, counts, windows.strides, strict=True)]
        axes = [axis + (0 if self.first else 2) for axis in windows.axes]
        return self.write.op("Slice", self.image, *map(self.write.integers, (starts, stops, axes, windows.strides)))

    def _pad(self, image: str, begins: Sequence[int], ends: Sequence[int]) -> str:
        pads = [*begins, 0, 0, *ends, 0, 0] if self.first else [0, 0, *begins, 0, 0, *ends]
        return self.write.op("Pad", image, self.write.integers(pads))


def _from_products(cut: _Cuts, gradient: str, weight: tuple[int, ...], *, alone: bool) -> str:
    """A product a sample and group, summed over the samples unless there is one; taps of few channels share one."""
    write, group = cut.write, cut.windows.group
    outputs, inputs, *_ = weight
    left = write.reshape(gradient, (0, group, outputs // group, -1))
    taps, together = list(cut.windows.taps()), max(1, FEW_COLUMNS // inputs)
    parts = []
    for start in range(0, len(taps), together):
        cuts = [write.reshape(cut.at(tap), (0, group, inputs, -1)) for tap in taps[start : start + together]]
        joined = cuts[0] if len(cuts) == 1 else write.op("Concat", *cuts, axis=2)
        product = write.op("MatMul", left, write.transposed(joined, 4))
        summed = product if alone else write.reduce_sum(product, [0])
        parts.append(write.reshape(summed, (outputs, len(cuts), inputs)))
    return _joined(write, parts, weight)


def _from_one_product(
    write: Writer, windows: Windows, image: str, gradient: str, weight: tuple[int, ...], sizes: tuple[int, ...]
) -> str:
    """All samples and positions in the inner dimension of one product a tap."""
    outputs, inputs, *kernel = weight
    positions = [*range(2, len(kernel) + 2), 0]
    left = write.reshape(write.op("Transpose", gradient, perm=[1, *positions]), (outputs, -1))
    cut = _Cuts(write, windows, write.op("Transpose", image, perm=[*positions, 1]), sizes, first=True)
    parts = []
    for tap in windows.taps():
        product = write.op("MatMul", left, write.reshape(cut.at(tap), (-1, inputs)))
        parts.append(write.reshape(product, (outputs, 1, inputs)))
    return _joined(write, parts, weight)


def _joined(write: Writer, parts: list[str], weight: tuple[int, ...]) -> str:
    """A weight gradient from its taps, each of outputs by taps by inputs."""
    joined = parts[0] if len(parts) == 1 else write.op("Concat", *parts, axis=1)
    return write.reshape(write.op("Transpose", joined, perm=[0, 2, 1]), weight)


def _from_convolution(write: Writer, windows: Windows, image: str, gradient: str, sizes: tuple[int, ...]) -> str:
    """Depthwise: each channel of the image convolved with that of the gradient, as wide as its windows lie apart."""
    transposed = [1, 0, *range(2, len(sizes) + 2)]
    samples = write.reshape(write.op("Transpose", image, perm=transposed), (1, -1, *sizes))
    # Positions that no window reaches would give taps beyond the kernel.
    spare = [min(*pair) for pair in zip(windows.ends, windows.remainders(sizes), strict=True)]
    pads = [*windows.begins, *(end - less for end, less in zip(windows.ends, spare, strict=True))]
    steps: dict[str, Any] = {"strides": windows.dilations, "dilations": windows.strides, "pads": pads}
    taps = write.op("Conv", samples, write.op("Transpose", gradient, perm=transposed), **steps, group=windows.group)
    stops, axes = write.integers(windows.kernel), write.integers(range(2, len(sizes) + 2))
    kept = write.op("Slice", taps, write.integers([0] * len(sizes)), stops, axes)
    return write.reshape(kept, (windows.group, 1, *windows.kernel))


def _from_rows(write: Writer, windows: Windows, image: str, gradient: str, sizes: tuple[int, ...]) -> str:
    """Depthwise: products of whole rows, of which the diagonals that belong to a tap are summed."""
    channels, (height, width) = windows.group, windows.kernel
    columns = windows.outputs(sizes)[1]
    diagonals = write.array(_diagonals(windows, sizes[1], columns))
    swapped = [write.op("Transpose", name, perm=[1, 0, 2, 3]) for name in (image, gradient)]
    left = write.transposed(write.reshape(swapped[1], (channels, -1, columns)), 3)
    # Only rows are cut: columns stay whole, without their pads.
    tall = replace(
        windows, kernel=(height, 1), strides=(windows.strides[0], 1), dilations=(windows.dilations[0], 1),
        begins=(windows.begins[0], 0), ends=(windows.ends[0], 0),
    )  # fmt: skip
    cut = _Cuts(write, tall, swapped[0], sizes)
    parts = []
    for tap in tall.taps():
        rows = write.reshape(cut.at(tap), (channels, -1, sizes[1]))
        product = write.reshape(write.op("MatMul", left, rows), (channels, columns * sizes[1]))
        parts.append(write.op("MatMul", product, diagonals))
    joined = parts[0] if len(parts) == 1 else write.op("Concat", *parts, axis=1)
    return write.reshape(joined, (channels, 1, height, width))


def _diagonals(windows: Windows, width: int, columns: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    """One where an output column, an input column and a tap of the kernel's width belong together."""
    start = np.arange(columns)[:, None, None] * windows.strides[1] - windows.begins[1]
    reached = start + np.arange(windows.kernel[1]) * windows.dilations[1]
    return np.asarray((reached == np.arange(width)[:, None]).reshape(columns * width, -1), np.float32)


CONVOLUTIONS: dict[str, Rule] = {"Conv": _conv, "ConvTranspose": _conv_transpose}
