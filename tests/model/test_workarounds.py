"""Forms that some runtimes fail on never reach them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from models import UNOPTIMIZED, build, feed_for, normal, op_types, run
from onnxcalib.api import Recipe, quantize


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


def test_a_softmax_on_a_fine_grid_is_not_left_to_an_integer_kernel() -> None:
    """Between layers whose results are quantized, on a grid that ends at a fraction of one, it wrapped to zero."""
    text = """net (float[N,2,4,4] x) => (float[N,3,4,4] y) {
        [first] c = Conv (x, w1, b1)
        [soft] s = Softmax <axis = 3> (c)
        [both] k = Concat <axis = 1> (s, c)
        [second] y = Conv (k, w2)
    }"""
    model = build(text, w1=normal(2, 2, 1, 1, scale=0.01), b1=normal(2), w2=normal(3, 4, 1, 1))
    feed = feed_for(model, 8)
    found, expected = (run(each, feed)["y"] for each in (quantize(model, feed).model, model))
    assert ((found - expected) ** 2).sum() < 1e-3 * (expected**2).sum()


def test_a_float_bias_beside_nearly_zero_weights_is_heard() -> None:
    """A runtime makes an integer of the bias in steps of the weight, which may be too fine to hold it."""
    text = """net (float[N,3,5] x) => (float[N,4,9] y) {
        [up] u = ConvTranspose <strides = [2]> (x, w1, b1)
        [second] y = Conv (u, w2)
    }"""
    model = build(text, w1=normal(3, 2, 1, scale=1e-7), b1=normal(2), w2=normal(4, 2, 1))
    feed = feed_for(model, 8)
    found, expected = (run(each, feed)["y"] for each in (quantize(model, feed, Recipe(target="paper")).model, model))
    assert ((found - expected) ** 2).sum() < 1e-3 * (expected**2).sum()


def test_a_pool_behind_a_pad_as_wide_as_its_kernel_is_loaded() -> None:
    """The runtime would pad the pool itself, by more than it allows."""
    text = """net (float[N,2,8,8] x) => (float[N,3,6,8] y) {
        [first] c = Conv (x, w1)
        [pad] p = Pad (c, ends, value)
        [pool] m = MaxPool <kernel_shape = [3, 1], pads = [1, 0, 1, 0], strides = [2, 1]> (p)
        [second] y = Conv (m, w2)
    }"""
    ends = np.array([0, 0, 2, 0, 0, 0, 2, 0], np.int64)
    model = build(text, ends=ends, value=np.float32(0.5), w1=normal(2, 2, 1, 1), w2=normal(3, 2, 1, 1))
    feed = feed_for(model, 8)
    found = run(quantize(model, feed).model, feed)["y"]
    expected = run(model, feed, **UNOPTIMIZED)["y"]
    assert ((found - expected) ** 2).sum() < 1e-2 * (expected**2).sum()
