"""Grids found at run time, as DynamicQuantizeLinear is defined: eight bits from the least value to the most."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from onnxcalib.numerics.quant_params import QuantParams

BITS, STEPS = 8, 255


def dynamic_qparams(values: npt.NDArray[np.float32]) -> QuantParams:
    """The grid of a tensor, in float32 as runtimes compute it; zero always lies on it."""
    low = np.minimum(values.min(initial=0.0), np.float32(0))
    high = np.maximum(values.max(initial=0.0), np.float32(0))
    scale = np.float32((high - low) / np.float32(STEPS))
    if scale == 0:  # all is zero, or next to it: runtimes count steps of no length then, which come to zero as well
        scale = np.float32(1)
    zero = np.clip(np.rint(-low / scale), 0, STEPS)
    return QuantParams(np.asarray(scale, np.float32), np.asarray(zero, np.int32), BITS, False, 0, STEPS)
