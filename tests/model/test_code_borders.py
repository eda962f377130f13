"""Parts of a quantized network that take and give quantized values."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from models import build, normal, run
from onnxcalib.model.code_borders import with_code_borders

STEP, ZERO = np.array(0.05, np.float32), np.array(100, np.uint8)


def part(end: str = "") -> onnx.ModelProto:
    """A layer between two quantizers; the first clips to fewer bits."""
    text = f"""
    net (float[N,6] x) => (float y{", float z" if end else ""}) {{
        [q] a = QuantizeLinear (x, step, zero)
        [clip] b = Clip (a, low, high)
        [dq] c = DequantizeLinear (b, step, zero)
        [layer] d = Gemm (c, w)
        [q2] e = QuantizeLinear (d, step, zero)
        [dq2] y = DequantizeLinear (e, step, zero)
        {end}
    }}"""
    limits = {"low": np.array(60, np.uint8), "high": np.array(140, np.uint8)}
    return build(text, step=STEP, zero=ZERO, w=normal(6, 4, scale=0.4), **limits)


def test_quantized_values_go_in_and_come_out() -> None:
    model, x = part(), normal(9, 6)
    borders = with_code_borders(model, ["x", "y"])
    assert (borders.reads, borders.makes) == ({"x": "b"}, {"y": "e"})
    codes = np.clip(np.rint(x / STEP) + ZERO, 60, 140).astype(np.uint8)
    found = run(borders.model, {"b": codes})["e"]
    assert found.dtype == np.uint8
    np.testing.assert_allclose((found.astype(np.float32) - ZERO) * STEP, run(model, {"x": x})["y"], atol=1e-6)
    assert [value.name for value in model.graph.input] == ["x"]  # the given model stays


@pytest.mark.parametrize("end", ["[other] z = Relu (x)", "[other] z = Cast <to = 1> (b)"])
def test_what_is_read_otherwise_stays_float(end: str) -> None:
    borders = with_code_borders(part(end), ["x", "y"])
    assert (borders.reads, borders.makes) == ({}, {"y": "e"})


def test_only_the_named_tensors_change() -> None:
    assert with_code_borders(part(), ["y"]).reads == {}
    assert with_code_borders(part(), ["x"]).makes == {}
