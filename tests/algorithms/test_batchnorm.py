"""Batch-norm tuning: statistics against NumPy, and re-fusing that leaves the quantized values of a file alone."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import pytest
from jobs import plan_of
from onnx import numpy_helper
from prepared import scaled_as
from tuning import SAMPLES, job_for, stats, tuner_of

from models import (
    BUILDERS,
    build,
    change,
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
from onnxcalib.algorithms.batchnorm import LIMITS, ROUNDS, refold
from onnxcalib.model.channel_statistics import (
    REACH,
    bound_names,
    mean_name,
    statistics_shape,
    variance_name,
    wanted_name,
    with_statistics,
)
from onnxcalib.model.layers import Layer, find_layers
from onnxcalib.model.read import read_prepared
from onnxcalib.model.subgraph import with_outputs
from onnxcalib.pipeline.pipelines import quantize as quantize_model
from onnxcalib.progress import silent
from onnxcalib.recipe import BatchNormReference, Pipeline, RangeMethod, Recipe, Rounding, parse_bits
from onnxcalib.targets import find_target

ALL = 1e9  # so far that no value is an outlier: then re-fusing restores the statistics exactly


def stored_codes(model: onnx.ModelProto) -> dict[str, bytes]:
    """The quantized weights of a written file: plain bytes or bit planes."""
    return {
        tensor.name: tensor.raw_data
        for tensor in model.graph.initializer
        if tensor.name.endswith(("_planes", "_codes")) and tensor.data_type in (2, 3)
    }


# Statistics.


def channel_axis(layer: Layer) -> int:
    return 1 if layer.op in ("Conv", "ConvTranspose") else -1


def by_numpy(values: np.ndarray, layer: Layer, reach: float) -> tuple[np.ndarray, np.ndarray]:
    rows = np.moveaxis(values.astype(np.float64), channel_axis(layer), -1).reshape(-1, layer.channels)
    mean, far = rows.mean(axis=0), reach * rows.std(axis=0)
    rows = np.clip(rows, mean - far, mean + far)  # outliers are cut
    return rows.mean(axis=0), rows.var(axis=0)


def at_opset(model: onnx.ModelProto, opset: int) -> onnx.ModelProto:
    return model if opset == 13 else onnx.version_converter.convert_version(model, opset)


@pytest.mark.parametrize("opset", [13, 18, 20])
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
        mean, variance = by_numpy(tensors[layer.summed], layer, REACH)
        assert found[mean_name(layer)].shape == statistics_shape(layer)
        np.testing.assert_allclose(found[mean_name(layer)].ravel(), mean, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(found[variance_name(layer)].ravel(), variance, rtol=1e-4, atol=1e-5)


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
    mean, variance = by_numpy(c, one, ALL)
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
    shapes = {value.name: [dim.dim_value for dim in value.type.tensor_type.shape.dim] for value in graph.graph.input}
    found = run(graph, {**data, **{name: each.astype(np.float32).reshape(shapes[name]) for name, each in fed.items()}})
    np.testing.assert_allclose(found[mean_name(one)].ravel(), mean, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(found[variance_name(one)].ravel(), variance, rtol=1e-4)
    np.testing.assert_allclose(found[mean_name(two)], after_two.mean(axis=0), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(found[variance_name(two)], after_two.var(axis=0), rtol=1e-4)


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
        plan = refold(plan, job.layers, job.target, *tuner.statistics(plan, silent), scale=True)
        written = job.write(plan)
        quantized = [
            numpy_helper.to_array(it) for it in written.graph.initializer if it.data_type == onnx.TensorProto.INT32
        ]
        largest = max(int(np.abs(values.astype(np.int64)).max()) for values in quantized)
        assert 0 < largest < 2**30 + 2**24
        for params in plan.layers.values():
            assert np.isfinite(params.qparams.scale).all()
            assert (params.qparams.scale > 0).all()
            assert params.bias is not None
            assert np.isfinite(params.bias).all()
        assert np.isfinite(run(written, feed_for(faint_channels(), 4))["y"]).all()


@pytest.mark.parametrize("target", ["ort", "paper"])
def test_equal_statistics_change_no_bit_of_the_file(target: str) -> None:
    job = job_for(faint_channels(), "w4a4", target)
    plan = plan_of(job)
    wanted = tuner_of(job).statistics(plan, silent)[0]
    same = refold(plan, job.layers, job.target, wanted, wanted, scale=True)
    assert job.write(same).SerializeToString(deterministic=True) == job.write(plan).SerializeToString(
        deterministic=True
    )


@pytest.mark.parametrize("target", ["ort", "paper"])
@pytest.mark.parametrize("bits", ["w3a8", "w8a8"])
def test_the_codes_are_those_before(bits: str, target: str) -> None:
    model = conv_net()
    data, chosen = feed_for(model, 48), parse_bits(bits)
    shared = {"bits": chosen, "target": target, "ranges": RangeMethod.MINMAX}
    tuned = quantize_model(model, data, Recipe(Pipeline.LIGHT, rounding=Rounding.NEAREST, **shared))
    plain = quantize_model(scaled_as(model, tuned.model, target), data, Recipe(**shared))
    assert tuned.tuned is not None
    assert tuned.tuned.rounds > 0
    assert stored_codes(tuned.model) == stored_codes(plain.model)
    assert len(stored_codes(plain.model)) == 5
    moved = 0
    for name, before in plain.plan.layers.items():
        after = tuned.plan.layers[name]
        np.testing.assert_array_equal(after.quantized, before.quantized)
        np.testing.assert_array_equal(after.qparams.zero_point, before.qparams.zero_point)
        assert (after.qparams.bits, after.qparams.low, after.qparams.high) == (
            before.qparams.bits,
            before.qparams.low,
            before.qparams.high,
        )
        assert (after.qparams.scale > 0).all()
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
    tuned = refold(plan, job.layers, job.target, *tuner_of(job).statistics(plan, silent), scale=True)
    for name in ("conv", "depth", "up", "single", "fc"):
        assert tuned.layers[name].bias is not None, name
        assert np.abs(tuned.layers[name].bias).max() > 0
        np.testing.assert_array_equal(tuned.layers[name].quantized, plan.layers[name].quantized)
    # One grid for a whole tensor can only be shifted; a MatMul has no place for even that.
    assert tuned.layers["up"].qparams is plan.layers["up"].qparams
    assert tuned.layers["up"].qparams.axis is None
    assert tuned.layers["last"] is plan.layers["last"]
    for name in ("conv", "depth", "single", "fc"):
        assert not np.array_equal(tuned.layers[name].qparams.scale, plan.layers[name].qparams.scale), name
    written = job.write(tuned)
    onnx.checker.check_model(written)
    data = feed_for(model, SAMPLES)
    reference = run(model, data)["y"]
    errors = [np.square(run(job.write(it), data)["y"] - reference).mean() for it in (plan, tuned)]
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


@pytest.mark.parametrize("builder", [conv_net, transformer_block, conv_transpose])
def test_the_written_model_has_the_statistics_of_the_float_model(builder: Callable[[], onnx.ModelProto]) -> None:
    """One batch, everything but layer inputs and weights float: each layer gets exactly the wanted means."""
    model = builder()
    job = job_for(model, "w4a8", "paper")
    plan = plan_of(job)
    wanted, found = tuner_of(job, reach=ALL).statistics(plan, silent)
    tuned = refold(plan, job.layers, job.target, wanted, found, scale=True)
    layers = [layer for layer in job.layers if layer.name in wanted]
    assert {layer.name for layer in job.layers} - set(wanted) <= {"key", "value"}
    measured = run(with_statistics(job.write(tuned), layers, reach=ALL), feed_for(model, SAMPLES))
    for layer in layers:
        spread = np.sqrt(wanted[layer.name].variance)
        # Only float32 rounding is left, unless it moves an input from one code to the next.
        off = np.abs(measured[mean_name(layer)].ravel() - wanted[layer.name].mean)
        assert (off <= 1e-3 * spread.max()).all(), layer.name
        if layer.per_channel:
            np.testing.assert_allclose(np.sqrt(measured[variance_name(layer)].ravel()), spread, rtol=1e-3)


def test_negative_gamma_is_restored_by_its_size() -> None:
    model = conv_net()
    signs = np.where(np.arange(8) % 2, -1, 1).astype(np.float32)
    for name in ("n1_gamma", "n2_gamma", "n3_gamma"):
        change(model, name, initializer(model, name) * signs)
    job = job_for(model, "w3a8", "paper")
    plan, tuner = plan_of(job), tuner_of(job, BatchNormReference.BATCHNORM, reach=ALL)
    wanted, found = tuner.statistics(plan, silent)
    stem = job.layers[0]
    assert stem.batch_norm is not None
    assert (stem.batch_norm.gamma < 0).sum() == 4
    np.testing.assert_allclose(wanted["stem"].mean, stem.batch_norm.beta, rtol=1e-6)
    np.testing.assert_allclose(wanted["stem"].variance, stem.batch_norm.gamma**2, rtol=1e-6)
    # The head and the classifier have no batch norm: there the float model's statistics stand in.
    measured = tuner_of(job, reach=ALL).statistics(plan, silent)[0]
    for name in ("head", "fc"):
        np.testing.assert_array_equal(wanted[name].mean, measured[name].mean)
    tuned = refold(plan, job.layers, job.target, wanted, found, scale=True)
    again = run(with_statistics(job.write(tuned), job.layers[:1], reach=ALL), feed_for(model, SAMPLES))
    factor = np.sqrt(wanted["stem"].variance / found["stem"].variance)
    kept = (factor > LIMITS[0]) & (factor < LIMITS[1])
    assert kept.any()
    np.testing.assert_allclose(again["stem:mean"].ravel(), stem.batch_norm.beta, rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(
        np.sqrt(again["stem:variance"].ravel())[kept], np.abs(stem.batch_norm.gamma)[kept], rtol=1e-3
    )
    assert all((params.qparams.scale > 0).all() for params in tuned.layers.values())


def trained() -> onnx.ModelProto:
    """The batch norms hold the statistics of what they see, as after training."""
    model = conv_net()
    data = feed_for(model, 400, seed=9)
    for number in (1, 2, 3):
        seen = run(with_outputs(model, [f"c{number}"]), data)[f"c{number}"]
        change(model, f"n{number}_mean", seen.mean(axis=(0, 2, 3)))
        change(model, f"n{number}_var", seen.var(axis=(0, 2, 3)))
    return model


@pytest.mark.parametrize("reference", BatchNormReference)
def test_kept_and_folded_batch_norms_end_alike(reference: BatchNormReference) -> None:
    kept = trained()
    folded = read_prepared(kept, find_target("ort")).proto
    options = {"ranges": RangeMethod.MINMAX, "rounding": Rounding.NEAREST}
    recipe = Recipe(Pipeline.LIGHT, parse_bits("w3a8"), bn_reference=reference, **options)
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
