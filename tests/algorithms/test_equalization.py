"""Channels of a tensor, brought nearer to one range."""

from __future__ import annotations

import base64
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from jobs import job_on
from prepared import prepared

from models import Arrays, build, feed_for, norm_of, normal, run
from onnxcalib import Pipeline, Precision, Recipe, quantize
from onnxcalib.algorithms.channel_factors import Channels, Reader, best_exponents, best_ranges, exponents_for
from onnxcalib.analysis.compare import compare_layers
from onnxcalib.analysis.diagnose import diagnose
from onnxcalib.model.channel_groups import ChannelGroup
from onnxcalib.model.equalize import (
    METADATA,
    QUARTERS,
    equalized_as,
    exponents_of,
    factors_of,
    find_equalization_groups,
)
from onnxcalib.model.layers import Layer, find_layers
from onnxcalib.model.quantized import read_quantized
from onnxcalib.numerics.quant_params import fake_quantize
from onnxcalib.numerics.range_estimators import weight_qparams
from onnxcalib.pipeline.job import Job
from onnxcalib.pipeline.stages import equalization, equalize
from onnxcalib.recipe import RangeMethod
from onnxcalib.runtime import session
from onnxcalib.targets import find_target

LOUDNESS = np.exp2(-np.arange(8, dtype=np.float32) / 1.5)  # of the channels before the depthwise layer


def separable(activation: str = "Clip (b1, zero, six)", reads: str = "r1", peak: float = 1.0) -> onnx.ModelProto:
    """A depthwise layer of two outputs a channel behind channels that differ by a factor of 25 and matter alike."""
    text = f"""
    net (float[N,3,8,8] x) => (float[N,6,8,8] y) {{
        [stem] c1 = Conv <pads=[1,1,1,1]> (x, w1)
        [bn1] b1 = BatchNormalization (c1, n1_gamma, n1_beta, n1_mean, n1_var)
        [act] r1 = {activation}
        [depth] c2 = Conv <pads=[1,1,1,1], group=8> (r1, w2, b2)
        [relu] r2 = Relu (c2)
        [project] y0 = Conv (r2, w3, b3)
        [extra] e = Conv ({reads}, w4)
        [sum] y = Add (y0, e)
    }}"""
    norm = norm_of("n1", 8)
    norm["n1_gamma"] *= peak * LOUDNESS
    norm["n1_beta"] *= peak * LOUDNESS
    deep = normal(16, 1, 3, 3, scale=0.4) / LOUDNESS.repeat(2)[:, None, None, None]
    inputs = {"r1": 8, "r2": 16, "x": 3}[reads]
    return build(
        text, w1=normal(8, 3, 3, 3, scale=0.2), w2=deep, b2=normal(16),
        w3=normal(6, 16, 1, 1), b3=normal(6), w4=normal(6, inputs, 1, 1), zero=np.float32(0), six=np.float32(6), **norm,
    )  # fmt: skip


def job_of(model: onnx.ModelProto, target: str = "ort", **more: object) -> Job:
    return job_on(model, feed_for(model, 32), "w8a4", target, **more)


def assert_alike(one: Job, other: Job, feed: Arrays) -> None:
    """Two float models, but for the rounding of float32."""
    found, reference = (run(job.model.proto, feed)["y"] for job in (one, other))
    np.testing.assert_allclose(found, reference, rtol=0, atol=1e-5 * np.abs(reference).max())


def names(job: Job) -> list[str]:
    return [maker.name for each in find_equalization_groups(job.model, job.layers, job.target) for maker in each.makers]


@pytest.mark.parametrize("activation", ["Clip (b1, zero, six)", "Relu (b1)", "LeakyRelu (b1)", "Clip (b1, zero)"])
def test_the_float_model_computes_the_same(activation: str) -> None:
    model = separable(activation, reads="x")
    job = job_of(model)
    found = equalization(job)
    scaled, exponents = equalize(job, found), found.exponents
    assert exponents["stem"].max() >= 3 * QUARTERS
    assert_alike(scaled, job, feed_for(model, 32))  # on other samples, a quiet channel may come to be cut
    norms = [each.model.batch_norms["stem"] for each in (scaled, job)]
    np.testing.assert_array_equal(norms[0].gamma, norms[1].gamma * factors_of(exponents["stem"]))
    assert scaled.layers[0].batch_norm is norms[0]


def test_scaled_channels_have_nearly_one_range() -> None:
    job = job_of(separable("Relu (b1)", reads="x"))
    scaled = equalize(job, equalization(job))
    shown = onnx.ModelProto()
    shown.CopyFrom(scaled.model.proto)
    shown.graph.output.append(onnx.helper.make_tensor_value_info("r1", onnx.TensorProto.FLOAT, None))
    values = run(shown, feed_for(shown, 32))["r1"]
    ranges = best_ranges(np.moveaxis(values, 1, 0).reshape(8, -1).astype(np.float64))
    assert ranges.max() / ranges.min() < 1.6  # 25 before; values that are sampled decide


def test_no_channel_is_brought_to_where_the_activation_cuts() -> None:
    """The loudest ones are cut already, so a quiet channel could be raised further than its peak allows."""
    job = job_of(separable(reads="x", peak=20.0))
    scaled = equalize(job, equalization(job))
    assert exponents_of(scaled.model.proto)["stem"].any()
    assert_alike(scaled, job, feed_for(job.model.proto, 32))


@pytest.mark.parametrize(
    ("model", "target", "more", "found"),
    [
        (separable("Sigmoid (b1)", reads="x"), "ort", {}, ["depth"]),
        (separable("Clip (b1, six, six)", reads="x"), "ort", {}, ["depth"]),
        (separable(reads="x"), "vitis", {}, []),  # one weight scale for all channels
        (separable(reads="x"), "ort", {"exclude": ("depth",)}, []),  # what is left out stays as it is
        (separable(reads="x"), "ort", {"exclude": ("project",)}, ["stem"]),
    ],
    ids=["sigmoid", "clip from six", "per tensor", "depthwise in float", "another in float"],
)
def test_what_a_factor_cannot_pass_stays_as_it_is(
    model: onnx.ModelProto, target: str, more: dict[str, object], found: list[str]
) -> None:
    job = job_on(model, feed_for(model, 8), "w8a8", target, **more)
    assert names(job) == found
    assert set(equalization(job).exponents) <= set(found)
    if not found:
        assert equalize(job, equalization(job)).model is job.model


def layer_reading(groups: int = 1) -> tuple[Layer, np.ndarray]:
    """A layer of twelve channels behind a layer, and its weights."""
    model = build(
        f"""
        net (float[N,3,4,4] x) => (float[N,6,4,4] y) {{
            [one] a = Conv (x, w1)
            [two] y = Conv <group={groups}, pads=[1,1,1,1]> (a, w2)
        }}""",
        w1=normal(12, 3, 1, 1),
        w2=normal(6, 12 // groups, 3, 3),
    )
    layer = next(it for it in find_layers(prepared(model)).layers if it.name == "two")
    return layer, onnx.numpy_helper.to_array(model.graph.initializer[1])


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("bits", ["w8a4", "w4a8", "w5a5"])
def test_the_error_that_is_expected_is_the_one_that_rounding_leaves(groups: int, bits: str) -> None:
    layer, weight = layer_reading(groups)
    precision, rng = Precision.parse(bits), np.random.default_rng(0)
    loudness = np.exp2(-np.arange(12) / 3)
    factors = np.exp2(rng.integers(0, 8, 12) / 4)
    values = rng.uniform(0, 1, (12, 20000)) * loudness[:, None]
    seen = Channels(loudness, (values**2).mean(1))
    windows = rng.uniform(0, 1, (4000, 12, 9)) * loudness[:, None]  # of one place of the output each
    scheme = find_target("ort").weight_scheme(precision.weight)
    scaled = weight.reshape(groups, 6 // groups, 12 // groups, 9) / factors.reshape(groups, 1, -1, 1)
    rows = scaled.reshape(6, -1).astype(np.float32)
    stored = fake_quantize(rows, weight_qparams(rows, replace(scheme, symmetric=True), 0, RangeMethod.MINMAX))
    step = (factors * loudness).max() / (2**precision.activation - 1)
    read = np.rint(windows * factors[:, None] / step) * step
    exact, found = (
        np.einsum("ngif,goif->ngo", each.reshape(4000, groups, -1, 9), kernel)
        for each, kernel in (
            (windows, weight.reshape(groups, 6 // groups, 12 // groups, 9)),
            (read, stored.reshape(scaled.shape)),
        )
    )
    measured = ((found - exact) ** 2).mean((0,)).sum()
    expected = Reader.of(layer, weight, 12).error(seen, precision, factors)
    energy = (Reader.of(layer, weight, 12).power * seen.energy).sum()
    assert expected * energy == pytest.approx(measured, rel=0.35)


@pytest.mark.parametrize(("bits", "strength"), [("w8a2", 1.0), ("w2a8", 0.25)])
def test_quiet_channels_are_raised_as_far_as_weights_can_bear(bits: str, strength: float) -> None:
    layer, weight = layer_reading()
    loudness = np.exp2(-np.arange(12) / 3)
    seen, room = {layer.input: Channels(loudness, loudness**2 / 3)}, np.full(12, np.inf)
    group = ChannelGroup((layer,), (layer,), np.inf, ())
    readers = {layer.name: Reader.of(layer, weight, 12)}
    found = best_exponents(group, seen, room, readers, {layer.name: Precision.parse(bits)})
    np.testing.assert_array_equal(found, exponents_for(seen, room, strength))
    room[-1] = 2
    assert best_exponents(group, seen, room, readers, {layer.name: Precision.parse(bits)})[-1] <= 2


@pytest.mark.parametrize(("samples", "found"), [(15, {"stem"}), (16, {"stem", "depth"})])
def test_few_samples_scale_channels_only_where_it_costs_nothing(samples: int, found: set[str]) -> None:
    model = separable("Relu (b1)", reads="x")
    assert set(equalization(job_on(model, feed_for(model, samples), "w8a4")).exponents) == found


def test_a_weight_that_two_layers_share_stays_as_it_is() -> None:
    model = build(
        """
        net (float[N,4,6,6] x) => (float[N,4,6,6] y) {
            [one] a = Conv (x, w)
            [depth] b = Conv <group=4> (a, d)
            [two] y = Conv (b, w)
        }""",
        w=normal(4, 4, 1, 1),
        d=normal(4, 1, 1, 1),
    )
    assert names(job_of(model)) == []


def test_quiet_channels_keep_their_signal_in_the_written_file() -> None:
    model = separable("Relu (b1)", reads="x")
    data = feed_for(model, 64)
    reference = run(model, data)["y"]
    noise = {}
    for pipeline in (Pipeline.PLAIN, Pipeline.LIGHT):
        made = quantize(model, data, Recipe(pipeline, bits=(Precision.parse("w8a4"),))).model
        noise[pipeline] = float(((run(made, data)["y"] - reference) ** 2).mean())
        assert ("stem" in exponents_of(made)) == (pipeline is Pipeline.LIGHT)
    assert noise[Pipeline.LIGHT] < 0.7 * noise[Pipeline.PLAIN]


def test_noise_of_layers_is_told_beside_the_scaled_channels(tmp_path: Path) -> None:
    """Without the factors, a scaled layer would look as if it were noise and nothing else."""
    model = separable("Relu (b1)", reads="x")
    job = job_of(model)
    paths = []
    for pipeline in (Pipeline.PLAIN, Pipeline.LIGHT):
        paths.append(tmp_path / f"{pipeline}.onnx")
        quantize(model, job.data, Recipe(pipeline), output=paths[-1])
    file = read_quantized(onnx.load(paths[1]))
    assert exponents_of(file.proto)
    scaled = equalized_as(job.model, file.proto)
    found = diagnose(scaled, job.layers, file, job.data, job.progress)
    assert min(layer.sqnr_db for layer in found.layers) > 20
    for reference in (job.model, None):
        for row in compare_layers((paths[0], paths[1]), job.data, reference, job.progress):
            assert min(row.sqnr_db or (row.difference_db,)) > 20


@pytest.mark.parametrize("told", ["no json", "[1]", '{"stem": 3}', '{"stem": "a"}', '{"stem": "12"}', '{"other": "1"}'])
def test_metadata_of_others_is_left_alone(told: str) -> None:
    job = job_of(separable(reads="x"))
    file = onnx.ModelProto()
    feed = feed_for(job.model.proto)
    for text in (told, base64.b85encode(zlib.compress(told.encode())).decode(), base64.b85encode(b"x").decode()):
        onnx.helper.set_model_props(file, {METADATA: text})
        found, reference = (run(each.proto, feed)["y"] for each in (equalized_as(job.model, file), job.model))
        np.testing.assert_array_equal(found, reference)


def test_what_is_found_does_not_depend_on_the_memory_for_captured_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    job = job_of(separable("Relu (b1)", reads="x"))
    usual = equalization(job).exponents
    assert usual
    monkeypatch.setattr(session, "CAPTURE_BYTES", 1)
    assert {name: each.tolist() for name, each in equalization(job).exponents.items()} == {
        name: each.tolist() for name, each in usual.items()
    }
