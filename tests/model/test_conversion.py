"""Models of old opsets compute the same after they were raised."""

from __future__ import annotations

import numpy as np
import pytest
from prepared import prepared

from models import build, normal, run
from onnxcalib.model.io import read_model
from onnxcalib.model.prepare import prepare
from onnxcalib.model.shapes import input_specs

RESIZED = """
net (float[N,3,6,6] x) => (float[N,3,{0},{0}] y) {{
    [conv] c = Conv (x, w)
    [size] y = {1} <mode="{2}"> (c, scales)
}}"""


@pytest.mark.parametrize("mode", ["nearest", "linear"])
@pytest.mark.parametrize(("op", "opset", "scale"), [("Upsample", 9, 2.0), ("Resize", 10, 2.0), ("Resize", 10, 0.5)])
def test_old_resizes_count_from_the_corner(op: str, opset: int, scale: float, mode: str) -> None:
    scales = np.array([1, 1, scale, scale], np.float32)
    prepared(build(RESIZED.format(int(6 * scale), op, mode), opset, 5, w=normal(3, 3, 1, 1), scales=scales))


def test_bounds_and_pads_of_half_precision_keep_their_type() -> None:
    text = """
    net (float16[N,3,4,4] x) => (float16[N,3,6,6] y) {
        [conv] c = Conv (x, w)
        [clip] k = Clip <min=-0.5, max=0.5> (c)
        [pad] y = Pad <pads=[0,0,1,1,0,0,1,1], value=0.25> (k)
    }"""
    model = build(text, 9, 4, w=normal(3, 3, 1, 1).astype(np.float16))
    feed = {"x": normal(2, 3, 4, 4).astype(np.float16)}
    raised = prepare(read_model(model), "the model").proto
    # Float32 inside: nearer to the truth than half precision is.
    np.testing.assert_allclose(run(raised, feed)["y"], run(model, feed)["y"], atol=2e-3)


def test_an_input_that_is_an_output_without_a_shape_keeps_its_own() -> None:
    model = build("net (float[N,3] x) => (float[N,4] y) { [only] y = MatMul (x, w) }", 9, 4, w=normal(3, 4))
    passed = model.graph.output.add()
    passed.CopyFrom(model.graph.input[0])
    passed.type.tensor_type.ClearField("shape")
    (spec,) = input_specs(prepare(read_model(model), "the model").proto)
    assert spec.shape == (None, 3)
