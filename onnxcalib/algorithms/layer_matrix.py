"""A layer as a product of matrices: rows of weights, one an output channel, times rows of what it reads."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from onnxcalib.model.graph import GraphIndex, attributes
from onnxcalib.model.layers import Layer
from onnxcalib.numerics.patches import Windows, spaced, window_rows
from onnxcalib.numerics.positions import Counts, counted
from onnxcalib.numerics.quant_params import Array

# The second moments of wider sums take more than half a gigabyte.
MOST_COLUMNS = 8192
PADS = {b"SAME_UPPER": "upper", b"SAME_LOWER": "lower"}


@dataclass(frozen=True)
class LayerMatrix:
    """How weights and inputs of a layer become matrices; groups are their first axis."""

    layer: Layer
    windows: Windows | None = None  # None: what it reads are rows already
    strides: tuple[int, ...] = ()  # of a ConvTranspose: how far apart its inputs lie
    after: tuple[int, ...] = ()  # of a ConvTranspose: the room that it adds at the ends

    skip_reason: str | None = None  # why it cannot be taken so

    @classmethod
    def of(cls, layer: Layer, index: GraphIndex) -> LayerMatrix:
        """The layer as its node has it."""
        values, kernel = attributes(index.producers[layer.output]), layer.weight_shape[2:]
        columns = math.prod(layer.weight_shape) // layer.channels
        if columns > MOST_COLUMNS:
            return cls(layer, skip_reason=f"its sums have {columns:,} terms, more than {MOST_COLUMNS:,}")
        if layer.has_sums:
            return cls(layer)
        ones, none, padding = (1,) * len(kernel), (0,) * len(kernel), values.get("auto_pad", b"NOTSET")
        strides, dilations = (tuple(values.get(name, ones)) for name in ("strides", "dilations"))
        pads = none * 2 if padding == b"VALID" else tuple(values.get("pads", none * 2))
        windows = Windows(kernel, strides, dilations, pads, PADS.get(padding))
        if layer.op == "Conv":
            return cls(layer, windows)
        if "output_shape" in values or padding in PADS:
            return cls(layer, skip_reason="its pads are known by the shape of its output only")
        return cls(layer, windows.transposed, strides, tuple(values.get("output_padding", none)))

    @property
    def reads(self) -> tuple[Any, ...]:
        """What decides the rows that it reads of a tensor."""
        return self.windows, self.strides, self.after, self.layer.groups

    @property
    def columns(self) -> int:
        """How many products a sum is made of."""
        return math.prod(self.layer.weight_shape) // self.layer.channels

    def weights(self, values: Array) -> Array:
        """Weights, or anything in their shape, as [groups, rows, columns]."""
        groups = self.layer.groups
        if self.layer.has_sums:
            return (values if self.layer.transposed else values.T)[None]
        if self.layer.op == "Conv":
            return values.reshape(groups, len(values) // groups, -1)
        split = values.reshape(groups, len(values) // groups, values.shape[1], -1)
        # A transposed convolution turns its kernel round.
        return split[..., ::-1].transpose(0, 2, 1, 3).reshape(groups, values.shape[1], -1)

    def shaped(self, matrix: Array) -> Array:
        """The way back."""
        shape, groups = self.layer.weight_shape, self.layer.groups
        if self.layer.has_sums:
            return matrix[0] if self.layer.transposed else np.ascontiguousarray(matrix[0].T)
        if self.layer.op == "Conv":
            return matrix.reshape(shape)
        split = matrix.reshape(groups, shape[1], shape[0] // groups, -1).transpose(0, 2, 1, 3)[..., ::-1]
        return np.ascontiguousarray(split).reshape(shape)

    def rows(
        self, tensor: Array, most: int, rng: np.random.Generator, counts: Counts | None = None, fill: int = 0
    ) -> Array:
        """What the weights are multiplied with in a tensor, as [groups, rows, columns].

        Of a sample so many at most, none of positions that do not count; `fill` is the zero of the tensor's values.
        """
        if self.windows is None:
            kept = counted(tensor, counts)
            flat = kept.reshape(-1, kept.shape[-1])
            return flat[None, _drawn(len(flat), most * (len(tensor) if tensor.ndim > 1 else 1), rng)]
        if self.strides:
            tensor = spaced(tensor, self.strides, self.after, fill)
        windows = self.windows.padded(tensor.shape[2:])
        chosen = _drawn(math.prod(windows.outputs(tensor.shape[2:])), most, rng)
        return window_rows(tensor, windows, self.layer.groups, chosen, fill)


def _drawn(count: int, most: int, rng: np.random.Generator) -> npt.NDArray[Any]:
    return np.arange(count) if count <= most else np.sort(rng.choice(count, most, replace=False))
