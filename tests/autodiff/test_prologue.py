"""What depends on parameters alone is computed once a step: the same bits, in two graphs."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from test_gradients_interface import LAYERS, each_engine, layer_feed, layer_loss, layer_parameters

from models import build, run
from onnxcalib.autodiff.gradients import Gradients, _differentiated
from onnxcalib.autodiff.interface import gradient_name
from onnxcalib.autodiff.prologue import parted
from onnxcalib.model.shapes import with_single_samples
from onnxcalib.recipe import Engine


@each_engine
@pytest.mark.parametrize("name", LAYERS)
def test_two_graphs_give_what_one_gave(name: str, engine: Engine) -> None:
    model, parameters, feed = layer_loss(name, "Clip (c, zero, six)"), layer_parameters(name), layer_feed(name)
    as_written = {"graph_optimization_level": ort.GraphOptimizationLevel.ORT_DISABLE_ALL}
    whole = run(_differentiated(model, tuple(parameters), engine), {**feed, **parameters}, **as_written)
    found = Gradients(model, parameters, engine, threads=1)
    assert found.run(feed) == pytest.approx(float(whole["loss"]), rel=1e-6)
    for each, gradient in found.gradients.items():
        wanted = whole[gradient_name(each)]
        np.testing.assert_allclose(gradient, wanted, rtol=1e-5, atol=1e-5 * np.abs(wanted).max(), err_msg=each)


def ops(model: onnx.ModelProto) -> set[str]:
    return {node.op_type for node in model.graph.node}


def test_weights_are_turned_round_once_and_data_is_read_later() -> None:
    text = """net (float[N,2,5,5] x, float[3,2,3,3] v, float[2,3,3,3] w) => (float loss) {
        c = Conv (x, v)
        d = Conv (c, w)
        loss = ReduceSum <keepdims=0> (d)
    }"""
    whole = _differentiated(build(text), ("v", "w"), Engine.STANDARD)
    parts = parted(whole, ("v", "w"))
    assert parts is not None
    assert "Slice" in ops(parts.prologue)
    assert "Slice" not in ops(parts.main)
    assert [value.name for value in parts.prologue.graph.input] == ["w"]
    assert [value.name for value in parts.main.graph.output] == [value.name for value in whole.graph.output]


def test_where_all_depends_on_data_there_is_one_graph() -> None:
    text = """net (float[N,3] x, float[3] w) => (float loss) {
        y = Mul (x, w)
        loss = ReduceSum <keepdims=0> (y)
    }"""
    assert parted(build(text), ["w"]) is None


@each_engine
@pytest.mark.parametrize("name", LAYERS)
def test_a_graph_for_single_samples_gives_their_gradients(name: str, engine: Engine) -> None:
    model, parameters, feed = layer_loss(name, "Relu (c)"), layer_parameters(name), layer_feed(name, batch=1)
    free, single = (Gradients(each, parameters, engine) for each in (model, with_single_samples(model, feed)))
    free.run(feed)
    single.run(feed)
    for each, gradient in single.gradients.items():
        wanted = free.gradients[each]
        np.testing.assert_allclose(gradient, wanted, rtol=1e-5, atol=1e-5 * np.abs(wanted).max(), err_msg=each)


def test_inputs_of_other_sizes_stay_free() -> None:
    model = build("net (float[N,3] x, float[M] y) => (float[N,3] z) { z = Relu (x) }")
    feed = {"x": np.zeros((1, 3), np.float32), "y": np.zeros(4, np.float32)}
    x, y = with_single_samples(model, feed).graph.input
    assert x.type.tensor_type.shape.dim[0].dim_value == 1
    assert y.type.tensor_type.shape.dim[0].dim_param == "M"
