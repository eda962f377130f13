"""Second-order rounding of layers: what they read as matrices, both networks side by side, and what is gained."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from jobs import correlated_data, job_on, plan_of
from single_layers import LAYERS, single

from models import (
    BUILDERS,
    UNOPTIMIZED,
    any_length,
    build,
    conv_net,
    feed_for,
    normal,
    run,
    transformer_block,
    two_gemms,
)
from onnxcalib.algorithms.drawn_rows import BATCH, DrawnRows
from onnxcalib.algorithms.float_rows import FloatRows
from onnxcalib.algorithms.layer_matrix import LayerMatrix
from onnxcalib.algorithms.second_order import Rounder, SecondOrder
from onnxcalib.algorithms.stepwise import Stepwise
from onnxcalib.model.graph import GraphIndex
from onnxcalib.model.layers import find_layers, weights_of
from onnxcalib.model.qdq import write_plain
from onnxcalib.model.read import read_prepared
from onnxcalib.model.subgraph import with_outputs
from onnxcalib.numerics.quant_params import dequantize, fake_quantize, quantize
from onnxcalib.pipeline.job import Job
from onnxcalib.plan import QuantPlan
from onnxcalib.progress import silent
from onnxcalib.recipe import RangeMethod
from onnxcalib.targets import find_target

ODD_LAYERS = {
    "dilated": ("3,9,8", "Conv <dilations=[2,1], strides=[1,2], pads=[2,0,1,3]> (x, w, b)", (4, 3, 3, 3)),
    "same_upper": ("3,7,8", 'Conv <auto_pad="SAME_UPPER", strides=[2,2]> (x, w, b)', (4, 3, 4, 3)),
    "same_lower": ("3,7,8", 'Conv <auto_pad="SAME_LOWER"> (x, w, b)', (4, 3, 2, 4)),
    "valid": ("3,7,8", 'Conv <auto_pad="VALID"> (x, w, b)', (4, 3, 2, 4)),
    "grouped": ("6,5,5", "Conv <group=2, pads=[1,1,1,1]> (x, w, b)", (4, 3, 3, 3)),
    "volume": ("2,4,3,5", "Conv <pads=[1,0,1,1,0,1]> (x, w, b)", (4, 2, 3, 1, 2)),
    "up": ("3,4,5", "ConvTranspose <strides=[2,3], pads=[1,0,2,1], output_padding=[1,2]> (x, w, b)", (3, 4, 3, 4)),
    "up_cut": ("3,4,5", "ConvTranspose <strides=[2,2], pads=[3,2,2,3]> (x, w, b)", (3, 4, 2, 3)),
    "up_dilated": ("4,4,4", "ConvTranspose <dilations=[2,1], group=2> (x, w, b)", (4, 2, 2, 3)),
    "four_axes": ("2,3,6", "MatMul (x, w)", (6, 4)),
}


def layer_of(name: str) -> tuple[Any, Any, np.ndarray]:
    """A model of one layer, the layer, and some inputs."""
    if name in LAYERS:
        case = single(name, 6)
        return case.model, case.layer, case.inputs
    given, node, shape = ODD_LAYERS[name]
    stored = {"w": normal(*shape), **({"b": normal(4)} if "b)" in node else {})}
    model = read_prepared(build(f"net (float[N,{given}] x) => (float y) {{ [layer] y = {node} }}", **stored), TARGET)
    return model, find_layers(model).layers[0], feed_for(model.proto, 6)["x"]


TARGET = find_target("ort")


@pytest.mark.parametrize("name", [*LAYERS, *ODD_LAYERS])
def test_rows_times_weights_are_what_the_layer_computes(name: str) -> None:
    model, layer, inputs = layer_of(name)
    matrix = LayerMatrix.of(layer, GraphIndex(model.proto.graph))
    values = weights_of(model, [each for each in (layer.weight, layer.bias) if each])
    weight = values[layer.weight]
    np.testing.assert_array_equal(matrix.shaped(matrix.weights(weight)), weight)
    rows = matrix.rows(inputs, 10**6, np.random.default_rng(0))
    assert rows.shape[-1] == matrix.columns
    made = rows @ matrix.weights(weight).swapaxes(1, 2)  # groups, samples x positions, channels of a group
    wanted = run(with_outputs(model.proto, [layer.summed]), {layer.input: inputs})[layer.summed]
    if layer.bias:
        shape = [1] * wanted.ndim
        shape[-1 if layer.has_sums else 1] = -1
        wanted = wanted - values[layer.bias].reshape(shape)
    channels_last = wanted if layer.has_sums else np.moveaxis(wanted, 1, -1)
    found = np.moveaxis(made, 0, 1).reshape(channels_last.shape)
    np.testing.assert_allclose(found, channels_last, atol=1e-4)


def test_drawn_rows_are_the_same_of_both_networks() -> None:
    model, layer, inputs = layer_of("conv_relu")
    drawn = DrawnRows.of(layer.input, [LayerMatrix.of(layer, GraphIndex(model.proto.graph))], 2500)
    codes = np.round(inputs * 9).astype(np.int8)
    (first,), (second,), (other,) = (
        drawn.draw(values, batch, None, fill).values()
        for values, batch, fill in ((inputs, 3, 0), (codes, 3, 5), (inputs, 4, 0))
    )
    assert first.shape == (1, 6 * 7, 27)
    inside = first != 0  # pads are filled
    np.testing.assert_array_equal(second[inside], np.round(first * 9)[inside])
    assert (second[~inside] == 5).all()
    assert not np.array_equal(first, other)


def late_reader() -> onnx.ModelProto:
    """A tensor on the way to a layer that another layer reads, of which nothing else comes."""
    text = """
    net (float[N,6] x) => (float[N,3] y, float[N,3] z) {
        [one] a = Gemm (x, w1)
        [mid] b = Tanh (a)
        [far] c = Sigmoid (b)
        [two] y = Gemm (c, w2)
        [three] z = Gemm (b, w3)
    }"""
    return build(text, w1=normal(6, 8), w2=normal(8, 3), w3=normal(8, 3, seed=1))


def job_for(model: onnx.ModelProto, bits: str = "w3a8", samples: int = 24, **options: Any) -> Job:
    return job_on(model, correlated_data(model, samples), bits, **options)


def rounder_of(job: Job, **changes: Any) -> Rounder:
    return replace(Rounder(job.model, job.layers, job.target, job.data, RangeMethod.MSE, silent), **changes)


def as_floats(values: np.ndarray, tensor: str, plan: QuantPlan) -> np.ndarray:
    """A tensor of the quantized network, which comes as quantized values where all readers take these."""
    qparams = plan.shared.get(tensor) or plan.inputs.get(tensor)
    return dequantize(values, qparams) if values.dtype.kind in "iu" and qparams is not None else values


@pytest.mark.parametrize("disk", [0, 2**30], ids=["run again", "kept"])
@pytest.mark.parametrize("bits", ["w3a8", "w3a4"])
@pytest.mark.parametrize("builder", [*BUILDERS.values(), late_reader])
def test_the_network_gives_what_it_gives_when_run_whole(builder: Any, bits: str, disk: int, tmp_path: Path) -> None:
    job = job_for(builder(), bits)
    plan, feed = plan_of(job), next(iter(job.data.batches(100)))
    network = Stepwise(job.model, job.layers, job.target, job.data, tmp_path, disk)
    whole = write_plain(job.model, job.layers, plan, job.target)
    for tensor in dict.fromkeys(layer.input for layer in job.layers):
        seen: list[np.ndarray] = []
        network.advance(tensor, plan, lambda values, _, seen=seen: seen.append(values))
        read = as_floats(np.concatenate(seen), tensor, plan)
        if tensor in feed:
            np.testing.assert_array_equal(read, feed[tensor])
            continue
        exact = run(with_outputs(whole, [tensor]), feed, **UNOPTIMIZED)[tensor]
        step = 1e-4 * np.abs(exact).max()
        for qparams in (grids[tensor] for grids in (plan.shared, plan.inputs) if tensor in grids):
            exact, read, step = fake_quantize(exact, qparams), fake_quantize(read, qparams), 1.01 * qparams.scale
        # A value at a tie may be rounded otherwise when the nodes around it are others.
        off = np.abs(exact - read)
        assert np.mean(off > 0.5 * step) < 0.04
        assert np.mean(off > step) < 0.01
    left = sum(path.stat().st_size for path in tmp_path.iterdir())
    assert left == 0 if disk == 0 else len(list(tmp_path.iterdir())) < len(job.layers) + 1


@pytest.mark.parametrize("disk", [0, 2**30], ids=["run again", "kept"])
@pytest.mark.parametrize("builder", [*BUILDERS.values(), late_reader])
def test_rows_of_the_float_network_are_those_of_its_tensors(builder: Any, disk: int, tmp_path: Path) -> None:
    job = job_for(builder())
    floats = FloatRows(job.model, job.layers, job.data, tmp_path, disk)
    feeds, index = list(job.data.batches(BATCH)), GraphIndex(job.model.proto.graph)
    for _ in range(2):  # as two roundings do that share them
        for tensor in dict.fromkeys(layer.input for layer in job.layers):
            matrices = [LayerMatrix.of(layer, index) for layer in job.layers if layer.input == tensor]
            drawn = DrawnRows.of(tensor, matrices, len(job.data))
            for number, (feed, (shape, rows)) in enumerate(zip(feeds, floats.batches(tensor), strict=True)):
                whole = feed[tensor] if tensor in feed else run(with_outputs(job.model.proto, [tensor]), feed)[tensor]
                assert whole.shape == shape
                wanted = drawn.draw(whole, number, None)
                assert rows.keys() == wanted.keys()
                for reads, values in rows.items():
                    np.testing.assert_allclose(values, wanted[reads], atol=1e-5)
    floats.close()
    assert list(tmp_path.iterdir()) == []


def errors(job: Job, plan: QuantPlan) -> dict[str, float]:
    """The squared error of each layer's output in the quantized network, relative to the float network's output."""
    feed, names = next(iter(job.data.batches(100))), [layer.summed for layer in job.layers]
    whole = write_plain(job.model, job.layers, plan, job.target)
    wanted, found = (run(with_outputs(each, names), feed) for each in (job.model.proto, whole))
    return {name: float(np.square(found[name] - wanted[name]).sum() / np.square(wanted[name]).sum()) for name in names}


@pytest.mark.parametrize("strength", [0.0, 1.0])
@pytest.mark.parametrize("name", BUILDERS)
def test_every_kind_of_layer_comes_nearer_to_float(name: str, strength: float) -> None:
    job = job_for(BUILDERS[name](), "w3a8" if name != "transformer_block" else "w4")
    plan = plan_of(job)
    rounded = rounder_of(job).round(plan, strength)
    assert rounded.skip_reasons == ()
    before, after = errors(job, plan), errors(job, rounded.plan)
    assert np.mean([after[name] / before[name] for name in before]) < 0.8
    for layer, params in rounded.plan.layers.items():
        np.testing.assert_array_equal(quantize(params.weight, params.qparams), params.quantized)
        assert params.qparams.bits == plan.layers[layer].qparams.bits
        assert params.qparams.scale.shape == plan.layers[layer].qparams.scale.shape


def test_the_bias_takes_the_mean_of_the_error() -> None:
    job = job_for(two_gemms(hidden=12), "w2a8")
    rounded = rounder_of(job).round(plan_of(job), 0.0).plan
    feed, names = next(iter(job.data.batches(100))), [layer.summed for layer in job.layers]
    whole = write_plain(job.model, job.layers, rounded, job.target)
    wanted, found = (run(with_outputs(each, names), feed) for each in (job.model.proto, whole))
    for name in names:
        gap = (found[name] - wanted[name]).mean(axis=0)
        assert np.abs(gap).max() < 0.01 * np.abs(wanted[name]).max()


def test_sequences_of_any_length() -> None:
    model = any_length()
    feeds = [{"x": normal(2, 5 + length, 6, seed=length)} for length in range(8)]
    job = job_on(model, feeds, "w3a8")
    rounded = rounder_of(job).round(plan_of(job), 1.0)
    assert rounded.skip_reasons == ()
    assert any(
        (rounded.plan.layers[name].quantized != params.quantized).any() for name, params in plan_of(job).layers.items()
    )


def test_layers_that_are_too_wide_say_so_and_keep_their_rounding() -> None:
    text = "net (float[N,9000] x) => (float[N,3] y) { [wide] a = Gemm (x, w1) [two] y = Gemm (a, w2) }"
    job = job_for(build(text, w1=normal(9000, 4, scale=0.01), w2=normal(4, 3)), samples=8)
    plan = plan_of(job)
    rounded = rounder_of(job).round(plan, 1.0)
    (reason,) = rounded.skip_reasons
    assert "wide" in reason
    assert "9,000" in reason
    np.testing.assert_array_equal(rounded.plan.layers["wide"].quantized, plan.layers["wide"].quantized)


class Kept:
    """A checkpoint in memory that can be cut off."""

    scratch = None

    def __init__(self, most: int) -> None:
        self.values: dict[str, Any] = {}
        self.most = most

    def found(self, parts: list[str]) -> list[Any]:
        return [self.values.get(part) for part in parts]

    def put(self, part: str, value: Any) -> None:
        if len(self.values) == self.most:
            raise KeyboardInterrupt
        self.values[part] = value


@pytest.mark.parametrize("builder", [conv_net, transformer_block])
def test_cut_off_and_taken_up_again_it_gives_the_same(builder: Any) -> None:
    job = job_for(builder())
    plan, kept = plan_of(job), Kept(2)
    with pytest.raises(KeyboardInterrupt):
        rounder_of(job, checkpoint=kept).round(plan, 0.5)
    kept.most = 100
    found: list[SecondOrder] = [rounder_of(job, checkpoint=each).round(plan, 0.5) for each in (kept, Kept(100))]
    for name, params in found[0].plan.layers.items():
        other = found[1].plan.layers[name]
        np.testing.assert_array_equal(params.quantized, other.quantized)
        np.testing.assert_array_equal(params.bias, other.bias)


@pytest.mark.parametrize("target", ["ort", "xnnpack", "vitis", "paper", "tensorrt"])
def test_grids_are_those_of_the_target(target: str) -> None:
    job = job_for(conv_net(), "w4a8" if target in ("ort", "paper") else "8", target=target)
    plan = plan_of(job)
    rounded = rounder_of(job).round(plan, 1.0).plan
    for name, params in rounded.layers.items():
        start = plan.layers[name].qparams
        assert (params.qparams.axis, params.qparams.low, params.qparams.high) == (start.axis, start.low, start.high)
        if job.target.weight_scheme(start.bits).symmetric:
            np.testing.assert_array_equal(params.qparams.zero_point, start.zero_point)
        if job.target.power_of_two:
            assert (np.frexp(params.qparams.scale)[0] == 0.5).all()
        assert np.isfinite(dequantize(params.quantized, params.qparams)).all()
