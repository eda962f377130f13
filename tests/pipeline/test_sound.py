"""Outputs that eight bits break: noticed, mended by leaving little float, and told."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import onnx
import pytest
from command_line import said_by

from models import UNOPTIMIZED, Arrays, build, conv_net, feed_for, normal, run
from onnxcalib import ModelError, Pipeline, Recipe, quantize
from onnxcalib.algorithms.broken import SOUND_DB, Reference, output_noise
from onnxcalib.data import open_data
from onnxcalib.model.io import load
from onnxcalib.model.left_float import left_float_of
from onnxcalib.model.quantized import read_quantized
from onnxcalib.model.shapes import input_specs
from onnxcalib.model.switches import write_switched
from onnxcalib.numerics.losses import sqnr_db
from onnxcalib.pipeline import stages
from onnxcalib.pipeline.job import start
from onnxcalib.recipe import OnBroken, parse_bits


def spectrum() -> onnx.ModelProto:
    """A frequency transform, its power, bands of it, and their logarithm: small powers are what matters."""
    text = """
    net (float[N,32] x) => (float[N,12] y) {
        [wave] a = MatMul (x, w1)
        [power] p = Mul (a, a)
        [bands] m = MatMul (p, w2)
        [floor] f = Clip (m, least)
        [log] y = Log (f)
    }"""
    falling = np.exp(-np.arange(24) / 2).astype(np.float32)
    bands = np.kron(np.eye(12), np.ones((2, 1))).astype(np.float32)
    return build(text, w1=normal(32, 24, seed=1) * falling, w2=bands, least=np.float32(1e-12))


def outlier_channel() -> onnx.ModelProto:
    """One channel of the hidden tensor is a thousand times the others, and hardly read."""
    text = """
    net (float[N,16] x) => (float[N,8] y) {
        [one] a = Gemm (x, w1, b1)
        [act] r = Relu (a)
        [two] h = Gemm (r, w2, b2)
        [act2] s = Relu (h)
        [three] y = Gemm (s, w3, b3)
    }"""
    w1, w2 = normal(16, 12, seed=1), normal(12, 10, seed=2)
    w1[:, 5], w2[5] = 2000 * w1[:, 5], w2[5] * 1e-6
    biases = {f"b{number}": normal(size, seed=6) for number, size in ((1, 12), (2, 10), (3, 8))}
    return build(text, w1=w1, w2=w2, w3=normal(10, 8, seed=3), **biases)


def outlier_weights() -> onnx.ModelProto:
    """In each channel of the second layer, one weight that reads nearly nothing is ten thousand times the others."""
    model = outlier_channel()
    w1, w2 = normal(16, 12, seed=1), normal(12, 10, seed=2)
    w1[:, 5], w2[5] = w1[:, 5] * 1e-6, 1e4
    for tensor in model.graph.initializer:
        if tensor.name in ("w1", "w2", "b1"):
            value = {"w1": w1, "w2": w2, "b1": np.where(np.arange(12) == 5, 0, 0.1)}[tensor.name]
            tensor.CopyFrom(onnx.numpy_helper.from_array(value.astype(np.float32), tensor.name))
    return model


def decibels(model: onnx.ModelProto, quantized: onnx.ModelProto, feed: Arrays) -> float:
    exact, made = (run(each, feed)["y"].astype(np.float64) for each in (model, quantized))
    return sqnr_db(float((exact**2).sum()), float(((exact - made) ** 2).sum()))


def kept(model: onnx.ModelProto, data: Arrays, bits: str = "8") -> onnx.ModelProto:
    with pytest.warns(UserWarning, match="'y'"):
        return quantize(model, data, Recipe(bits=parse_bits(bits), on_broken=OnBroken.KEEP)).model


@pytest.mark.parametrize(
    ("model", "inputs", "layers"),
    [(spectrum(), ("bands",), ()), (outlier_channel(), ("two",), ()), (outlier_weights(), (), ("two",))],
    ids=["spectrum", "outlier channel", "outlier weights"],
)
@pytest.mark.parametrize("pipeline", [Pipeline.PLAIN, Pipeline.LIGHT])
def test_what_breaks_an_output_is_left_float(
    model: onnx.ModelProto, inputs: tuple[str, ...], layers: tuple[str, ...], pipeline: Pipeline
) -> None:
    data, others = feed_for(model, 32), feed_for(model, 64, seed=7)
    assert decibels(model, kept(model, data), others) < SOUND_DB
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = quantize(model, data, Recipe(pipeline=pipeline))
    assert result.left is not None
    assert (result.left.inputs, result.left.layers) == (inputs, layers)
    assert result.left.before["y"] < SOUND_DB <= result.left.after["y"]
    assert decibels(model, result.model, others) > SOUND_DB
    found = {layer.name: layer for layer in read_quantized(result.model).layers}
    assert set(found) == {layer.name for layer in result.layers.layers} - set(layers)
    for name, layer in found.items():
        assert (layer.input is None) is (name in inputs)
        assert layer.weight.bits == 8
        assert str(result.plan.precisions[name]) == ("w8" if name in inputs else "w8a8")
    assert {node.name for node in result.layers.float_nodes} >= set(layers)
    assert left_float_of(result.model) == result.left
    fused, plain = run(result.model, others)["y"], run(result.model, others, **UNOPTIMIZED)["y"]
    np.testing.assert_allclose(fused, plain, rtol=1e-4, atol=1e-6 * np.abs(plain).max())


@pytest.mark.parametrize("model", [spectrum(), outlier_channel(), outlier_weights()])
def test_the_simulation_is_the_file(model: onnx.ModelProto) -> None:
    data = feed_for(model, 32)
    started = start(model, data, Recipe())
    result = quantize(model, data, Recipe())
    simulated = started.jobs[0].simulate(result.plan)
    np.testing.assert_array_equal(run(simulated, data, **UNOPTIMIZED)["y"], run(result.model, data, **UNOPTIMIZED)["y"])


def test_a_sound_model_stays_as_it_is() -> None:
    model = conv_net()
    data = feed_for(model, 24)
    result = quantize(model, data)
    assert result.left is None
    assert result.model == quantize(model, data, Recipe(on_broken=OnBroken.KEEP)).model
    assert all(str(precision) == "w8a8" for precision in result.plan.precisions.values())


def test_training_and_mixed_bits_go_on_with_what_is_left() -> None:
    model = spectrum()
    data, others = feed_for(model, 32), feed_for(model, 64, seed=7)
    mixed = Recipe(Pipeline.ADVANCED, parse_bits("w4a8,w8a8"), steps=2, compression=2.0)
    result = quantize(model, data, mixed, workers=1)
    assert result.left is not None
    assert result.left.inputs == ("bands",)
    assert result.plan.precisions["bands"].weight_only
    assert result.assigned is not None
    assert set(result.assigned.allocation.choices) == {"wave", "bands"}
    assert decibels(model, result.model, others) > SOUND_DB


def test_fewer_bits_are_the_users_choice() -> None:
    model = outlier_channel()
    data = feed_for(model, 32)
    with pytest.warns(UserWarning, match="on_broken"):
        result = quantize(model, data, Recipe(bits=parse_bits("w6a6")))
    assert result.left is None
    assert all(str(precision) == "w6a6" for precision in result.plan.precisions.values())
    result = quantize(model, data, Recipe(bits=parse_bits("w6a6"), on_broken=OnBroken.FLOAT))
    assert result.left is not None
    assert "two" in result.left.inputs


def test_a_target_without_a_form_for_it_gets_a_float_layer() -> None:
    model = spectrum()
    data = feed_for(model, 32)
    result = quantize(model, data, Recipe(target="rknn"))
    assert result.left is not None
    assert (result.left.inputs, result.left.layers) == ((), ("bands",))
    assert decibels(model, result.model, {"x": data["x"][:1]}) > SOUND_DB  # the target fixes the batch


def test_the_command_says_what_was_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = spectrum()
    onnx.save(model, tmp_path / "model.onnx")
    np.savez(tmp_path / "data.npz", **feed_for(model, 32))
    given = ("quantize", tmp_path / "model.onnx", "-c", tmp_path / "data.npz", "-o", tmp_path / "small.onnx")
    code, _, said = said_by(capsys, *given, "--on-broken", "error")
    assert code == ModelError.exit_code
    assert all(word in said for word in ("'y'", "bands", "--on-broken"))
    assert not (tmp_path / "small.onnx").exists()
    code, _, said = said_by(capsys, *given)
    assert code == 0
    assert all(word in said for word in ("'y'", "dB", "bands"))
    written = load(tmp_path / "small.onnx")
    code, _, again = said_by(capsys, *given)
    assert "resumed" in again
    assert "bands" in again
    assert load(tmp_path / "small.onnx") == written
    code, said, _ = said_by(capsys, "explain", tmp_path / "small.onnx", "--question", "float")
    assert code == 0
    assert "bands" in said
    assert "dB" in said


def test_switches_turn_single_quantizers_off() -> None:
    model = conv_net()
    data = feed_for(model, 8)
    job = start(model, data, Recipe()).jobs[0]
    plan = stages.uniform_plan(job, stages.statistics(job))
    switched = write_switched(job.model, job.layers, plan, job.target)
    assert set(switched.weights) == {layer.name for layer in job.layers}
    assert set(switched.tensors) == set(job.points.tensors)
    count = sum(map(len, switched.tensors.values())) + len(switched.weights)
    on, off = ({**data, switched.flags: np.full(count, value)} for value in (True, False))
    quantized, exact = run(job.simulate(plan), data, **UNOPTIMIZED)["y"], run(model, data)["y"]
    np.testing.assert_allclose(run(switched.proto, on, **UNOPTIMIZED)["y"], quantized, atol=1e-5)
    np.testing.assert_allclose(run(switched.proto, off)["y"], exact, atol=1e-3)  # integer biases stay
    one = on[switched.flags].copy()
    one[switched.tensors["x"]] = False
    assert np.abs(run(switched.proto, {**data, switched.flags: one})["y"] - quantized).max() > 2e-3


def test_an_output_of_zeros_tells_nothing_and_one_of_nan_is_noise() -> None:
    text = "net (float[N,4] x) => (float[N,4] y, float[N,4] z) { z = Mul (x, none) y = {} (x) }"
    exact, broken = (build(text.replace("{}", op), none=np.zeros(4, np.float32)) for op in ("Abs", "Log"))
    data = open_data({"x": -1 - np.abs(normal(8, 4))}, input_specs(exact))
    prepared = start(spectrum(), feed_for(spectrum(), 4), Recipe()).jobs[0].model
    model = type(prepared)(exact, {}, "exact")
    assert Reference(model, data).names == ["y"]
    assert output_noise(model, data, broken).broken["y"] < -100


def wide_outlier_weights(outlier: float) -> onnx.ModelProto:
    text = """
    net (float[N,16] x) => (float[N,8] y) {
        [one] a = Gemm (x, w1, b1)
        [two] h = Gemm (a, w2)
        [three] y = Gemm (h, w3)
    }"""
    w1, w2 = normal(16, 48, seed=1), normal(48, 40, seed=2)
    w1[:, 5], w2[5] = 0, outlier
    return build(text, w1=w1, b1=np.zeros(48, np.float32), w2=w2, w3=normal(40, 8, seed=3))


def test_weights_that_stay_float_are_stored_in_sixteen_bits() -> None:
    model = wide_outlier_weights(1000)
    data, others = feed_for(model, 32), feed_for(model, 64, seed=7)
    result = quantize(model, data, Recipe())
    assert result.left is not None
    assert result.left.layers == ("two",)
    assert {name: it.qparams.bits for name, it in result.plan.constants.items()} == {"w2": 16}
    assert decibels(model, result.model, others) > SOUND_DB
    stored = {tensor.data_type for tensor in result.model.graph.initializer if np.prod(tensor.dims) == 48 * 40}
    assert stored == {onnx.TensorProto.INT16}
    assert result.noise is not None
    assert result.noise.sqnr_db["y"] == pytest.approx(decibels(model, result.model, data), abs=0.1)


def test_weights_that_sixteen_bits_break_as_well_stay_float() -> None:
    model = wide_outlier_weights(3e6)
    result = quantize(model, feed_for(model, 32), Recipe())
    assert result.left is not None
    assert result.left.layers == ("two",)
    assert not result.plan.constants
