"""The quantizer: bits, scale and zero point; quantized values as ONNX's QuantizeLinear makes them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
FloatArray = npt.NDArray[np.float32]
Bounds = tuple[float, float]  # the least and the most that a tensor can be

UNBOUNDED: Bounds = (-np.inf, np.inf)
# A smaller range is a constant tensor: its scale must stay far from float32's smallest numbers.
TINY = 1e-8


@dataclass(frozen=True)
class QuantParams:
    """The integer quantized values low..high and the real value of each: scale * (code - zero_point)."""

    scale: FloatArray
    zero_point: npt.NDArray[np.int32]
    bits: int
    signed: bool
    low: int
    high: int
    axis: int | None = None  # None: one scale for the whole tensor
    block: int | None = None  # so many values along the axis share a scale, the last of them perhaps fewer

    @property
    def dtype(self) -> np.dtype[Any]:
        """The container: quantized values narrower than eight bits still lie in eight."""
        if self.bits > 8:
            return np.dtype(np.int16 if self.signed else np.uint16)
        return np.dtype(np.int8 if self.signed else np.uint8)

    @property
    def fills_container(self) -> bool:
        """Whether saturation of the container type alone keeps quantized values within low..high."""
        info = np.iinfo(self.dtype)
        return self.low <= info.min and self.high >= info.max

    @property
    def is_symmetric(self) -> bool:
        """Whether zero lies in the middle in every channel, as it does on the grids of symmetric schemes."""
        return bool((self.zero_point == (0 if self.signed else 2 ** (self.bits - 1))).all())

    @property
    def range(self) -> tuple[FloatArray, FloatArray]:
        """The smallest and the largest real value on the grid."""
        low = (np.float32(self.low) - self.zero_point).astype(np.float32) * self.scale
        high = (np.float32(self.high) - self.zero_point).astype(np.float32) * self.scale
        return low, high


@dataclass(frozen=True)
class QuantScheme:
    """What a grid looks like before its range is known."""

    bits: int
    signed: bool
    symmetric: bool
    power_of_two: bool = False  # scales that hardware multiplies with by shifting
    positive: bool = False  # an unsigned symmetric grid that starts at zero
    whole: bool = False  # a signed symmetric grid that keeps its lowest code

    @property
    def limits(self) -> tuple[int, int]:
        """The lowest and the highest code; weights leave -128 out because paired int8 products can overflow on it."""
        if not self.signed:
            return 0, 2**self.bits - 1
        half = 2 ** (self.bits - 1)
        return (-half + 1 if self.symmetric and self.bits == 8 and not self.whole else -half), half - 1

    @property
    def zero(self) -> int:
        """The zero point of a symmetric grid: an unsigned one has it in the middle, one step short of the top."""
        return 0 if self.signed or self.positive else 2 ** (self.bits - 1)


def make_qparams(low: npt.ArrayLike, high: npt.ArrayLike, scheme: QuantScheme, axis: int | None = None) -> QuantParams:
    """The grid that covers low..high and holds zero exactly; arrays give one scale a channel."""
    lo = np.minimum(np.asarray(low, np.float64), 0.0)
    hi = np.maximum(np.asarray(high, np.float64), 0.0)
    first, last = scheme.limits
    if scheme.symmetric:
        scale = _allowed(np.maximum(np.maximum(-lo, hi), TINY) / (last - scheme.zero), scheme)
        zero_point = np.full(scale.shape, scheme.zero)
    else:
        scale = _allowed(np.maximum(hi - lo, TINY) / (last - first), scheme)
        zero_point = np.clip(np.rint(first - lo / scale), first, last)
    return QuantParams(
        np.asarray(scale, np.float32), np.asarray(zero_point, np.int32), scheme.bits, scheme.signed, first, last, axis
    )


def _allowed(scale: npt.NDArray[np.float64], scheme: QuantScheme) -> npt.NDArray[np.float64]:
    """The scale, or the nearest power of two, as seen from its logarithm."""
    return np.exp2(np.rint(np.log2(scale))) if scheme.power_of_two else scale


def quantize(values: Array, qparams: QuantParams) -> Array:
    """Integer quantized values, rounded half to even and saturated, as QuantizeLinear does in float32."""
    scale, zero_point = _broadcast_params(qparams, values.shape)
    with np.errstate(over="ignore"):
        steps: FloatArray = np.asarray(np.asarray(values, np.float32) / scale)
    np.rint(steps, out=steps)
    if zero_point.any():
        np.add(steps, zero_point.astype(np.float32), out=steps)
    np.clip(steps, qparams.low, qparams.high, out=steps)
    quantized: Array = steps.astype(qparams.dtype)
    return quantized


def dequantize(quantized: Array, qparams: QuantParams) -> FloatArray:
    """The real values of quantized values, as DequantizeLinear computes them."""
    scale, zero_point = _broadcast_params(qparams, quantized.shape)
    return (quantized.astype(np.int32) - zero_point).astype(np.float32) * scale


def fake_quantize(values: Array, qparams: QuantParams) -> FloatArray:
    """Values moved to the nearest point of the grid."""
    return dequantize(quantize(values, qparams), qparams)


def rounding_errors(values: Array, qparams: QuantParams) -> FloatArray:
    """What fake_quantize adds to values; all of it in float32, which holds every quantized value exactly."""
    scale, zero_point = _broadcast_params(qparams, values.shape)
    exact, zero = np.asarray(values, np.float32), zero_point.astype(np.float32)
    with np.errstate(over="ignore"):
        off: FloatArray = exact / scale
    np.rint(off, out=off)
    if zero.any():
        np.add(off, zero, out=off)
    np.clip(off, qparams.low, qparams.high, out=off)
    if zero.any():
        np.subtract(off, zero, out=off)
    np.multiply(off, scale, out=off)
    return np.subtract(off, exact, out=off)


def with_least_scale(qparams: QuantParams, least: npt.ArrayLike) -> QuantParams:
    """The grid with scales raised to at least the given ones."""
    return replace(qparams, scale=np.maximum(qparams.scale, np.asarray(least, np.float32)))


def within(qparams: QuantParams, bounds: Bounds, scheme: QuantScheme) -> QuantParams:
    """One grid for a tensor, changed by as little as leaves no code beyond what the tensor can be; zero stays on it.

    The zero point of an asymmetric grid moves before the scale shrinks: all values that both grids have stay.
    """
    low, high = min(bounds[0], 0.0), max(bounds[1], 0.0)
    if not (scheme.symmetric or scheme.power_of_two or (low <= qparams.range[0] and qparams.range[1] <= high)):
        scale = float(qparams.scale)
        least, most = np.ceil(qparams.high - high / scale), np.floor(qparams.low - low / scale)
        zeros = [np.clip(qparams.zero_point, least, most)]
        if least > most:  # there is no room for so many steps
            place = qparams.low - low / (high - low) * (qparams.high - qparams.low)
            zeros = [np.floor(place), np.ceil(place)]
        moved = [replace(qparams, zero_point=np.asarray(zero, np.int32)) for zero in zeros]
        qparams = max(moved, key=lambda each: most_scale(each, bounds, scheme))
    return with_most_scale(qparams, most_scale(qparams, bounds, scheme))


def most_scale(qparams: QuantParams, bounds: Bounds, scheme: QuantScheme) -> np.float32:
    """The largest scale that leaves no code beyond the bounds; a symmetric grid must reach the farther one."""
    if scheme.power_of_two:
        return np.float32(np.inf)
    quantized = int(qparams.zero_point) - qparams.low, qparams.high - int(qparams.zero_point)
    ends = zip((-bounds[0], bounds[1]), quantized, strict=True)
    # No scale helps on a side of zero where nothing can be.
    sides = [_largest(end, count) for end, count in ends if end > 0 and count > 0]
    return (max if scheme.symmetric else min)(sides, default=np.float32(np.inf))


def _largest(end: float, count: int) -> np.float32:
    """The largest scale of which so many steps are no more than the end, in float32."""
    scale = np.float32(end / count)
    return np.nextafter(scale, np.float32(0)) if np.float32(count) * scale > np.float32(end) else scale


def with_most_scale(qparams: QuantParams, most: npt.ArrayLike) -> QuantParams:
    """The grid with scales lowered to at most the given ones."""
    return replace(qparams, scale=np.asarray(np.minimum(qparams.scale, most), np.float32))


def broadcast(values: Array, axis: int | None, ndim: int) -> Array:
    """Channel values in a shape that broadcasts against a tensor."""
    if axis is None or values.ndim == 0:
        return values
    shape = [1] * ndim
    shape[axis] = -1
    return values.reshape(shape)


def transposed(qparams: QuantParams) -> QuantParams:
    """The grid of the transposed matrix."""
    axis = None if qparams.axis is None else 1 - qparams.axis
    return replace(
        qparams, scale=qparams.scale.T, zero_point=qparams.zero_point.T, axis=axis
    )  # a vector stays as it is


def of_each(qparams: QuantParams, shape: tuple[int, ...]) -> tuple[Array, Array]:
    """The scale and the zero point of every value of a tensor."""
    scale, zero_point = _broadcast_params(qparams, shape)
    return np.broadcast_to(scale, shape), np.broadcast_to(zero_point, shape)


def spread(values: Array, axis: int | None, block: int | None, shape: tuple[int, ...]) -> Array:
    """Values of channels or blocks in a shape that broadcasts against a tensor."""
    if block is None or axis is None:
        return broadcast(values, axis, len(shape))
    return values.take(np.arange(shape[axis]) // block, axis)


def _broadcast_params(qparams: QuantParams, shape: tuple[int, ...]) -> tuple[FloatArray, npt.NDArray[np.int32]]:
    axis, block = qparams.axis, qparams.block
    return spread(qparams.scale, axis, block, shape), spread(qparams.zero_point, axis, block, shape)
