"""Models as stages see them, held to what they were before."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx

from models import feed_for, run
from onnxcalib.model.equalize import equalized_as
from onnxcalib.model.io import read_model
from onnxcalib.model.prepare import Model, prepare
from onnxcalib.model.read import read_prepared
from onnxcalib.targets import find_target


def prepared(model: onnx.ModelProto) -> Model:
    """Prepares a model and holds the outcome to the promise: same inputs, same outputs, caller's model untouched."""
    before = model.SerializeToString(deterministic=True)
    ready = prepare(read_model(model), "the model")
    assert model.SerializeToString(deterministic=True) == before
    onnx.checker.check_model(ready.proto)
    assert_same_outputs(model, ready.proto)
    return ready


def scaled_as(model: onnx.ModelProto | Path, written: onnx.ModelProto, target: str = "ort") -> onnx.ModelProto:
    """The prepared float model with its channels scaled as in a file that was made from it."""
    return equalized_as(read_prepared(model, find_target(target)), written).proto


def assert_same_outputs(model: onnx.ModelProto, other: onnx.ModelProto) -> None:
    feed = feed_for(model, 4)
    reference, outputs = run(model, feed), run(other, feed)
    assert list(outputs) == list(reference)
    for name, value in reference.items():
        assert outputs[name].shape == value.shape
        np.testing.assert_allclose(outputs[name], value, rtol=1e-4, atol=1e-4 * np.abs(value).max())
