"""The diagnosis, held to the same figures from plain onnxruntime."""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx
import pytest

from models import Arrays, build, conv_net, feed_for, normal, run, transformer_block
from onnxcalib import Precision, RangeMethod, Recipe, quantize
from onnxcalib.analysis.diagnose import Diagnosis, diagnose
from onnxcalib.analysis.histograms import LayerHistograms, layer_histograms
from onnxcalib.data import open_data
from onnxcalib.model.layers import find_layers
from onnxcalib.model.prepare import Model
from onnxcalib.model.qdq import write_qdq
from onnxcalib.model.quantized import read_quantized
from onnxcalib.model.read import read_prepared
from onnxcalib.model.shapes import input_specs
from onnxcalib.model.subgraph import with_outputs
from onnxcalib.numerics.quant_params import dequantize
from onnxcalib.progress import silent
from onnxcalib.targets import find_target

W4A4 = Recipe(bits=(Precision(4, 4),), ranges=RangeMethod.MINMAX)


def prepared_and_written(model: onnx.ModelProto, data: Arrays, recipe: Recipe = W4A4) -> tuple[Model, onnx.ModelProto]:
    return read_prepared(model, find_target(recipe.target)), quantize(model, data, recipe).model


def diagnosis_of(ready: Model, written: onnx.ModelProto, data: Arrays) -> Diagnosis:
    opened = open_data(data, input_specs(ready.proto))
    return diagnose(ready, find_layers(ready).layers, read_quantized(written), opened, silent)


def node_output(model: onnx.ModelProto, name: str, feed: Arrays) -> np.ndarray:
    tensor = next(node.output[0] for node in model.graph.node if node.name == name)
    return run(with_outputs(model, [tensor]), feed)[tensor].astype(np.float64)


@pytest.mark.parametrize("target", ["ort", "paper"])
def test_the_noise_of_each_layer_is_that_of_plain_onnxruntime(target: str) -> None:
    model = conv_net()
    data = feed_for(model, 12)
    recipe = Recipe(bits=(Precision(4, 4),), ranges=RangeMethod.MINMAX, target=target)
    ready, written = prepared_and_written(model, data, recipe)
    found = diagnosis_of(ready, written, data)
    assert [each.layer for each in found.layers] == ["stem", "depth", "project", "head", "fc"]
    assert found.samples == 12
    for each in found.layers:
        reference, guess = (node_output(proto, each.layer, data) for proto in (ready.proto, written))
        expected = 10 * np.log10((reference**2).sum() / ((reference - guess) ** 2).sum())
        assert each.sqnr_db == pytest.approx(expected, abs=0.05)
        assert each.alone_db >= each.sqnr_db - 3  # its own noise is not more than that of all before it together


def test_the_first_layer_alone_is_the_first_layer_of_the_model() -> None:
    model = conv_net()
    data = feed_for(model, 12)
    first = diagnosis_of(*prepared_and_written(model, data), data).layers[0]
    assert first.alone_db == pytest.approx(first.sqnr_db, abs=0.05)


def test_a_layer_of_two_bits_among_eight_hurts_the_most() -> None:
    model = conv_net()
    data = feed_for(model, 24)
    ready = read_prepared(model, find_target("ort"))
    fine = quantize(model, data, Recipe(ranges=RangeMethod.MINMAX))
    coarse = quantize(model, data, Recipe(bits=(Precision(2, 8),), ranges=RangeMethod.MINMAX))
    layers = dict(fine.plan.layers) | {"project": coarse.plan.layers["project"]}
    plan = dataclasses.replace(fine.plan, layers=layers)
    found = diagnosis_of(ready, write_qdq(ready, find_layers(ready).layers, plan, find_target("ort")), data)
    losses = {each.layer: each.alone_loss for each in found.layers}
    assert max(losses, key=losses.__getitem__) == "project"
    assert losses["project"] > 5 * sorted(losses.values())[-2]
    assert found.loss == pytest.approx(losses["project"], rel=0.5)


def test_a_bias_behind_a_matmul_belongs_to_its_layer() -> None:
    model = transformer_block()
    data = feed_for(model, 8)
    found = diagnosis_of(*prepared_and_written(model, data), data)
    assert [each.layer for each in found.layers] == ["query", "key", "value", "up", "down"]
    assert all(np.isfinite([each.sqnr_db, each.alone_db, each.alone_loss]).all() for each in found.layers)


def test_tensors_that_do_not_fit_on_disk_together_are_captured_again() -> None:
    model = conv_net()
    data = feed_for(model, 12)
    ready, written = prepared_and_written(model, data)
    layers, opened = find_layers(ready).layers, open_data(data, input_specs(ready.proto))
    whole, parts = (diagnose(ready, layers, read_quantized(written), opened, silent, most) for most in (2**40, 1))
    assert [each.layer for each in parts.layers] == [each.layer for each in whole.layers]
    for one, other in zip(parts.layers, whole.layers, strict=True):  # other nodes are fused around what is shown
        assert (one.sqnr_db, one.alone_db) == pytest.approx((other.sqnr_db, other.alone_db), abs=0.1)
        assert one.alone_loss == pytest.approx(other.alone_loss, rel=0.05, abs=1e-7)


def test_with_many_layers_fewer_samples_are_run_behind_each() -> None:
    model = chain(80)
    data = feed_for(model, 64)
    found = diagnosis_of(*prepared_and_written(model, data, Recipe()), data)
    assert len(found.layers) == 80
    assert found.samples == 64
    assert 8 <= found.alone_samples < 64
    assert all(each.alone_loss > 0 for each in found.layers)


def chain(length: int) -> onnx.ModelProto:
    """Products of small matrices, one after the other."""
    ends = ["x", *(f"h{place}" for place in range(1, length)), "y"]
    nodes = " ".join(f"[n{i}] {ends[i + 1]} = MatMul ({ends[i]}, w{i})" for i in range(length))
    weights = {f"w{place}": np.linalg.qr(normal(4, 4, seed=place))[0] for place in range(length)}
    return build(f"net (float[N,4] x) => (float[N,4] y) {{ {nodes} }}", **weights)


def spreads_of(
    model: onnx.ModelProto, data: Arrays, name: str, recipe: Recipe = W4A4
) -> tuple[LayerHistograms, Model, onnx.ModelProto]:
    ready, written = prepared_and_written(model, data, recipe)
    opened = open_data(data, input_specs(ready.proto))
    (found,) = layer_histograms(ready, [find_layers(ready)[name]], read_quantized(written), opened)
    return found, ready, written


def test_histograms_hold_every_value_and_the_range_of_the_grid() -> None:
    model = conv_net()
    data = feed_for(model, 8)
    # A zero point is rounded, so that an end may be half a step short.
    symmetric = dataclasses.replace(W4A4, overrides={"*": "symmetric"})
    found, _, written = spreads_of(model, data, "head", symmetric)
    layer = next(each for each in read_quantized(written).layers if each.name == "head")
    assert found.weight.counts.sum() == 16 * 8
    assert (found.weight.range_low, found.weight.range_high) == (-8, 7)
    assert found.weight.clipped == 0  # min-max ranges clip nothing
    assert found.input is not None
    assert layer.input is not None
    assert (found.input.range_low, found.input.range_high) == pytest.approx([float(end) for end in layer.input.range])
    values = node_output(written, "sum", data)
    assert found.input.low == pytest.approx(values.min(), abs=0.5)


def test_weights_that_are_read_from_a_file_are_those_of_the_plan() -> None:
    model = conv_net()
    data = feed_for(model, 8)
    for bits in (2, 3, 5, 8):
        result = quantize(model, data, Recipe(bits=(Precision(bits, 8),), ranges=RangeMethod.MINMAX))
        for layer in read_quantized(result.model).layers:
            params = result.plan.layers[layer.name]
            np.testing.assert_array_equal(layer.quantized, params.quantized)
            np.testing.assert_array_equal(
                dequantize(layer.quantized, layer.weight), dequantize(params.quantized, params.qparams)
            )
            assert layer.bits == f"w{bits}a8"
