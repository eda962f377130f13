"""Half precision models: quantized like float ones, with the inputs and outputs that they had."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from models import build, conv_net, feed_for, normal, op_types, run
from onnxcalib import Pipeline, Recipe, evaluate, inspect, quantize
from onnxcalib.errors import ModelError
from onnxcalib.model.io import read_model
from onnxcalib.model.prepare import prepare
from onnxcalib.targets import NAMES


def halved(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model as an exporter to half precision writes it."""
    half = onnx.ModelProto()
    half.CopyFrom(model)
    for tensor in half.graph.initializer:
        if tensor.data_type == TensorProto.FLOAT:
            tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float16), tensor.name))
    for value in (*half.graph.input, *half.graph.output):
        if value.type.tensor_type.elem_type == TensorProto.FLOAT:
            value.type.tensor_type.elem_type = TensorProto.FLOAT16
    return half


def half_feed(model: onnx.ModelProto, samples: int = 16) -> dict[str, np.ndarray]:
    return {name: value.astype(np.float16) for name, value in feed_for(model, samples).items()}


def ends(model: onnx.ModelProto) -> list[tuple[str, int]]:
    return [(it.name, it.type.tensor_type.elem_type) for it in (*model.graph.input, *model.graph.output)]


@pytest.mark.parametrize("target", NAMES)
def test_every_layer_is_quantized_and_the_interface_stays(target: str) -> None:
    model, feed = halved(conv_net()), half_feed(conv_net())
    result = quantize(model, feed, Recipe(target=target))
    onnx.checker.check_model(result.model)
    assert set(result.plan.layers) == {"stem", "depth", "project", "head", "fc"}
    assert ends(result.model)[0] == ends(model)[0]
    assert ends(result.model)[-1] == ends(model)[-1]
    if target == "qonnx":  # its nodes run nowhere here
        return
    # The same as the file of a float model with these weights, but for the rounding of its outputs.
    wide = onnx.ModelProto()
    wide.CopyFrom(conv_net())
    for tensor, other in zip(wide.graph.initializer, model.graph.initializer, strict=True):
        tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(other).astype(np.float32), tensor.name))
    floats = {name: value.astype(np.float32) for name, value in feed.items()}
    one = {name: value[:1] for name, value in feed.items()}
    expected = run(quantize(wide, floats, Recipe(target=target)).model, {"x": floats["x"][:1]})["y"]
    found = run(result.model, one)["y"]
    assert found.dtype == np.float16
    np.testing.assert_allclose(found, expected, rtol=2e-3, atol=2e-3)


def test_the_same_layers_as_those_of_the_float_model() -> None:
    # Exporters leave Casts between what they keep in float and the rest.
    text = """net (float[N,8] x) => (float[N,4] y) {
        [narrow] h = Cast <to=10> (x)
        [first] a = MatMul (h, w1)
        [wide] f = Cast <to=1> (a)
        [bend] t = Relu (f)
        [back] b = Cast <to=10> (t)
        [second] c = MatMul (b, w2)
        [out] y = Cast <to=1> (c)
    }"""
    model = build(text, w1=normal(8, 16).astype(np.float16), w2=normal(16, 4).astype(np.float16))
    assert [(layer.name, layer.activation) for layer in inspect(model).layers] == [("first", "Relu"), ("second", None)]
    ready = prepare(read_model(model), "the model")
    assert "Cast" not in op_types(ready.proto)[:-1]
    feed = feed_for(model)
    assert np.abs(run(model, feed)["y"] - run(ready.proto, feed)["y"]).max() < 0.05


def test_bodies_and_constants_of_nodes_are_widened_too() -> None:
    def branch(name: str, value: float) -> onnx.GraphProto:
        constant = numpy_helper.from_array(np.array(value, np.float16), f"{name}_v")
        nodes = [
            helper.make_node("Constant", [], [f"{name}_c"], f"{name}_constant", value=constant),
            helper.make_node("Mul", ["a", f"{name}_c"], [f"{name}_m"], f"{name}_times"),
            helper.make_node("Add", [f"{name}_m", "x"], [f"{name}_y"], f"{name}_plus"),
        ]
        return helper.make_graph(nodes, name, [], [helper.make_tensor_value_info(f"{name}_y", 10, None)])

    model = halved(build("net (float[N,8] x, bool c) => (float[N,8] y) { [layer] a = MatMul (x, w) }", w=normal(8, 8)))
    bodies = {"then_branch": branch("yes", 2.0), "else_branch": branch("no", -1.0)}
    model.graph.node.append(helper.make_node("If", ["c"], ["y"], "choice", **bodies))
    feeds = [{"x": normal(3, 8, seed=seed).astype(np.float16), "c": np.array(seed > 1)} for seed in range(4)]
    result = quantize(model, feeds, Recipe())
    onnx.checker.check_model(result.model, full_check=True)
    for feed in (feeds[0], feeds[3]):
        expected, found = run(model, feed)["y"].astype(np.float32), run(result.model, feed)["y"]
        assert found.dtype == np.float16
        assert np.abs(found - expected).max() < 0.1 * np.abs(expected).max()


def test_tuning_and_evaluation_know_half_outputs(tmp_path) -> None:
    model, feed = halved(conv_net()), half_feed(conv_net())
    result = quantize(model, feed, Recipe(Pipeline.LIGHT))
    assert result.tuned is not None
    assert 0 < result.tuned.after < 1
    onnx.save(model, tmp_path / "half.onnx")
    result.save(tmp_path / "out.onnx")
    (row,) = evaluate([tmp_path / "out.onnx"], feed, reference=tmp_path / "half.onnx")
    assert row.sqnr_db is not None
    assert row.sqnr_db > 15


def test_an_output_that_stands_twice_is_cast_once() -> None:
    text = "net (float16[N,3] x) => (float16[N,4] y) { [only] y = MatMul (x, w) }"
    model = build(text, w=normal(3, 4).astype(np.float16))
    model.graph.output.append(model.graph.output[0])
    feed = {"x": normal(8, 3).astype(np.float16)}
    written = quantize(model, feed).model
    assert [value.type.tensor_type.elem_type for value in written.graph.output] == [TensorProto.FLOAT16] * 2
    assert len({node.name for node in written.graph.node}) == len(written.graph.node)
    assert run(written, feed)["y"].dtype == np.float16


def test_an_output_without_an_element_type_gets_its_own() -> None:
    model = build("net (float[N,3] x) => (float[N,4] y) { [only] y = MatMul (x, w) }", w=normal(3, 4))
    model.graph.output[0].type.tensor_type.elem_type = TensorProto.UNDEFINED
    prepared = prepare(read_model(model), "the model").proto
    assert prepared.graph.output[0].type.tensor_type.elem_type == TensorProto.FLOAT


def brain(ends: str, before: str, after: str) -> onnx.ModelProto:
    """Layers in bfloat16, for which onnxruntime itself has no kernels."""
    text = f"""net ({ends}[N,6] x) => ({ends}[N,3] y) {{
        a = {before} (x)
        [one] h = MatMul (a, w1)
        r = Relu (h)
        [two] z = Gemm (r, w2, b2)
        y = {after} (z)
    }}"""
    weights = {"w1": normal(6, 8), "w2": normal(8, 3, seed=1), "b2": normal(3, seed=2)}
    model = build(text, 17)
    kind = helper.tensor_dtype_to_np_dtype(TensorProto.BFLOAT16)
    model.graph.initializer.extend(numpy_helper.from_array(it.astype(kind), name) for name, it in weights.items())
    return model


def test_layers_in_bfloat16_are_quantized() -> None:
    model, x = brain("float", "Cast <to=16>", "Cast <to=1>"), normal(16, 6)
    result = quantize(model, {"x": x}, Recipe())
    assert set(result.plan.layers) == {"one", "two"}
    w1, w2, b2 = (numpy_helper.to_array(it).astype(np.float32) for it in model.graph.initializer)
    expected = np.maximum(x @ w1, 0) @ w2 + b2
    assert np.abs(run(result.model, {"x": x})["y"] - expected).max() < 0.03 * np.abs(expected).max()


def test_a_bfloat16_input_is_refused_with_its_reason() -> None:
    with pytest.raises(ModelError, match="'x' is bfloat16"):
        quantize(brain("bfloat16", "Identity", "Identity"), {"x": normal(16, 6)}, Recipe())
