"""The quantization plan: names and arrays, all that decides the written file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from onnxcalib.numerics.grid import Grid
from onnxcalib.recipe import Precision


@dataclass(frozen=True)
class LayerParams:
    """A layer's weight codes with their grid, and its float bias."""

    codes: npt.NDArray[Any]
    grid: Grid
    bias: npt.NDArray[np.float32] | None


@dataclass(frozen=True)
class QuantPlan:
    """What is quantized, and how."""

    target: str
    ranges: str  # the range estimator
    precisions: Mapping[str, Precision]  # by layer
    layers: Mapping[str, LayerParams]
    carried: Mapping[str, Grid]  # by tensor: the grid that every reader sees
    inputs: Mapping[str, Grid]  # by tensor: the grid that layers see, on top of the carried one if there is one

    def layer_input(self, tensor: str) -> Grid:
        """The grid on which layers read a tensor."""
        return self.inputs.get(tensor) or self.carried[tensor]
