"""Shapes: what a fixed batch decides is computed."""

from __future__ import annotations

import numpy as np
import onnx

from models import build, normal, op_types, run
from onnxcalib.model.shapes import with_fixed_batch


def padded(tail: str = "y = Relu (r)", rest: str = "float[M,A,B,C] y") -> onnx.ModelProto:
    """Pads by half of the channels that the shape tells, and reshapes to the sizes that it tells."""
    text = f"""net (float[N,4,6,6] x, float[N,2] z) => ({rest}) {{
        s = Shape (x)
        c = Gather (s, one)
        half = Div (c, two)
        none = ConstantOfShape <value = int64[1] {{0}}> (three)
        ends = Concat <axis=0> (none, half, none, none, none, half, none, none)
        short = Slice (ends, first, last)
        p = Pad (x, short)
        b = Gather (s, zero)
        sizes = Concat <axis=0> (b, rest)
        r = Reshape (p, sizes)
        {tail}
    }}"""
    whole = {"one": [1], "zero": [0], "two": [2], "three": [1], "rest": [8, 6, 6], "first": [0], "last": [8]}
    arrays = {name: np.array(value, np.int64) for name, value in whole.items()}
    return build(text, **arrays)


def test_what_depends_on_shapes_alone_is_computed() -> None:
    model, feed = padded(), {"x": normal(1, 4, 6, 6), "z": normal(1, 2)}
    fixed = with_fixed_batch(model)
    assert op_types(fixed) == ["Pad", "Reshape", "Relu"]
    assert run(fixed, feed)["y"].shape == (1, 8, 6, 6)
    np.testing.assert_array_equal(run(fixed, feed)["y"], run(model, feed)["y"])
    onnx.checker.check_model(fixed, full_check=True)


def test_shapes_of_constants_are_known() -> None:
    text = """net (float[N,4] x) => (float[N,4] y) {
        s = Shape (k)
        f = Cast <to=1> (s)
        y = Mul (x, f)
    }"""
    fixed = with_fixed_batch(build(text, k=normal(3)))
    assert op_types(fixed) == ["Mul"]
    assert [tensor.name for tensor in fixed.graph.initializer] == ["f"]
    np.testing.assert_array_equal(run(fixed, {"x": np.ones((1, 4), np.float32)})["y"], [[3] * 4])


def test_a_shape_that_is_an_output_is_computed_and_stays() -> None:
    model = padded("y = Relu (r) t = Identity (s)", "float[M,A,B,C] y, int64[4] t")
    fixed = with_fixed_batch(model)
    assert op_types(fixed) == ["Pad", "Reshape", "Relu", "Identity"]
    assert run(fixed, {"x": normal(1, 4, 6, 6), "z": normal(1, 2)})["t"].tolist() == [1, 4, 6, 6]


def test_sizes_that_stay_free_are_left_to_the_runtime() -> None:
    text = """net (float[N,4,H,W] x) => (float[N,K] y) {
        s = Shape (x)
        b = Gather (s, zero)
        sizes = Concat <axis=0> (b, minus)
        y = Reshape (x, sizes)
    }"""
    model = build(text, zero=np.array([0], np.int64), minus=np.array([-1], np.int64))
    assert op_types(with_fixed_batch(model)) == ["Shape", "Gather", "Concat", "Reshape"]


def test_packed_weights_are_left_to_the_runtime() -> None:
    text = """net (float[N,4] x) => (float[N,3] y) {
        w = Cast <to=1> (codes)
        y = MatMul (x, w)
    }"""
    model = build(text, quantized=np.arange(12, dtype=np.int8).reshape(4, 3))
    assert op_types(with_fixed_batch(model)) == ["Cast", "MatMul"]
