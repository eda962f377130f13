"""The quantizer op: its straight-through gradient against the closed form, and its lowering."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

import models
from models import Arrays, normal, op_types, run
from onnxcalib.autodiff.interface import gradient_name
from onnxcalib.autodiff.standard.gradient_model import gradient_model, lower_fake_quantize
from onnxcalib.errors import ModelError

LOW, HIGH = -4, 11
QUANTIZE = f"onnxcalib.FakeQuantize <low={LOW}, high={HIGH}"


def build(text: str, opset: int = 13, **stored: np.ndarray) -> onnx.ModelProto:
    """A model that may use the quantizer op."""
    model = models.build(text, opset, **stored)
    model.opset_import.append(onnx.helper.make_opsetid("onnxcalib", 1))
    return model


def shaped(values: np.ndarray, rank: int, axis: int | None) -> np.ndarray:
    """Channel values in the shape that broadcasts."""
    return values if axis is None else values.reshape(-1, *[1] * (rank - 1 - axis))


def quantized(x: np.ndarray, scale: np.ndarray, zero: np.ndarray, axis: int | None) -> np.ndarray:
    """The quantizer in double precision."""
    scale, zero = (shaped(values.astype(np.float64), x.ndim, axis) for values in (scale, zero))
    return scale * (np.clip(np.round(x.astype(np.float64) / scale) + zero, LOW, HIGH) - zero)


def expected(dy: np.ndarray, feed: Arrays, axis: int | None) -> Arrays:
    """The closed form of the gradients of x, scale and zero point."""
    x = feed["x"].astype(np.float64)
    scale, zero = (shaped(feed[name].astype(np.float64), x.ndim, axis) for name in ("s", "z"))
    levels = x / scale
    rounded = np.round(levels)
    inside = (rounded >= LOW - zero) & (rounded <= HIGH - zero)
    rounded = np.clip(rounded, LOW - zero, HIGH - zero)
    others = tuple(other for other in range(x.ndim) if other != axis)
    return {
        "x": dy * inside,
        "s": np.sum(dy * (rounded - levels * inside), axis=others),
        "z": np.sum(-dy * scale * ~inside, axis=others),
    }


CASES = [("3,4,5", None), ("6", None), ("N,4,5", None), ("3,4,5", 0), ("3,4,5", 1), ("3,4,5", -1), ("5,2,3,3", 0)]


@pytest.mark.parametrize(("shape", "axis"), CASES)
@pytest.mark.parametrize("wanted", [("x", "s", "z"), ("x",), ("s",), ("z",)])
def test_gradients_have_the_closed_form(shape: str, axis: int | None, wanted: tuple[str, ...]) -> None:
    if "N" in shape and "x" in wanted:
        pytest.skip("a parameter has a fixed shape")
    feed = {"x": normal(*(3 if dim == "N" else int(dim) for dim in shape.split(",")), scale=3)}
    axis = None if axis is None else axis % feed["x"].ndim
    channels = () if axis is None else (feed["x"].shape[axis],)
    rng = np.random.default_rng(0)
    feed["s"] = np.asarray(rng.uniform(0.3, 0.6, channels), np.float32)
    feed["z"] = np.asarray(rng.integers(-2, 5, channels), np.float32)
    feed["t"] = normal(*feed["x"].shape, seed=3)
    one = "float" if axis is None else f"float[{channels[0]}]"
    setting = "" if axis is None else f", axis={axis}"
    model = build(f"""net (float[{shape}] x, {one} s, {one} z, float[{shape}] t) => (float loss, float[{shape}] y) {{
        y = {QUANTIZE}{setting}> (x, s, z) m = Mul (y, t) loss = ReduceSum <keepdims=0> (m) }}""")
    result = gradient_model(model, wanted)
    assert "FakeQuantize" not in op_types(result)
    assert [entry.domain for entry in result.opset_import] == [""]
    found, correct = run(result, feed), expected(feed["t"].astype(np.float64), feed, axis)
    np.testing.assert_allclose(found["y"], quantized(feed["x"], feed["s"], feed["z"], axis), rtol=1e-6)
    for name in wanted:
        np.testing.assert_allclose(found[gradient_name(name)], correct[name], rtol=2e-5, atol=2e-5)


def layer() -> onnx.ModelProto:
    """A convolution with quantized input and weight, and its squared error."""
    return build(f"""
    net (float[N,3,6,6] x, float[N,4,6,6] target, float[4,3,3,3] w, float[4] b, float[4] ws, float[4] wz, float xs,
         float xz) => (float loss, float[N,4,6,6] y) {{
        qx = {QUANTIZE}> (x, xs, xz)
        qw = {QUANTIZE}, axis=0> (w, ws, wz)
        y = Conv <pads=[1,1,1,1]> (qx, qw, b)
        d = Sub (y, target)
        s = Mul (d, d)
        loss = ReduceMean <keepdims=0> (s)
    }}""")


def layer_feed() -> Arrays:
    """Values for the layer that clip here and there."""
    return {
        "x": normal(2, 3, 6, 6, seed=1), "target": normal(2, 4, 6, 6, seed=2), "w": normal(4, 3, 3, 3, seed=3),
        "b": normal(4, seed=4), "ws": np.abs(normal(4, seed=5, scale=0.1)) + np.float32(0.1),
        "wz": np.array([3, 2, 4, 5], np.float32), "xs": np.array(0.2, np.float32), "xz": np.array(3, np.float32),
    }  # fmt: skip


def test_gradients_of_a_quantized_layer() -> None:
    feed = layer_feed()
    found = run(gradient_model(layer(), ["w", "b", "ws", "wz", "xs", "xz"]), feed)
    dy = 2 * (found["y"].astype(np.float64) - feed["target"]) / feed["target"].size
    np.testing.assert_allclose(found[gradient_name("b")], dy.sum(axis=(0, 2, 3)), rtol=1e-4, atol=1e-6)
    qx = quantized(feed["x"], feed["xs"], feed["xz"], None)
    qw = quantized(feed["w"], feed["ws"], feed["wz"], 0)
    padded = np.pad(qx, ((0, 0), (0, 0), (1, 1), (1, 1)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), axis=(2, 3))
    dqw = np.einsum("nohw,nihwkl->oikl", dy, windows)
    spread = np.pad(dy, ((0, 0), (0, 0), (1, 1), (1, 1)))
    windows = np.lib.stride_tricks.sliding_window_view(spread, (3, 3), axis=(2, 3))
    dqx = np.einsum("nohwkl,oikl->nihw", windows, qw[:, :, ::-1, ::-1])
    weights = expected(dqw, {"x": feed["w"], "s": feed["ws"], "z": feed["wz"]}, 0)
    inputs = expected(dqx, {"x": feed["x"], "s": feed["xs"], "z": feed["xz"]}, None)
    correct = {"w": weights["x"], "ws": weights["s"], "wz": weights["z"], "xs": inputs["s"], "xz": inputs["z"]}
    for name, value in correct.items():
        np.testing.assert_allclose(found[gradient_name(name)], value, rtol=1e-4, atol=1e-5)


def test_only_what_is_asked_for_is_computed() -> None:
    model = layer()
    added = op_types(gradient_model(model, ["b"]))
    assert "MatMul" not in added
    assert "Less" not in added
    weights = op_types(gradient_model(model, ["w"]))
    assert weights.count("Less") == 1
    assert weights.count("Conv") == 1
    everything = op_types(gradient_model(model, ["w", "b", "ws", "wz", "xs", "xz"]))
    assert everything.count("Less") == 2


@pytest.mark.parametrize("opset", [13, 21])
def test_lowering_alone(opset: int) -> None:
    model = layer()
    model.opset_import[0].version = opset
    before = model.SerializeToString()
    lowered = lower_fake_quantize(model)
    assert model.SerializeToString() == before
    assert "FakeQuantize" not in op_types(lowered)
    onnx.checker.check_model(lowered, full_check=True)
    feed = layer_feed()
    gradients = run(gradient_model(model, ["w"]), feed)
    np.testing.assert_array_equal(run(lowered, feed)["y"], gradients["y"])


def test_channels_of_a_tensor_of_unknown_rank() -> None:
    model = build(f"net (float[] x, float[3] s, float[3] z) => (float[] y) {{ y = {QUANTIZE}, axis=1> (x, s, z) }}")
    model.graph.input[0].type.tensor_type.ClearField("shape")
    with pytest.raises(ModelError, match="'x'"):
        lower_fake_quantize(model)


@pytest.mark.parametrize("scale", [0.05, 0.7])  # the grid ends below the ceiling, or beyond it
@pytest.mark.parametrize("activation", ["Relu (x)", "Clip (x, zero, six)"])
def test_activations_that_the_quantizer_takes_over(activation: str, scale: float) -> None:
    body = f"""net (float[3,40] x, float s, float[3,40] t) => (float loss, float[3,40] y%s) {{
        a = {activation} y = onnxcalib.FakeQuantize <low=0, high=15> (a, s, z)
        m = Mul (y, t) loss = ReduceSum <keepdims=0> (m) }}"""
    stored = {"zero": np.array(0, np.float32), "six": np.array(6, np.float32), "z": np.array(0, np.float32)}
    feed = {"x": normal(3, 40, scale=5), "s": np.array(scale, np.float32), "t": normal(3, 40, seed=2)}
    taken = gradient_model(build(body % "", **stored), ["x", "s"])
    apart = gradient_model(build(body % ", float[3,40] a", **stored), ["x", "s"])  # an output is read outside
    for model, kept in ((taken, False), (apart, True)):
        assert ("a" in {name for node in model.graph.node for name in node.output}) is kept
    found, correct = run(taken, feed), run(apart, feed)
    np.testing.assert_array_equal(found["y"], correct["y"])
    for name in (gradient_name("x"), gradient_name("s")):
        np.testing.assert_allclose(found[name], correct[name], rtol=1e-5, atol=1e-5)
