"""One interface for both engines: they agree, and buffers are shared with the runtime."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from said import refused

from models import HAS_TRAINING, Arrays, build, normal
from onnxcalib.autodiff import gradients as differentiate
from onnxcalib.autodiff.adam import Adam
from onnxcalib.autodiff.gradients import Gradients, Loss, choose_engine
from onnxcalib.errors import ModelError, RuntimeMissingError
from onnxcalib.recipe import Engine
from onnxcalib.runtime.installed import Runtime

ENGINES = [Engine.STANDARD, Engine.TRAINING] if HAS_TRAINING else [Engine.STANDARD]
needs_training = pytest.mark.skipif(not HAS_TRAINING, reason="needs onnxruntime-training-cpu")
each_engine = pytest.mark.parametrize("engine", ENGINES)

# The operation, the shapes of its input and output without the batch, and that of its weight.
LAYERS: dict[str, tuple[str, tuple[int, ...], tuple[int, ...], tuple[int, ...]]] = {
    "conv": ("c = Conv <pads=[1,1,1,1]> (xq, wq, b)", (4, 8, 8), (6, 8, 8), (6, 4, 3, 3)),
    "strided conv": ("c = Conv <pads=[0,1,1,2], strides=[2,2]> (xq, wq, b)", (4, 8, 8), (6, 4, 5), (6, 4, 3, 3)),
    "dilated conv": ("c = Conv <dilations=[2,2], pads=[2,2,2,2]> (xq, wq, b)", (4, 8, 8), (6, 8, 8), (6, 4, 3, 3)),
    "pointwise conv": ("c = Conv (xq, wq, b)", (4, 5, 5), (6, 5, 5), (6, 4, 1, 1)),
    "grouped conv": ("c = Conv <group=2, pads=[1,1,1,1]> (xq, wq, b)", (4, 6, 6), (6, 6, 6), (6, 2, 3, 3)),
    "depthwise conv": ("c = Conv <group=4, pads=[1,1,1,1]> (xq, wq, b)", (4, 6, 6), (4, 6, 6), (4, 1, 3, 3)),
    "conv of a line": ("c = Conv <pads=[1,1]> (xq, wq, b)", (4, 9), (6, 9), (6, 4, 3)),
    "gemm": ("c = Gemm <transB=1> (xq, wq, b)", (12,), (6,), (6, 12)),
    "gemm the other way": ("c = Gemm (xq, wq, b)", (6,), (9,), (6, 9)),
    "matmul": ("m = MatMul (xq, wq)\n c = Add (m, b)", (3, 6), (3, 9), (6, 9)),
}
ACTIVATIONS = ["Relu (c)", "Clip (c, zero, six)", "Sigmoid (c)", "HardSwish (c)"]


def shape_of(*sizes: int | str) -> str:
    return f"float[{','.join(map(str, sizes))}]"


def channels_of(name: str) -> int:
    """The length of the bias."""
    _, _, target, _ = LAYERS[name]
    return target[0] if "conv" in name else target[-1]


def layer_loss(name: str, activation: str) -> onnx.ModelProto:
    """A quantized layer with its activation, and the mean squared error of what it gives."""
    operation, x, target, weight = LAYERS[name]
    rows = shape_of(weight[0])
    text = f"""net ({shape_of("N", *x)} x, {shape_of("N", *target)} target, {shape_of(*weight)} w,
                    {shape_of(channels_of(name))} b, float xs, float xz, {rows} ws, {rows} wz) => (float loss) {{
        xq = onnxcalib.FakeQuantize <low=0, high=15> (x, xs, xz)
        wq = onnxcalib.FakeQuantize <low=-8, high=7, axis=0> (w, ws, wz)
        {operation}
        y = {activation}
        d = Sub (y, target)
        e = Mul (d, d)
        loss = ReduceMean <keepdims=0> (e)
    }}"""
    return build(text, opset=17, ir=10, zero=np.float32(0), six=np.float32(1.5))


def layer_parameters(name: str) -> Arrays:
    weight = LAYERS[name][3]
    w = normal(*weight, seed=2, scale=0.4)
    scale = np.abs(w).reshape(weight[0], -1).max(axis=1) / 9  # some weights lie beyond the grid
    return {
        "w": w,
        "b": normal(channels_of(name), seed=3, scale=0.2),
        "xs": np.array(0.21, np.float32),
        "xz": np.array(6, np.float32),
        "ws": scale.astype(np.float32),
        "wz": np.arange(weight[0], dtype=np.float32) % 3 - 1,
    }


def layer_feed(name: str, seed: int = 0, batch: int = 5) -> Arrays:
    _, x, target, _ = LAYERS[name]
    return {"x": normal(batch, *x, seed=seed), "target": normal(batch, *target, seed=seed + 1)}


def layer_gradients(name: str, engine: Engine, activation: str = "Relu (c)") -> Gradients:
    return Gradients(layer_loss(name, activation), layer_parameters(name), engine, threads=1)


@needs_training
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("name", LAYERS)
def test_the_engines_agree(name: str, activation: str) -> None:
    first, second = (layer_gradients(name, engine, activation) for engine in ENGINES)
    feed = layer_feed(name)
    assert first.run(feed) == pytest.approx(second.run(feed), rel=1e-5)
    for parameter, gradient in first.gradients.items():
        other = second.gradients[parameter]
        assert np.abs(other).max() > 0, parameter
        np.testing.assert_allclose(gradient, other, rtol=1e-5, atol=1e-5 * np.abs(other).max(), err_msg=parameter)


@each_engine
def test_the_loss_alone_is_the_same(engine: Engine) -> None:
    gradients, feed = layer_gradients("conv", engine), layer_feed("conv")
    alone = Loss(layer_loss("conv", "Relu (c)"), threads=1)
    assert alone.run({**feed, **gradients.parameters}) == pytest.approx(gradients.run(feed), rel=1e-5)
    assert alone.run({**feed, **gradients.parameters, "xs": np.float32(0.1)}) != gradients.run(feed)


@each_engine
def test_changes_of_parameters_in_place_are_seen(engine: Engine) -> None:
    gradients, feed = layer_gradients("gemm", engine), layer_feed("gemm")
    alone = Loss(layer_loss("gemm", "Relu (c)"), threads=1)
    losses = [gradients.run(feed)]
    for name, value in gradients.parameters.items():
        np.subtract(value, 1, out=value) if name in ("xz", "wz") else np.multiply(value, 0.7, out=value)
        losses.append(gradients.run(feed))
        assert losses[-1] == pytest.approx(alone.run({**feed, **gradients.parameters}), rel=1e-5), name
    assert len(set(losses)) == len(losses)


@each_engine
def test_gradients_are_overwritten_in_place(engine: Engine) -> None:
    gradients = layer_gradients("matmul", engine)
    arrays = dict(gradients.gradients)
    gradients.run(layer_feed("matmul"))
    before = {name: array.copy() for name, array in arrays.items()}
    gradients.run(layer_feed("matmul", seed=5, batch=3))
    for name, array in arrays.items():
        assert gradients.gradients[name] is array
        assert array.shape == gradients.parameters[name].shape
        assert not np.array_equal(array, before[name]), name
    gradients.run(layer_feed("matmul"))
    assert all(np.array_equal(array, before[name]) for name, array in arrays.items())


@each_engine
def test_the_given_parameters_are_copied(engine: Engine) -> None:
    given = layer_parameters("gemm")
    given["w"] = given["w"].T.copy().T  # columns first in memory
    gradients = Gradients(layer_loss("gemm", "Relu (c)"), given, engine)
    gradients.run(layer_feed("gemm"))
    gradients.parameters["w"][...] = 0
    assert given["w"].any()
    assert gradients.parameters["w"].flags.c_contiguous


@each_engine
def test_a_feed_need_not_be_contiguous_nor_stay_alive(engine: Engine) -> None:
    gradients, feed = layer_gradients("conv", engine), layer_feed("conv")
    wanted = gradients.run(feed)
    transposed = {
        name: np.ascontiguousarray(value.transpose(1, 2, 3, 0)).transpose(3, 0, 1, 2) for name, value in feed.items()
    }
    assert gradients.run(transposed) == wanted


@each_engine
def test_a_constant_gradient_reaches_its_buffer(engine: Engine) -> None:
    text = "net (float[3] x, float[3] w) => (float loss) { y = Add (x, w)\n loss = ReduceSum <keepdims=0> (y) }"
    gradients = Gradients(build(text), {"w": np.zeros(3, np.float32)}, engine)
    gradients.run({"x": np.ones(3, np.float32)})
    assert gradients.gradients["w"].tolist() == [1, 1, 1]
    gradients.gradients["w"][...] = 7
    gradients.run({"x": np.ones(3, np.float32)})
    assert gradients.gradients["w"].tolist() == [1, 1, 1]


@each_engine
def test_other_outputs_of_the_loss_do_no_harm(engine: Engine) -> None:
    text = """net (float[N,3] x, float[3] w) => (float loss, float[N,3] y) {
        y = Mul (x, w)
        loss = ReduceSum <keepdims=0> (y)
    }"""
    gradients = Gradients(build(text), {"w": np.full(3, 2, np.float32)}, engine)
    assert gradients.run({"x": np.ones((4, 3), np.float32)}) == 24
    assert gradients.gradients["w"].tolist() == [4, 4, 4]


@each_engine
def test_steps_along_the_gradients_lower_the_loss(engine: Engine) -> None:
    gradients, feed = layer_gradients("conv", engine), layer_feed("conv")
    adam = Adam(gradients.parameters, dict.fromkeys(gradients.parameters, 0.0) | {"w": 1e-2, "b": 1e-2})
    first = gradients.run(feed)
    for _ in range(30):
        adam.step(gradients.gradients)
        last = gradients.run(feed)
    assert last < 0.95 * first


@each_engine
def test_a_wrong_feed_is_refused_in_a_sentence(engine: Engine) -> None:
    gradients, feed = layer_gradients("gemm", engine), layer_feed("gemm")
    with refused(ModelError, "target"):
        gradients.run({"x": feed["x"]})
    with refused(ModelError, "differentiating"):
        gradients.run({**feed, "x": feed["x"][:, :5]})
    with refused(ModelError, "computing"):
        Loss(layer_loss("gemm", "Relu (c)")).run(feed)
    assert gradients.run(feed) > 0


@each_engine
def test_a_model_that_the_runtime_cannot_load_is_refused_in_a_sentence(engine: Engine) -> None:
    text = "net (float[3] x, float[4] w) => (float loss) { y = Add (x, w)\n loss = ReduceSum <keepdims=0> (y) }"
    with pytest.raises(ModelError):
        Gradients(build(text), {"w": np.zeros(4, np.float32)}, engine)


@needs_training
def test_where_no_engine_is_asked_for_the_other_one_helps() -> None:
    text = """net (float[N,2,4,4] x, float[2,3,2,2] w) => (float loss) {
        y = ConvTranspose <strides=[2,2]> (x, w)
        e = Mul (y, y)
        loss = ReduceMean <keepdims=0> (e)
    }"""
    model, parameters, feed = build(text, ir=10), {"w": normal(2, 3, 2, 2)}, {"x": normal(3, 2, 4, 4)}
    with refused(ModelError, "ConvTranspose", "--engine standard"):
        Gradients(model, parameters, Engine.TRAINING)
    found = Gradients(model, parameters, Engine.AUTO)
    assert found.run(feed) > 0
    assert found.gradients["w"].any()


def installed(monkeypatch: pytest.MonkeyPatch, *, gradients: bool) -> None:
    package = "onnxruntime-training-cpu" if gradients else "onnxruntime"
    monkeypatch.setattr(differentiate, "check_runtime", lambda: Runtime((package,), "1.2.3", gradients))


def test_the_engine_depends_on_what_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, gradients=True)
    assert [choose_engine(engine) for engine in Engine] == [Engine.TRAINING, Engine.TRAINING, Engine.STANDARD]
    installed(monkeypatch, gradients=False)
    assert [choose_engine(engine) for engine in (Engine.AUTO, Engine.STANDARD)] == [Engine.STANDARD] * 2
    typed = "pip uninstall -y onnxruntime && pip install 'onnxcalib[training]'"
    with refused(RuntimeMissingError, "1.2.3", typed, "--engine standard"):
        choose_engine(Engine.TRAINING)


def test_the_engine_of_this_environment() -> None:
    assert choose_engine(Engine.AUTO) is ENGINES[-1]
    if HAS_TRAINING:
        assert choose_engine(Engine.TRAINING) is Engine.TRAINING
    else:
        with refused(RuntimeMissingError, "onnxruntime-training-cpu"):
            choose_engine(Engine.TRAINING)
