"""The quantizer's gradient through ONNX Runtime training against its closed form in float64."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from models import HAS_TRAINING, Arrays, build, normal, run
from onnxcalib.autodiff.interface import gradient_name
from onnxcalib.autodiff.training.gradient_model import gradient_model

pytestmark = pytest.mark.skipif(not HAS_TRAINING, reason="needs onnxruntime-training-cpu")


def quantizer_loss(shape: str, attributes: str, opset: int = 17) -> onnx.ModelProto:
    text = f"""net (float[N,4,6] x, float[N,4,6] k, float{shape} s, float{shape} z) => (float loss) {{
        y = onnxcalib.FakeQuantize <{attributes}> (x, s, z)
        d = Mul (y, k)
        loss = ReduceSum <keepdims=0> (d)
    }}"""
    return build(text, opset=opset, ir=10)


def quantizer_slopes(feed: Arrays, axis: int | None, low: int, high: int) -> Arrays:
    """The straight-through gradients in float64."""
    x, k, s, z = (feed[name].astype(np.float64) for name in ("x", "k", "s", "z"))
    others = None if axis is None else tuple(other for other in range(3) if other != axis % 3)
    if others:
        s, z = (np.expand_dims(value, others) for value in (s, z))
    quantized = np.round((feed["x"] / s.astype(np.float32)).astype(np.float64)) + z
    inside = (quantized >= low) & (quantized <= high)
    y = s * (np.clip(quantized, low, high) - z)
    slopes = {"x": k * inside, "s": k * (y - inside * x) / s, "z": k * s * (inside - 1.0)}
    return {"loss": (y * k).sum(), **{n: v if n == "x" else v.sum(axis=others) for n, v in slopes.items()}}


@pytest.mark.parametrize("wanted", ["xsz", "x", "s", "z", "sz"])
@pytest.mark.parametrize("axis", [None, 1, -1])
def test_a_quantizer_is_straight_through(axis: int | None, wanted: str) -> None:
    count = {None: (), 1: (4,), -1: (6,)}[axis]
    model = quantizer_loss(
        "" if axis is None else f"[{count[0]}]", "low=-3, high=12" + (f", axis={axis}" if count else "")
    )
    rng = np.random.default_rng(1)
    feed = {
        "x": normal(5, 4, 6), "k": normal(5, 4, 6, seed=1),
        "s": np.array(rng.uniform(0.1, 0.3, count), np.float32), "z": np.array(rng.integers(2, 6, count), np.float32),
    }  # fmt: skip
    # Values on the edges of the grid count as inside.
    feed["x"][0, 0, 0], feed["x"][0, 0, 1] = ((edge - feed["z"].flat[0]) * feed["s"].flat[0] for edge in (-3, 12))
    outputs = run(gradient_model(model, list(wanted)), feed)
    for name, slope in quantizer_slopes(feed, axis, -3, 12).items():
        if name == "loss" or name in wanted:
            got = outputs[name if name == "loss" else gradient_name(name)]
            np.testing.assert_allclose(got, slope, rtol=1e-5, atol=1e-5 * np.abs(slope).max(), err_msg=name)


@pytest.mark.parametrize("opset", [13, 21])
def test_a_quantizer_works_over_the_opset_range(opset: int) -> None:
    feed = {"x": normal(2, 4, 6), "k": normal(2, 4, 6, seed=1), "s": np.array(0.2, "f"), "z": np.array(3, "f")}
    outputs = run(gradient_model(quantizer_loss("", "low=0, high=15", opset), ["s", "z"]), feed)
    wanted = quantizer_slopes(feed, None, 0, 15)
    np.testing.assert_allclose(outputs["s:gradient"], wanted["s"], rtol=1e-5)
    np.testing.assert_allclose(outputs["z:gradient"], wanted["z"], rtol=1e-5)


def test_a_quantizer_whose_input_goes_elsewhere_too() -> None:
    """The other way has an op without a gradient, but no parameter lies on it."""
    text = """net (float[N,4] x, float s, float z) => (float loss) {
        y = onnxcalib.FakeQuantize <low=0, high=15> (x, s, z)
        f = Floor (x)
        d = Sub (y, f)
        e = Mul (d, d)
        loss = ReduceMean <keepdims=0> (e)
    }"""
    feed = {"x": normal(6, 4), "s": np.array(0.2, np.float32), "z": np.array(3, np.float32)}
    found = run(gradient_model(build(text, opset=17), ["s"]), feed)
    quantized = np.round(feed["x"] / feed["s"]) + 3
    inside, y = (quantized >= 0) & (quantized <= 15), 0.2 * (np.clip(quantized, 0, 15) - 3)
    wanted = (2 * (y - np.floor(feed["x"])) * (y - inside * feed["x"]) / 0.2).mean()
    np.testing.assert_allclose(found["s:gradient"], wanted, rtol=1e-4)


def test_a_quantizer_of_a_constant() -> None:
    text = """net (float[N,3] x, float[2] s, float[2] z) => (float loss) {
        q = onnxcalib.FakeQuantize <low=-8, high=7, axis=0> (w, s, z)
        y = Gemm <transB=1> (x, q)
        loss = ReduceMean <keepdims=0> (y)
    }"""
    feed = {"x": normal(6, 3), "s": np.full(2, 0.3, np.float32), "z": np.zeros(2, np.float32)}
    weight = normal(2, 3)
    found = run(gradient_model(build(text, w=weight), ["s"]), feed)["s:gradient"]
    wanted = (feed["x"].mean(axis=0) / 2 * (np.round(weight / 0.3) - weight / 0.3)).sum(axis=1)
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-6)


def test_nothing_is_computed_that_no_output_needs() -> None:
    made = gradient_model(quantizer_loss("", "low=0, high=15"), ["s"])
    slopes = [node for node in made.graph.node if node.op_type == "ReduceSum"]
    assert len(slopes) == 2  # the loss and the gradient of the scale, none for the zero point
