"""What is prepared around a Loop leaves its body one that runtimes can infer."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import helper, numpy_helper
from prepared import prepared

from models import build, normal, run
from onnxcalib.api import quantize


def stopping() -> onnx.ModelProto:
    """A decoder that ends by a condition, as Paddle2ONNX writes it: scalars computed from constants go in.

    What the body makes of the condition is a vector of one, whatever it declares.
    """
    body = build(
        """body (int64 i, bool going, float[N,4] h, int64 count) => (bool more, float[N,4] next, int64 counted) {
            p = MatMul (h, w2)
            next = Tanh (p)
            counted = Add (count, one)
            l = Less (counted, limit)
            a = And (l, going)
            n = Cast <to=7> (a)
            s = Add (n, nothing)
            more = Cast <to=9> (s)
        }""",
        14,
    ).graph
    for name, value in (("one", 1), ("limit", 3), ("nothing", [0])):
        tensor = numpy_helper.from_array(np.array(value, np.int64))
        body.node.insert(0, helper.make_node("Constant", [], [name], value=tensor))
    text = """net (float[N,6] x) => (float[N,4] y, int64 c) {
        start = Cast <to=9> (truth)
        first = Cast <to=7> (zero)
        h = Gemm (x, w1, b1)
    }"""
    scalars = {"truth": np.array(1, np.int64), "zero": np.array(0, np.float32)}
    model = build(text, 14, w1=normal(6, 4), b1=normal(4), w2=normal(4, 4), **scalars)
    loop = helper.make_node("Loop", ["", "start", "h", "first"], ["y", "c"], name="loop", body=body)
    model.graph.node.append(loop)
    return model


def test_scalars_that_are_folded_stay_scalars() -> None:
    shapes = {tensor.name: list(tensor.dims) for tensor in prepared(stopping()).proto.graph.initializer}
    assert shapes["start"] == shapes["first"] == []


def test_a_loop_that_ends_by_a_condition_is_quantized_around(tmp_path: Path) -> None:
    model, feed = stopping(), {"x": normal(16, 6)}
    quantize(model, feed, output=tmp_path / "q.onnx")
    expected, found = run(model, feed), run(tmp_path / "q.onnx", feed)
    assert found["c"] == expected["c"]
    assert np.abs(found["y"] - expected["y"]).max() < 0.05


def test_a_body_may_leave_out_the_type_of_its_output(tmp_path: Path) -> None:
    model, feed = stopping(), {"x": normal(16, 6)}
    (body,) = (attribute.g for attribute in model.graph.node[-1].attribute)
    body.output[1].ClearField("type")
    body.output[1].type.denotation = "IMAGE"
    quantize(model, feed, output=tmp_path / "q.onnx")
    assert np.abs(run(tmp_path / "q.onnx", feed)["y"] - run(model, feed)["y"]).max() < 0.05
