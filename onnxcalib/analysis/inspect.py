"""What there is to quantize in a model."""

from __future__ import annotations

from pathlib import Path

import onnx

from onnxcalib.model.layers import LayerList
from onnxcalib.model.read import list_layers, read_prepared
from onnxcalib.recipe import Recipe
from onnxcalib.targets import find_target


def inspect(model: str | Path | onnx.ModelProto) -> LayerList:
    """The layers of a model, and what stays float and why.

    Args:
        model: A float model, as a path or in memory.
    """
    return list_layers(read_prepared(model, find_target(Recipe().target)))
