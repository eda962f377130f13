"""Gradients of a quantizer, straight through its rounding."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from onnxcalib.numerics.quant_params import FloatArray, QuantParams, spread


def scale_gradient(quantized: npt.NDArray[np.integer], qparams: QuantParams, gradient: FloatArray) -> FloatArray:
    """The gradient for the scales of quantized values that stay, from that for their real values."""
    zero = spread(qparams.zero_point, qparams.axis, qparams.block, quantized.shape)
    return _sums((quantized - zero).astype(np.float32) * gradient, qparams)


def straight_through(values: FloatArray, qparams: QuantParams, gradient: FloatArray) -> tuple[FloatArray, FloatArray]:
    """The gradients for values and for scales, from that for the values on their grid.

    Values that round to a code of the grid pass it on; those beyond move with the scale alone.
    """
    axis, block, shape = qparams.axis, qparams.block, values.shape
    scale = spread(qparams.scale, axis, block, shape)
    zero = spread(qparams.zero_point, axis, block, shape).astype(np.float32)
    least, most = (np.float32(end) - zero for end in (qparams.low, qparams.high))
    steps = values / scale
    inside = (steps > least - np.float32(0.5)) & (steps < most + np.float32(0.5))
    passed = gradient * inside
    codes = np.rint(steps)
    np.clip(codes, least, most, out=codes)
    np.multiply(codes, gradient, out=codes)
    np.multiply(steps, passed, out=steps)
    return passed, _sums(np.subtract(codes, steps, out=codes), qparams)


def _sums(values: FloatArray, qparams: QuantParams) -> FloatArray:
    """The sums over the values that share a scale."""
    axis = qparams.axis
    if axis is None:
        return np.asarray(values.sum(), np.float32)
    if qparams.block is not None:
        starts = np.arange(0, values.shape[axis], qparams.block)
        return np.asarray(np.add.reduceat(values, starts, axis), np.float32)
    return np.asarray(values.sum(tuple(other for other in range(values.ndim) if other != axis % values.ndim)))
