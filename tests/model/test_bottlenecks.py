"""Tensors through which everything passes."""

from __future__ import annotations

import onnx.parser
import pytest

from onnxcalib.model.bottlenecks import bottlenecks

NETS = {
    "a chain": ("a = Relu (x) b = Neg (a) y = Abs (b)", ["a", "b"]),
    "a residual": ("a = Relu (x) b = Neg (a) c = Abs (b) d = Add (a, c) y = Exp (d)", ["a", "d"]),
    "an early output": ("a = Relu (x) z = Neg (a) b = Abs (a) y = Exp (b)", ["a", "b"]),
    "two branches to the end": ("a = Relu (x) b = Neg (a) c = Abs (a) y = Add (b, c)", ["a"]),
    "constants": ("k = Constant <value = float[1] {2}> () a = Mul (x, k) b = Add (a, k) y = Exp (b)", ["a", "b"]),
    "a long way round": ("a = Relu (x) b = Neg (a) c = Abs (b) y = Add (x, c)", []),
}


@pytest.mark.parametrize(("body", "found"), NETS.values(), ids=NETS)
def test_what_alone_carries_what_is_still_read(body: str, found: list[str]) -> None:
    outputs = "float[N] y, float[N] z" if "z =" in body else "float[N] y"
    text = f'<ir_version: 8, opset_import: ["" : 17]> net (float[N] x) => ({outputs}) {{ {body} }}'
    assert bottlenecks(onnx.parser.parse_model(text).graph) == found


def test_a_second_input_that_is_read_late_leaves_no_bottleneck_before() -> None:
    text = """<ir_version: 8, opset_import: ["" : 17]> net (float[N] x, float[N] w) => (float[N] y) {
        a = Relu (x) b = Add (a, w) y = Exp (b) }"""
    assert bottlenecks(onnx.parser.parse_model(text).graph) == ["b"]
