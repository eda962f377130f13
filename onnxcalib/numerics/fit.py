"""Outputs beside others of another size: how many rows there are may depend on the data."""

from __future__ import annotations

import numpy as np

from onnxcalib.numerics.quant_params import Array


def in_shape(shape: tuple[int, ...], output: Array) -> Array:
    """The output in the shape of its reference: what it lacks is zero, which is all noise, and more is cut off.

    A decoder that stops by itself and a choice of boxes give more or fewer rows where small differences decide.
    """
    if output.shape == shape:
        return output
    fitted = np.zeros(shape, output.dtype)
    if output.ndim == len(shape):
        common = tuple(slice(min(sizes)) for sizes in zip(shape, output.shape, strict=True))
        fitted[common] = output[common]
    return fitted
