"""Forms that some runtimes fail on never reach them."""

from __future__ import annotations

from pathlib import Path

import pytest

from models import build, feed_for, normal, op_types, run
from onnxcalib.api import quantize


@pytest.mark.parametrize("clip", ["Clip (x, low, high)", "Clip (x, low)", "Clip (x, , high)", "Clip (x)"])
@pytest.mark.parametrize("first", ["x", "Identity"])
def test_the_clip_of_an_input_is_loaded(clip: str, first: str, tmp_path: Path) -> None:
    before = "[same] i = Identity (x)" if first == "Identity" else ""
    text = f"""
    net (float[N,4] x) => (float[N,3] y) {{
        {before}
        [clip] c = {clip.replace("(x", "(i") if before else clip}
        [one] h = MatMul (c, w1)
        [two] y = MatMul (h, w2)
    }}"""
    bounds = {name: normal(1)[0] * 0 + value for name, value in (("low", -1.0), ("high", 1.5)) if name in clip}
    model = build(text, 21, 10, w1=normal(4, 5), w2=normal(5, 3), **bounds)
    feed = feed_for(model, 12)
    quantized = quantize(model, feed, output=tmp_path / "q.onnx").model
    assert op_types(quantized).count("QuantizeLinear") == 2
    expected, found = run(model, feed)["y"], run(tmp_path / "q.onnx", feed)["y"]
    assert abs(found - expected).max() < 0.05 * abs(expected).max()


def test_a_softmax_over_one_place_stays_one(tmp_path: Path) -> None:
    text = """
    net (float[N,2,6] x) => (float[N,1,3] y) {
        [one] a = Conv (x, w1)
        [soft] s = Softmax <axis=1> (a)
        [two] y = MatMul (s, w2)
    }"""
    model = build(text, w1=normal(1, 2, 1), w2=normal(6, 3))
    feed = feed_for(model, 12)
    quantize(model, feed, output=tmp_path / "q.onnx")
    expected, found = run(model, feed)["y"], run(tmp_path / "q.onnx", feed)["y"]
    assert abs(found - expected).max() < 0.05 * abs(expected).max()
