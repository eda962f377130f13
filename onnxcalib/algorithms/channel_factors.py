"""What channels are multiplied by: the factors that leave layers the least error, as it can be told from statistics.

A tensor has one scale, of which quiet channels use few steps; a weight has one for all that a channel of its output
sums. A factor on a channel gives it more steps of the tensor and fewer of the weights that read it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from onnxcalib.model.channel_groups import ChannelGroup
from onnxcalib.model.equalize import MOST, QUARTERS, IntArray, factors_of
from onnxcalib.model.layers import Layer
from onnxcalib.recipe import Precision

FloatArray = npt.NDArray[np.float64]

STEPS = 15  # of the grid that a channel's range is found for
SILENT = 1e-3  # of the loudest channel's range: what lies below is not worth a factor
SHARES = np.linspace(0.2, 1.0, 17)  # of its peak that a channel's range may be
STRENGTHS = (0.0, 0.25, 0.5, 0.75, 1.0)  # of the way to one range for all channels


@dataclass(frozen=True)
class Channels:
    """Of the channels of a tensor: the range that a grid should have, and the mean of squares."""

    ranges: FloatArray
    energy: FloatArray

    @classmethod
    def of(cls, magnitudes: FloatArray, channels: int) -> Channels:
        """From a row of values for each channel; a flattened map has several rows of one."""
        energy = (magnitudes**2).mean(1).reshape(channels, -1).mean(1)
        return cls(best_ranges(magnitudes).reshape(channels, -1).max(1), energy)


def best_ranges(values: FloatArray) -> FloatArray:
    """For each row the top of the grid that rounds it with the least squared error."""
    peaks: FloatArray = values.max(1)
    least, best = np.full(len(values), np.inf), peaks.copy()
    for share in SHARES:
        step = np.maximum(share * peaks / STEPS, np.finfo(np.float64).tiny)[:, None]
        errors = ((np.minimum(np.rint(values / step), STEPS) * step - values) ** 2).mean(1)
        better = errors < least
        least, best = np.where(better, errors, least), np.where(better, share * peaks, best)
    return best


@dataclass(frozen=True)
class Reader:
    """Of a layer's weights what decides how well they are rounded with channels scaled."""

    peaks: FloatArray  # [outputs, channels that are read]: the largest magnitude, 0 in another group
    power: FloatArray  # of each channel that is read: the sum of squares
    values: int  # of a channel that an output sums

    @classmethod
    def of(cls, layer: Layer, weight: npt.NDArray[np.float32], channels: int) -> Reader:
        """Requires a Conv, or a Gemm that may read several values of each channel."""
        if layer.op == "Gemm":
            flat = (weight if layer.channel_axis == 0 else weight.T).reshape(layer.channels, channels, -1)
            return cls(np.abs(flat).max(2).astype(np.float64), _power(flat), flat.shape[2])
        rows = weight.reshape(layer.groups, layer.channels // layer.groups, channels // layer.groups, -1)
        peaks = np.zeros((layer.groups, rows.shape[1], layer.groups, rows.shape[2]))
        for group, each in enumerate(np.abs(rows).max(3)):
            peaks[group, :, group] = each
        power = np.concatenate([_power(each) for each in rows])
        return cls(peaks.reshape(layer.channels, channels), power, rows.shape[3])

    def error(self, seen: Channels, precision: Precision, factors: FloatArray) -> float:
        """What rounding input and weights to nearest adds to the output, relative to the output's energy.

        Errors of values are taken as independent, each a twelfth of a squared step.
        """
        step = (factors * seen.ranges).max() / (2**precision.activation - 1)
        of_input = step**2 * (self.power / factors**2).sum()
        steps = (self.peaks / factors).max(1) / (2 ** (precision.weight - 1) - 0.5)
        of_weight = steps**2 @ ((self.peaks > 0) @ (self.values * seen.energy * factors**2))
        return float((of_input + of_weight) / 12 / max(float((self.power * seen.energy).sum()), 1e-30))


def _power(rows: npt.NDArray[np.float32]) -> FloatArray:
    return np.asarray(np.einsum("oci,oci->c", rows, rows), np.float64)


def best_exponents(
    group: ChannelGroup,
    seen: Mapping[str, Channels],
    room: FloatArray,
    readers: Mapping[str, Reader],
    precisions: Mapping[str, Precision],
) -> IntArray:
    """Those with the least error; all the way where that costs the weights nothing.

    Requires what was seen of the tensors that layers read, and the room in quarters: where an activation cuts, a
    channel must not begin to be cut.
    """
    if group.is_free:
        return exponents_for(seen, room, 1.0)

    def error(exponents: IntArray) -> float:
        factors = factors_of(exponents).astype(np.float64)
        layers = group.readers
        return sum(readers[it.name].error(seen[it.input], precisions[it.name], factors) for it in layers)

    return min((exponents_for(seen, room, strength) for strength in STRENGTHS), key=error)


def exponents_for(seen: Mapping[str, Channels], room: FloatArray, strength: float) -> IntArray:
    """What brings channels so far to the range of the loudest, on the mean over tensors; silent ones stay."""
    relative = [np.maximum(each.ranges / max(each.ranges.max(), 1e-30), 1e-30) for each in seen.values()]
    ranges = np.exp2(np.mean(np.log2(relative), axis=0))
    loud = ranges > SILENT * ranges.max()
    wanted = np.zeros(len(ranges))
    wanted[loud] = np.rint(strength * QUARTERS * np.log2(ranges.max() / ranges[loud]))
    return np.asarray(np.clip(np.minimum(wanted, room), 0, MOST), np.int64)
