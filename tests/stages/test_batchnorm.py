"""Batch-norm tuning: statistics against NumPy, re-fusing that leaves the codes alone, and when it is kept."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import onnx
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from onnx import numpy_helper

from models import (
    BUILDERS,
    Arrays,
    build,
    conv1d,
    conv_net,
    conv_transpose,
    feed_for,
    initializer,
    norm_of,
    normal,
    run,
    transformer_block,
)
from onnxcalib.data import first
from onnxcalib.job import Job, read_prepared, silent, start
from onnxcalib.model import normalize
from onnxcalib.model.extract import with_outputs
from onnxcalib.model.layers import Layer, find_layers
from onnxcalib.model.normalize import bound_names, mean_name, variance_name, wanted_name, with_statistics
from onnxcalib.numerics.grid import Grid, GridKind, dequantize, make_grid, quantize, with_least_scale
from onnxcalib.pipeline import candidates_of, tune_batch_norm
from onnxcalib.pipeline import quantize as quantize_model
from onnxcalib.plan import LayerParams, QuantPlan
from onnxcalib.recipe import BatchNormReference, Pipeline, Precision, RangeMethod, Recipe, parse_bits
from onnxcalib.stages.batchnorm import LIMITS, ROUNDS, ChannelStatistics, Tuner, refuse, refuse_layer
from onnxcalib.stages.rounding import least_scale
from onnxcalib.stages.teacher import Teacher
from onnxcalib.targets import find_target

SAMPLES = 32  # one batch of statistics


def job_for(model: onnx.ModelProto, bits: str = "w4a8", target: str = "ort", samples: int = SAMPLES) -> Job:
    recipe = Recipe(Pipeline.LIGHT, parse_bits(bits), target=target, ranges=RangeMethod.MINMAX)
    return start(model, feed_for(model, samples), recipe).jobs[0]


def plan_of(job: Job) -> QuantPlan:
    return candidates_of(job).stitch({layer.name: job.recipe.bits[0] for layer in job.layers})


def tuner_of(job: Job, reference: BatchNormReference = BatchNormReference.FLOAT) -> Tuner:
    return Tuner(job.model, job.layers, job.target, job.data, Teacher(job.model, job.data), reference)


def stats(mean: np.ndarray, variance: np.ndarray) -> ChannelStatistics:
    return ChannelStatistics(np.asarray(mean, np.float64), np.asarray(variance, np.float64))


def stored_codes(model: onnx.ModelProto) -> dict[str, bytes]:
    """The weight codes of a written file: plain bytes or bit planes."""
    return {
        tensor.name: tensor.raw_data
        for tensor in model.graph.initializer
        if tensor.name.endswith(("_planes", "_codes")) and tensor.data_type in (2, 3)
    }


# Statistics.


def channel_axis(layer: Layer) -> int:
    return 1 if layer.op in ("Conv", "ConvTranspose") else -1


def by_numpy(values: np.ndarray, layer: Layer) -> tuple[np.ndarray, np.ndarray]:
    rows = np.moveaxis(values.astype(np.float64), channel_axis(layer), -1).reshape(-1, layer.channels)
    mean, reach = rows.mean(axis=0), normalize.REACH * rows.std(axis=0)
    rows = np.clip(rows, mean - reach, mean + reach)  # outliers are cut
    return rows.mean(axis=0), rows.var(axis=0)


@pytest.fixture
def no_outliers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Statistics of all values: then re-fusing restores them exactly."""
    monkeypatch.setattr(normalize, "REACH", 1e9)


def at_opset(model: onnx.ModelProto, opset: int) -> onnx.ModelProto:
    return model if opset == 13 else onnx.version_converter.convert_version(model, opset)


@pytest.mark.parametrize("opset", [13, 18, 21])
@pytest.mark.parametrize("builder", BUILDERS.values(), ids=BUILDERS)
def test_statistics_are_those_of_numpy(builder: Callable[[], onnx.ModelProto], opset: int) -> None:
    ready = read_prepared(at_opset(builder(), opset), find_target("ort"))
    assert ready.proto.opset_import[0].version == opset
    layers = find_layers(ready).layers
    data = feed_for(ready.proto, 12)
    found = run(with_statistics(ready.proto, layers), data)
    tensors = run(with_outputs(ready.proto, [layer.summed for layer in layers]), data)
    assert len(found) == 4 * len(layers)
    for layer in layers:
        mean, variance = by_numpy(tensors[layer.summed], layer)
        assert found[mean_name(layer)].shape == (layer.channels,)
        np.testing.assert_allclose(found[mean_name(layer)], mean, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(found[variance_name(layer)], variance, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("no_outliers")
@pytest.mark.parametrize("opset", [13, 18])
def test_later_layers_see_normalized_inputs(opset: int) -> None:
    text = """
    net (float[N,2,4,4] x) => (float[N,5] y) {
        [one] c = Conv (x, w1, b1)
        [relu] r = Relu (c)
        [flat] f = Flatten (r)
        [two] y = Gemm (f, w2, b2)
    }"""
    model = build(text, opset, w1=normal(3, 2, 1, 1), b1=normal(3), w2=normal(48, 5), b2=normal(5))
    ready = read_prepared(model, find_target("ort"))
    one, two = find_layers(ready).layers
    data = feed_for(model, 9)
    c = run(with_outputs(model, ["c"]), data)["c"].astype(np.float64)
    mean, variance = by_numpy(c, one)
    wanted = stats([0.5, -2.0, 3.0], variance * [1.0, 1.5**2, 100.0])  # the last is beyond the limits
    factor = np.array([1.0, 1.5, LIMITS[1]])
    shape = (1, 3, 1, 1)
    normalized = (c - mean.reshape(shape)) * factor.reshape(shape) + wanted.mean.reshape(shape)
    after_two = np.maximum(normalized, 0).reshape(9, -1) @ initializer(model, "w2") + initializer(model, "b2")
    fed = {wanted_name(mean_name(one)): wanted.mean, wanted_name(variance_name(one)): wanted.variance}
    fed |= {wanted_name(mean_name(two)): np.zeros(5), wanted_name(variance_name(two)): np.ones(5)}
    for layer in (one, two):
        low, high = bound_names(layer)
        fed |= {wanted_name(low): np.full(layer.channels, -1e30), wanted_name(high): np.full(layer.channels, 1e30)}
    graph = with_statistics(ready.proto, [one, two], LIMITS)
    found = run(graph, {**data, **{name: value.astype(np.float32) for name, value in fed.items()}})
    np.testing.assert_allclose(found[mean_name(one)], mean, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(found[variance_name(one)], variance, rtol=1e-4)
    np.testing.assert_allclose(found[mean_name(two)], after_two.mean(axis=0), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(found[variance_name(two)], after_two.var(axis=0), rtol=1e-4)


# Re-fusing one layer.


def gemm_layer(channels: int, inputs: int) -> Layer:
    model = build(f"net (float[N,{inputs}] x) => (float[N,{channels}] y) {{ [fc] y = Gemm <transB=1> (x, w, b) }}",
                  w=normal(channels, inputs), b=normal(channels))  # fmt: skip
    return find_layers(read_prepared(model, find_target("ort"))).layers[0]


def rounded(weight: np.ndarray, bias: np.ndarray | None, bits: int, target: str) -> LayerParams:
    kind = find_target(target).weight_kind(bits)
    grid = make_grid(weight.min(axis=1), weight.max(axis=1), kind, axis=0)
    return LayerParams(quantize(weight, grid), grid, bias)


ACTIVATION = make_grid(0.0, 4.0, GridKind(8, signed=False, symmetric=False))
CHANNELS, INPUTS = 4, 6
spreads = st.lists(st.floats(1e-3, 1e3), min_size=CHANNELS, max_size=CHANNELS).map(np.array)
means = st.lists(st.floats(-50, 50), min_size=CHANNELS, max_size=CHANNELS).map(np.array)


def output(params: LayerParams, x: np.ndarray) -> np.ndarray:
    bias = 0.0 if params.bias is None else params.bias.astype(np.float64)
    return x @ dequantize(params.codes, params.grid).astype(np.float64).T + bias


@settings(max_examples=60)
@given(st.integers(0, 10**6), st.sampled_from(["ort", "paper"]), st.integers(2, 8), st.booleans(), means, spreads)
def test_the_output_gets_the_wanted_statistics(
    seed: int, target: str, bits: int, has_bias: bool, mean: np.ndarray, spread: np.ndarray
) -> None:
    rng = np.random.default_rng(seed)
    weight = rng.standard_normal((CHANNELS, INPUTS)).astype(np.float32)
    bias = rng.standard_normal(CHANNELS).astype(np.float32) if has_bias else None
    params = rounded(weight, bias, bits, target)
    x = rng.uniform(0, 4, (40, INPUTS))
    before = output(params, x)
    found, wanted = stats(before.mean(axis=0), before.var(axis=0)), stats(mean, spread**2)
    layer = gemm_layer(CHANNELS, INPUTS)
    tuned = refuse_layer(params, layer, find_target(target), ACTIVATION, wanted, found, scale=True)
    factor = np.clip(spread / np.sqrt(found.variance), *LIMITS)
    after = output(tuned, x)
    np.testing.assert_allclose(after, factor * (before - found.mean) + mean, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(after.mean(axis=0), mean, rtol=1e-4, atol=1e-4)
    kept = (factor > LIMITS[0]) & (factor < LIMITS[1])
    np.testing.assert_allclose(after.std(axis=0)[kept], spread[kept], rtol=1e-4)
    assert tuned.codes is params.codes
    np.testing.assert_array_equal(tuned.grid.zero_point, params.grid.zero_point)


def held(params: LayerParams, layer: Layer, target: str) -> LayerParams:
    """With steps no finer than the int32 bias allows, as rounding makes them."""
    assert params.bias is not None
    least = least_scale(layer, find_target(target), params.bias, ACTIVATION, per_channel=True)
    return replace(params, grid=with_least_scale(params.grid, least))


@settings(max_examples=60)
@given(st.integers(0, 10**6), st.sampled_from(["ort", "paper"]), st.sampled_from([1.0, 1e-13]), means, spreads)
@example(3, "ort", 1e-13, np.full(CHANNELS, 49.0), np.ones(CHANNELS))
@example(4, "ort", 1e-13, np.full(CHANNELS, -31.0), np.ones(CHANNELS))
def test_equal_statistics_change_no_bit(
    seed: int, target: str, size: float, mean: np.ndarray, spread: np.ndarray
) -> None:
    rng = np.random.default_rng(seed)
    weight = (size * rng.standard_normal((CHANNELS, INPUTS))).astype(np.float32)
    bias = (rng.standard_normal(CHANNELS) * 10.0 ** rng.integers(-12, 3, CHANNELS)).astype(np.float32)
    layer = gemm_layer(CHANNELS, INPUTS)
    params, same = held(rounded(weight, bias, 4, target), layer, target), stats(mean, spread**2)
    tuned = refuse_layer(params, layer, find_target(target), ACTIVATION, same, same, scale=True)
    assert tuned.grid.scale.dtype == np.float32
    assert tuned.grid.scale.tobytes() == params.grid.scale.tobytes()
    assert tuned.bias is not None
    assert tuned.bias.tobytes() == bias.tobytes()
    assert tuned.codes.tobytes() == params.codes.tobytes()


EXTREMES = {
    "zero found": ([1.0] * CHANNELS, [0.0] * CHANNELS, LIMITS[1]),
    "zero wanted": ([0.0] * CHANNELS, [1.0] * CHANNELS, LIMITS[0]),
    "both zero": ([0.0] * CHANNELS, [0.0] * CHANNELS, 1.0),
    "huge": ([1e30] * CHANNELS, [1e-30] * CHANNELS, LIMITS[1]),
    "tiny": ([1e-30] * CHANNELS, [1e30] * CHANNELS, LIMITS[0]),
}


@pytest.mark.parametrize("target", ["ort", "paper"])
@pytest.mark.parametrize("case", EXTREMES)
def test_a_broken_channel_keeps_a_sound_grid(case: str, target: str) -> None:
    wanted, found, factor = EXTREMES[case]
    params = rounded(normal(CHANNELS, INPUTS), normal(CHANNELS), 4, target)
    pair = stats(normal(CHANNELS, seed=1), np.array(wanted)), stats(normal(CHANNELS, seed=2), np.array(found))
    layer = gemm_layer(CHANNELS, INPUTS)
    tuned = refuse_layer(params, layer, find_target(target), ACTIVATION, *pair, scale=True)
    np.testing.assert_allclose(tuned.grid.scale, params.grid.scale * factor, rtol=1e-6)
    assert np.isfinite(tuned.grid.scale).all()
    assert (tuned.grid.scale > 0).all()
    assert tuned.bias is not None
    assert np.isfinite(tuned.bias).all()


def test_a_step_does_not_shrink_below_what_the_bias_needs() -> None:
    """Channels of nearly zero weights: their mean is their bias, and a factor of a quarter would overflow it."""
    layer, bias = gemm_layer(CHANNELS, INPUTS), np.array([5, -300, 1e-3, 40], np.float32)
    params = held(rounded(1e-13 * normal(CHANNELS, INPUTS), bias, 8, "ort"), layer, "ort")
    wanted, found = stats(1.5 * bias, np.zeros(CHANNELS)), stats(bias, np.ones(CHANNELS))
    tuned = refuse_layer(params, layer, find_target("ort"), ACTIVATION, wanted, found, scale=True)
    assert tuned.bias is not None
    np.testing.assert_allclose(tuned.bias, 1.5 * bias, rtol=1e-6)
    codes = np.abs(tuned.bias.astype(np.float64)) / (tuned.grid.scale.astype(np.float64) * float(ACTIVATION.scale))
    assert (codes <= 2.0**30 * (1 + 1e-6)).all()
    assert (codes >= 2.0**29).all()  # no coarser than needed


def test_without_scaling_only_the_bias_moves() -> None:
    params = rounded(normal(CHANNELS, INPUTS), normal(CHANNELS), 4, "ort")
    wanted, found = (
        stats(normal(CHANNELS, seed=1), np.full(CHANNELS, 4.0)),
        stats(np.zeros(CHANNELS), np.ones(CHANNELS)),
    )
    layer = gemm_layer(CHANNELS, INPUTS)
    tuned = refuse_layer(params, layer, find_target("ort"), ACTIVATION, wanted, found, scale=False)
    np.testing.assert_array_equal(tuned.grid.scale, params.grid.scale)
    np.testing.assert_allclose(tuned.bias, params.bias + wanted.mean, rtol=1e-6)


# The whole plan.


def faint_channels() -> onnx.ModelProto:
    """Channels of nearly zero or zero weights with large biases: their steps must not become too fine for int32."""
    weight, deep = normal(6, 3, 3, 3, scale=0.3), normal(5, 6, scale=0.5)
    weight[0], weight[1], weight[2] = 0.0, 1e-11 * weight[1], 1e-7 * weight[2]
    deep[0], deep[1] = 0.0, 1e-12 * deep[1]
    text = """
    net (float[N,3,6,6] x) => (float[N,5] y) {
        [one] c = Conv (x, w1)
        [norm] n = BatchNormalization (c, n_gamma, n_beta, n_mean, n_var)
        [relu] r = Relu (n)
        [pool] p = GlobalAveragePool (r)
        [flat] f = Flatten (p)
        [fc] y = Gemm <transB=1> (f, w2, b2)
    }"""
    norms = norm_of("n", 6) | {"n_beta": np.array([5, -40, 60, 1, -1, 0], np.float32)}
    return build(text, w1=weight, w2=deep, b2=np.array([300, -300, 1, 2, 3], np.float32), **norms)


@pytest.mark.parametrize("reference", BatchNormReference)
@pytest.mark.parametrize("bits", ["w8a8", "w3a4"])
def test_biases_do_not_saturate(bits: str, reference: BatchNormReference) -> None:
    job = job_for(faint_channels(), bits)
    plan, tuner = plan_of(job), tuner_of(job, reference)
    for _ in range(ROUNDS):
        plan = refuse(plan, job.layers, job.target, *tuner.statistics(plan, silent), scale=True)
        written = job.write(plan)
        codes = [
            numpy_helper.to_array(it) for it in written.graph.initializer if it.data_type == onnx.TensorProto.INT32
        ]
        largest = max(int(np.abs(values.astype(np.int64)).max()) for values in codes)
        assert 0 < largest < 2**30 + 2**24
        for params in plan.layers.values():
            assert np.isfinite(params.grid.scale).all()
            assert (params.grid.scale > 0).all()
            assert params.bias is not None
            assert np.isfinite(params.bias).all()
        assert np.isfinite(run(written, feed_for(faint_channels(), 4))["y"]).all()


@pytest.mark.parametrize("target", ["ort", "paper"])
def test_equal_statistics_change_no_bit_of_the_file(target: str) -> None:
    job = job_for(faint_channels(), "w4a4", target)
    plan = plan_of(job)
    wanted = tuner_of(job).statistics(plan, silent)[0]
    same = refuse(plan, job.layers, job.target, wanted, wanted, scale=True)
    assert job.write(same).SerializeToString(deterministic=True) == job.write(plan).SerializeToString(
        deterministic=True
    )


@pytest.mark.parametrize("target", ["ort", "paper"])
@pytest.mark.parametrize("bits", ["w3a8", "w8a8"])
def test_the_codes_are_those_before(bits: str, target: str) -> None:
    model = conv_net()
    data, chosen = feed_for(model, 48), parse_bits(bits)
    shared = {"bits": chosen, "target": target, "ranges": RangeMethod.MINMAX}
    plain, tuned = (quantize_model(model, data, Recipe(pipeline, **shared)) for pipeline in Pipeline)
    assert tuned.tuned is not None
    assert tuned.tuned.rounds > 0
    assert stored_codes(tuned.model) == stored_codes(plain.model)
    assert len(stored_codes(plain.model)) == 5
    moved = 0
    for name, before in plain.plan.layers.items():
        after = tuned.plan.layers[name]
        np.testing.assert_array_equal(after.codes, before.codes)
        np.testing.assert_array_equal(after.grid.zero_point, before.grid.zero_point)
        assert (after.grid.bits, after.grid.low, after.grid.high) == (
            before.grid.bits,
            before.grid.low,
            before.grid.high,
        )
        assert (after.grid.scale > 0).all()
        moved += not np.array_equal(after.bias, before.bias)
    assert moved > 0


def plain_layers() -> onnx.ModelProto:
    """Layers without a bias, of every kind that can gain one."""
    text = """
    net (float[N,3,6,6] x) => (float[N,7] y) {
        [conv] c = Conv <pads=[1,1,1,1]> (x, w1)
        [relu] r = Relu (c)
        [depth] d = Conv <pads=[1,1,1,1], group=6> (r, w2)
        [up] u = ConvTranspose <group=2> (d, w3)
        [clip] k = Relu (u)
        [single] s = ConvTranspose (k, w4)
        [pool] p = GlobalAveragePool (s)
        [flat] f = Flatten (p)
        [fc] g = Gemm (f, w5)
        [last] y = MatMul (g, w6)
    }"""
    return build(
        text, w1=normal(6, 3, 3, 3, scale=0.3), w2=normal(6, 1, 3, 3, scale=0.4), w3=normal(6, 2, 2, 2, scale=0.5),
        w4=normal(4, 5, 1, 1, scale=0.5), w5=normal(5, 6), w6=normal(6, 7),
    )  # fmt: skip


@pytest.mark.parametrize("target", ["ort", "paper"])
def test_layers_without_a_bias_gain_one(target: str) -> None:
    model = plain_layers()
    job = job_for(model, "w3a8", target)
    plan = plan_of(job)
    assert all(params.bias is None for params in plan.layers.values())
    tuned = refuse(plan, job.layers, job.target, *tuner_of(job).statistics(plan, silent), scale=True)
    for name in ("conv", "depth", "up", "single", "fc"):
        assert tuned.layers[name].bias is not None, name
        assert np.abs(tuned.layers[name].bias).max() > 0
        np.testing.assert_array_equal(tuned.layers[name].codes, plan.layers[name].codes)
    # One grid for a whole tensor can only be shifted; a MatMul has no place for even that.
    assert tuned.layers["up"].grid is plan.layers["up"].grid
    assert tuned.layers["up"].grid.axis is None
    assert tuned.layers["last"] is plan.layers["last"]
    for name in ("conv", "depth", "single", "fc"):
        assert not np.array_equal(tuned.layers[name].grid.scale, plan.layers[name].grid.scale), name
    written = job.write(tuned)
    onnx.checker.check_model(written)
    data = feed_for(model, SAMPLES)
    truth = run(model, data)["y"]
    errors = [np.square(run(job.write(it), data)["y"] - truth).mean() for it in (plan, tuned)]
    assert errors[1] < errors[0]


def test_an_empty_bias_is_filled() -> None:
    model = conv1d()
    model.graph.node[2].input[2] = ""
    result = quantize_model(
        model, feed_for(model, 32), Recipe(Pipeline.LIGHT, parse_bits("w3a8"), ranges=RangeMethod.MINMAX)
    )
    onnx.checker.check_model(result.model)
    assert result.plan.layers["second"].bias is not None
    node = next(node for node in result.model.graph.node if node.name == "second")
    assert len(node.input) == 3


@pytest.mark.usefixtures("no_outliers")
@pytest.mark.parametrize("builder", [conv_net, transformer_block, conv_transpose])
def test_the_written_model_has_the_statistics_of_the_float_model(builder: Callable[[], onnx.ModelProto]) -> None:
    """One batch, everything but layer inputs and weights float: each layer gets exactly the wanted means."""
    model = builder()
    job = job_for(model, "w4a8", "paper")
    plan = plan_of(job)
    wanted, found = tuner_of(job).statistics(plan, silent)
    tuned = refuse(plan, job.layers, job.target, wanted, found, scale=True)
    layers = [layer for layer in job.layers if layer.name in wanted]
    assert {layer.name for layer in job.layers} - set(wanted) <= {"key", "value"}
    measured = run(with_statistics(job.write(tuned), layers), feed_for(model, SAMPLES))
    for layer in layers:
        spread = np.sqrt(wanted[layer.name].variance)
        # Only float32 rounding is left, unless it moves an input from one code to the next.
        off = np.abs(measured[mean_name(layer)] - wanted[layer.name].mean)
        assert (off <= 1e-3 * spread.max()).all(), layer.name
        if layer.per_channel:
            np.testing.assert_allclose(np.sqrt(measured[variance_name(layer)]), spread, rtol=1e-3)


@pytest.mark.usefixtures("no_outliers")
def test_negative_gamma_is_restored_by_its_size() -> None:
    model = conv_net()
    for tensor in model.graph.initializer:
        if tensor.name.endswith("_gamma"):
            signs = np.where(np.arange(8) % 2, -1, 1).astype(np.float32)
            tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor) * signs, tensor.name))
    job = job_for(model, "w3a8", "paper")
    plan, tuner = plan_of(job), tuner_of(job, BatchNormReference.BATCHNORM)
    wanted, found = tuner.statistics(plan, silent)
    stem = job.layers[0]
    assert stem.batch_norm is not None
    assert (stem.batch_norm.gamma < 0).sum() == 4
    np.testing.assert_allclose(wanted["stem"].mean, stem.batch_norm.beta, rtol=1e-6)
    np.testing.assert_allclose(wanted["stem"].variance, stem.batch_norm.gamma**2, rtol=1e-6)
    # The head and the classifier have no batch norm: there the float model's statistics stand in.
    measured = tuner_of(job).statistics(plan, silent)[0]
    for name in ("head", "fc"):
        np.testing.assert_array_equal(wanted[name].mean, measured[name].mean)
    tuned = refuse(plan, job.layers, job.target, wanted, found, scale=True)
    again = run(with_statistics(job.write(tuned), job.layers[:1]), feed_for(model, SAMPLES))
    factor = np.sqrt(wanted["stem"].variance / found["stem"].variance)
    kept = (factor > LIMITS[0]) & (factor < LIMITS[1])
    assert kept.any()
    np.testing.assert_allclose(again["stem:mean"], stem.batch_norm.beta, rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(np.sqrt(again["stem:variance"])[kept], np.abs(stem.batch_norm.gamma)[kept], rtol=1e-3)
    assert all((params.grid.scale > 0).all() for params in tuned.layers.values())


def trained() -> onnx.ModelProto:
    """The batch norms hold the statistics of what they see, as after training."""
    model = conv_net()
    data = feed_for(model, 400, seed=9)
    for number in (1, 2, 3):
        seen = run(with_outputs(model, [f"c{number}"]), data)[f"c{number}"]
        for name, value in (("mean", seen.mean(axis=(0, 2, 3))), ("var", seen.var(axis=(0, 2, 3)))):
            tensor = next(it for it in model.graph.initializer if it.name == f"n{number}_{name}")
            tensor.CopyFrom(numpy_helper.from_array(value, tensor.name))
    return model


@pytest.mark.parametrize("reference", BatchNormReference)
def test_kept_and_folded_batch_norms_end_alike(reference: BatchNormReference) -> None:
    kept = trained()
    folded = read_prepared(kept, find_target("ort")).proto
    recipe = Recipe(Pipeline.LIGHT, parse_bits("w3a8"), ranges=RangeMethod.MINMAX, bn_reference=reference)
    losses = []
    for model in (kept, folded):
        tuned = quantize_model(model, feed_for(kept, 128), recipe).tuned
        assert tuned is not None
        assert tuned.after < tuned.before
        losses.append((tuned.before, tuned.after))
    assert losses[0][0] == pytest.approx(losses[1][0], rel=1e-6)
    # Folded, gamma and beta are lost: the float model's own statistics take their place.
    near = 1e-6 if reference is BatchNormReference.FLOAT else 0.2
    assert losses[0][1] == pytest.approx(losses[1][1], rel=near)


class Judge:
    """A teacher that gives the losses it was told, then the last of them for ever."""

    def __init__(self, *losses: float) -> None:
        self.losses = list(losses)

    def loss_of(self, _model: onnx.ModelProto) -> float:
        return self.losses.pop(0) if len(self.losses) > 1 else self.losses[0]


def judged(job: Job, plan: QuantPlan, *losses: float):
    return replace(tuner_of(job), teacher=Judge(*losses)).tune(plan, silent)


def test_a_plan_that_would_not_gain_stays() -> None:
    job = job_for(conv_net(), "w4a8")
    plan = plan_of(job)
    tuned = judged(job, plan, 1.0)  # nothing is gained, nothing lost
    assert tuned.plan is plan
    assert (tuned.before, tuned.after, tuned.rounds) == (1.0, 1.0, 0)
    tuned = judged(job, plan, 1.0, 2.0, 1.5)
    assert tuned.plan is plan
    assert tuned.rounds == 0


def test_the_better_of_scaling_and_shifting_is_kept() -> None:
    job = job_for(conv_net(), "w4a8")
    plan = plan_of(job)
    # Before; then scaled and shifted worse, shifted alone better; then both worse.
    tuned = judged(job, plan, 1.0, 1.2, 0.5, 0.7, 0.6)
    assert (tuned.before, tuned.after, tuned.rounds) == (1.0, 0.5, 1)
    for name, params in tuned.plan.layers.items():
        np.testing.assert_array_equal(params.grid.scale, plan.layers[name].grid.scale)
    assert any(not np.array_equal(it.bias, plan.layers[name].bias) for name, it in tuned.plan.layers.items())
    tuned = judged(job, plan, 1.0, 0.4, 0.5, 0.7, 0.6)
    assert (tuned.after, tuned.rounds) == (0.4, 1)
    scales = {name: params.grid.scale for name, params in tuned.plan.layers.items()}
    assert not any(np.array_equal(scales[name], plan.layers[name].grid.scale) for name in ("stem", "depth", "fc"))


def test_rounds_end() -> None:
    job = job_for(conv_net(), "w4a8")
    falling = [1.0 - 0.01 * step for step in range(40)]
    assert judged(job, plan_of(job), *falling).rounds == ROUNDS


@pytest.mark.parametrize("target", ["ort", "paper"])
def test_tuning_lowers_the_held_out_loss(target: str) -> None:
    model = conv_net()
    recipe = Recipe(Pipeline.LIGHT, parse_bits("w3a8"), target=target, ranges=RangeMethod.MINMAX)
    data = feed_for(model, 128)
    result = quantize_model(model, data, recipe)
    assert result.tuned is not None
    assert result.tuned.rounds > 0
    assert result.tuned.after < 0.7 * result.tuned.before
    plain = quantize_model(model, data, replace(recipe, pipeline=Pipeline.PLAIN))
    fresh = feed_for(model, 100, seed=7)
    truth = run(model, fresh)["y"]
    errors = [np.square(run(it.model, fresh)["y"] - truth).mean() for it in (plain, result)]
    assert errors[1] < 0.8 * errors[0]


def test_the_last_quarter_judges() -> None:
    """The loss before tuning is that of the rounded model on the samples held out."""
    model = conv_net()
    data = feed_for(model, 40)
    job = start(model, data, Recipe(Pipeline.LIGHT, parse_bits("w3a8"), ranges=RangeMethod.MINMAX)).jobs[0]
    plan = plan_of(job)
    tuned = tune_batch_norm(job, plan)
    held_out = start(model, {"x": data["x"][30:]}, job.recipe).jobs[0]
    assert tuned.before == pytest.approx(Teacher(job.model, held_out.data).loss_of(job.write(plan)), rel=1e-6)
    assert tuned.after == pytest.approx(Teacher(job.model, held_out.data).loss_of(job.write(tuned.plan)), rel=1e-6)


def one_feed(model: onnx.ModelProto) -> tuple[onnx.ModelProto, list[Arrays]]:
    return model, [feed_for(model, 24)]


def fixed_batch(model: onnx.ModelProto) -> tuple[onnx.ModelProto, Arrays]:
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 16
    model.graph.output[0].type.tensor_type.shape.dim[0].dim_value = 16
    return model, feed_for(model)


def few(model: onnx.ModelProto) -> tuple[onnx.ModelProto, Arrays]:
    return model, feed_for(model, 2)


@pytest.mark.parametrize("kind", [one_feed, fixed_batch, few])
def test_data_that_cannot_be_parted_is_both(kind: Callable) -> None:
    model, data = kind(conv_net())
    recipe = Recipe(Pipeline.LIGHT, parse_bits("w3a8"), ranges=RangeMethod.MINMAX)
    job = start(model, data, recipe).jobs[0]
    tuned = tune_batch_norm(job, plan_of(job))
    teacher = Teacher(job.model, first(job.data, len(job.data)))
    assert tuned.after == pytest.approx(teacher.loss_of(job.write(tuned.plan)), rel=1e-6)
    assert tuned.after <= tuned.before


def test_grids_of_activations_stay() -> None:
    model = conv_net()
    shared = {"bits": (Precision(3, 4),), "ranges": RangeMethod.MINMAX}
    plain, tuned = (quantize_model(model, feed_for(model, 32), Recipe(it, **shared)) for it in Pipeline)

    def grids(plan: QuantPlan) -> dict[str, Grid]:
        return {**plan.carried, **plan.inputs}

    assert grids(tuned.plan).keys() == grids(plain.plan).keys()
    for name, grid in grids(plain.plan).items():
        assert grids(tuned.plan)[name] == grid
