"""Sub-models against the whole: a layer alone, what follows a tensor, inner tensors shown."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx
import pytest

from models import (
    BUILDERS,
    Arrays,
    build,
    change,
    conv_net,
    feed_for,
    initializer,
    normal,
    op_types,
    run,
    transformer_block,
)
from onnxcalib.model.layers import Layer, find_layers
from onnxcalib.model.prepare import Model
from onnxcalib.model.read import read_prepared
from onnxcalib.model.subgraph import Cutter, layer_model, with_outputs
from onnxcalib.pipeline.job import start
from onnxcalib.pipeline.pipelines import quantize
from onnxcalib.recipe import Precision, RangeMethod, Recipe
from onnxcalib.targets import find_target


def prepared(model: onnx.ModelProto) -> Model:
    return read_prepared(model, find_target("ort"))


def layers_of(model: onnx.ModelProto) -> Iterator[tuple[Model, Layer]]:
    ready = prepared(model)
    return ((ready, layer) for layer in find_layers(ready).layers)


def captured(model: onnx.ModelProto, data: Arrays, names: list[str]) -> Arrays:
    inner = [name for name in dict.fromkeys(names) if name not in data]
    return {**data, **run(with_outputs(model, inner), data)}


@pytest.mark.parametrize("builder", BUILDERS.values(), ids=BUILDERS)
def test_a_layer_alone_is_the_layer_inside(builder) -> None:
    model = builder()
    data = feed_for(model, 6)
    for ready, layer in layers_of(model):
        tensors = captured(ready.proto, data, [layer.input, layer.activated])
        alone = layer_model(ready, layer)
        assert [value.name for value in alone.proto.graph.input] == [layer.input]
        assert [value.name for value in alone.proto.graph.output] == [layer.activated]
        made = run(alone.proto, {layer.input: tensors[layer.input]})
        np.testing.assert_allclose(made[layer.activated], tensors[layer.activated], rtol=1e-5, atol=1e-6)


def test_a_layer_ends_with_its_bias_and_its_activation() -> None:
    ops = {layer.name: op_types(layer_model(ready, layer).proto) for ready, layer in layers_of(transformer_block())}
    assert ops == {
        "query": ["MatMul", "Add"], "key": ["MatMul"], "value": ["MatMul"],
        "up": ["MatMul", "Add", "Relu"], "down": ["MatMul", "Add"],
    }  # fmt: skip
    ops = {layer.name: op_types(layer_model(ready, layer).proto) for ready, layer in layers_of(conv_net())}
    assert ops["stem"] == ["Conv", "Clip"]
    assert ops["project"] == ["Conv"]


def test_a_layer_alone_holds_its_own_constants_and_can_be_listed_again() -> None:
    for ready, layer in layers_of(conv_net()):
        alone = layer_model(ready, layer)
        held = {tensor.name for tensor in alone.proto.graph.initializer}
        assert held <= {layer.weight, layer.bias, "zero", "six"}
        assert find_layers(alone).layers[0].weight_shape == layer.weight_shape


BOUNDED = """
net (float[N,4] x, float top) => (float[N,3] y) {
    [one] h = Gemm (x, w1)
    [scale] t = Mul (top, two)
    [clip] k = Clip (h, , t)
    [last] y = Gemm (k, w2)
}"""
SLOPED = """
net (float[N,4] x) => (float[N,6] y) {
    [one] h = Gemm (x, w1)
    [two] g = Gemm (x, w1)
    [slope] y = PRelu (g, h)
}"""


@pytest.mark.parametrize(
    ("text", "constants"),
    [(BOUNDED, {"w1": normal(4, 6), "w2": normal(6, 3), "two": np.float32(2)}), (SLOPED, {"w1": normal(4, 6)})],
    ids=["bound", "slope"],
)
def test_an_activation_with_a_computed_bound_is_no_part_of_a_layer(text: str, constants: Arrays) -> None:
    model = build(text, opset=16, **constants)
    data = {"x": normal(5, 4)} | ({"top": np.array(0.3, np.float32)} if "top" in text else {})
    for ready, layer in layers_of(model):
        assert layer.activation is None
        tensors = captured(ready.proto, data, [layer.input, layer.activated])
        made = run(layer_model(ready, layer).proto, {layer.input: tensors[layer.input]})
        np.testing.assert_allclose(made[layer.activated], tensors[layer.activated], rtol=1e-5)


@pytest.mark.parametrize("builder", BUILDERS.values(), ids=BUILDERS)
def test_what_follows_a_tensor_makes_the_same_outputs(builder) -> None:
    model = builder()
    data = feed_for(model, 6)
    outputs = run(model, data)
    for ready, layer in layers_of(model):
        rest, fed = Cutter(ready.proto).after(layer.activated)
        if rest is None:
            assert layer.activated in outputs
            continue
        assert [value.name for value in rest.graph.input] == [layer.activated, *fed]
        tensors = captured(ready.proto, data, [layer.activated, *fed])
        again = run(rest, {name: tensors[name] for name in (layer.activated, *fed)})
        for name, value in again.items():
            np.testing.assert_allclose(value, outputs[name], rtol=1e-4, atol=1e-5)


def test_a_changed_tensor_changes_the_outputs_as_inside() -> None:
    """Doubling a tensor after the fact is what a model with a Mul there does."""
    model = conv_net()
    data, ready = feed_for(model, 6), prepared(model)
    rest, fed = Cutter(ready.proto).after("b3")
    assert rest is not None
    assert fed == ("r1",)  # the other operand of the residual Add
    tensors = captured(ready.proto, data, ["b3", "r1"])
    again = run(rest, {"b3": 2 * tensors["b3"], "r1": tensors["r1"]})
    doubled = conv_net()
    for name in ("n3_gamma", "n3_beta"):
        change(doubled, name, 2 * initializer(doubled, name))
    np.testing.assert_allclose(again["y"], run(doubled, data)["y"], rtol=1e-4, atol=1e-5)


def test_nothing_follows_an_output() -> None:
    assert Cutter(prepared(conv_net()).proto).after("y") == (None, ())


@pytest.mark.parametrize("bits", [8, 4])
def test_side_inputs_bring_their_whole_quantizer_and_no_activation(bits: int) -> None:
    """Half a QDQ pair keeps its reader from fusing; a Clip of values is no quantizer, and stays outside."""
    model = conv_net()
    data = feed_for(model, 8)
    recipe = Recipe(bits=(Precision(8, bits),), ranges=RangeMethod.MINMAX)
    written = start(model, data, recipe).jobs[0].write(quantize(model, data, recipe).plan)
    rest, fed = Cutter(written).after("b3")
    assert rest is not None
    assert fed == ("r1",)
    makers = {name: node for node in rest.graph.node for name in node.output}
    for node in rest.graph.node:
        if node.op_type == "DequantizeLinear" and node.input[0] in makers:
            quantized = makers[node.input[0]]
            assert quantized.op_type in ("QuantizeLinear", "Clip")
            if quantized.op_type == "Clip":
                assert makers[quantized.input[0]].op_type == "QuantizeLinear"
    tensors = captured(written, data, ["b3", "r1"])
    again = run(rest, {name: tensors[name] for name in ("b3", "r1")})
    np.testing.assert_allclose(again["y"], run(written, data)["y"], rtol=1e-5, atol=1e-5)


def test_the_shown_tensors_are_the_only_outputs() -> None:
    model = conv_net()
    before = model.SerializeToString()
    shown = with_outputs(model, ["s", "y", "r1"])
    assert [value.name for value in shown.graph.output] == ["s", "y", "r1"]
    assert model.SerializeToString() == before
    data = feed_for(model, 4)
    made = run(shown, data)
    np.testing.assert_allclose(made["y"], run(model, data)["y"], rtol=1e-5, atol=1e-6)
    assert made["r1"].shape == (4, 8, 8, 8)
    assert made["r1"].min() >= 0
    assert made["r1"].max() <= 6
