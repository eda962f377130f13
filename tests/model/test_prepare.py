"""Preparing changes the form of a model, never what it computes."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper, parser, version_converter
from prepared import assert_same_outputs, prepared

from models import BUILDERS, Arrays, build, norm_of, normal, op_types, run
from onnxcalib.errors import ModelError
from onnxcalib.model.io import opset_of, read_model
from onnxcalib.model.layers import find_layers
from onnxcalib.model.prepare import prepare


@pytest.mark.parametrize("builder", BUILDERS)
def test_builders_compute_the_same(builder: str) -> None:
    ready = prepared(BUILDERS[builder]())
    assert len(ready.proto.graph.node) > 1
    assert "BatchNormalization" not in op_types(ready.proto)


def test_weights_in_constant_nodes_become_initialisers() -> None:
    model = build(
        """net (float[N,3,6,6] x) => (float[N,4] y) {
            [conv] c = Conv (x, w)
            [pool] p = GlobalAveragePool (c)
            [flat] f = Reshape (p, shape)
            [fc] y = Gemm (f, v)
        }"""
    )
    values = {"w": normal(5, 3, 3, 3), "v": normal(5, 4), "shape": np.array([-1, 5], np.int64)}
    constants = [
        helper.make_node("Constant", [], [name], value=numpy_helper.from_array(value)) for name, value in values.items()
    ]
    nodes = list(model.graph.node)
    del model.graph.node[:]
    model.graph.node.extend(constants + nodes)
    ready = prepared(model)
    assert "Constant" not in op_types(ready.proto)
    assert [layer.name for layer in find_layers(ready).layers] == ["conv", "fc"]


@pytest.mark.parametrize(
    ("attribute", "value"),
    [("value_float", 6.0), ("value_floats", [0.5, 1.5, 2.5]), ("value_int", 3), ("value_ints", [3])],
)
def test_short_forms_of_constants(attribute: str, value: object) -> None:
    model = build(
        "net (float[N,3] x) => (float[N,3] y) { f = Cast <to=1> (k) s = Mul (x, f) y = Gemm (s, w) }", w=normal(3, 3)
    )
    nodes = list(model.graph.node)
    del model.graph.node[:]
    model.graph.node.extend([helper.make_node("Constant", [], ["k"], **{attribute: value}), *nodes])
    assert op_types(prepared(model).proto) == ["Mul", "Gemm"]


def test_layout_ops_on_weights_are_computed() -> None:
    text = """net (float[N,4,6,6] x) => (float[N,3] y) {
        t = Transpose <perm=[3,2,0,1]> (hwio)
        i = Identity (t)
        [conv] c = Conv (x, i)
        p = GlobalAveragePool (c)
        f = Flatten (p)
        vt = Transpose (v)
        [fc] m = MatMul (f, vt)
        b = Squeeze (bias)
        y = Add (m, b)
    }"""
    model = build(text, hwio=normal(3, 3, 4, 5), v=normal(3, 5), bias=normal(1, 3))
    ready = prepared(model)
    assert op_types(ready.proto) == ["Conv", "GlobalAveragePool", "Flatten", "Gemm"]
    assert [(layer.name, layer.weight_shape) for layer in find_layers(ready).layers] == [
        ("conv", (5, 4, 3, 3)),
        ("fc", (5, 3)),
    ]


def pooled(mean: str, opset: int = 17, **stored: np.ndarray) -> onnx.ModelProto:
    text = f"""net (float[N,3,4,6] x) => (float[N,K] y) {{
        [conv] c = Conv (x, w)
        [mean] m = {mean}
        y = Flatten (m)
    }}"""
    return build(text, opset, w=normal(5, 3, 1, 1), **stored)


@pytest.mark.parametrize(
    ("mean", "ops"),
    [
        ("ReduceMean <axes=[2,3], keepdims=0> (c)", ["GlobalAveragePool", "Flatten"]),
        ("ReduceMean <axes=[-1,-2]> (c)", ["GlobalAveragePool"]),
        ("ReduceMean <axes=[2]> (c)", ["ReduceMean"]),
        ("ReduceMean <axes=[1,2,3]> (c)", ["ReduceMean"]),
        ("ReduceMean (c)", ["ReduceMean"]),
    ],
)
def test_means_of_whole_images_become_pools(mean: str, ops: list[str]) -> None:
    model, feed = pooled(mean), {"x": normal(2, 3, 4, 6)}
    found = prepared(model).proto
    assert op_types(found) == ["Conv", *ops, "Flatten"]
    np.testing.assert_allclose(run(found, feed)["y"], run(model, feed)["y"], rtol=1e-5, atol=1e-6)


def test_axes_of_newer_opsets_are_read_and_dropped() -> None:
    found = prepared(pooled("ReduceMean <keepdims=0> (c, axes)", 18, axes=np.array([2, 3], np.int64))).proto
    assert op_types(found) == ["Conv", "GlobalAveragePool", "Flatten", "Flatten"]
    assert [tensor.name for tensor in found.graph.initializer] == ["w"]


def test_means_of_integers_and_of_layer_norms_stay() -> None:
    text = """net (float[N,3,4,4] x, float[N,3,4] z) => (int32[N,3] y, float[N,3,1] m) {
        i = Cast <to=6> (x)
        y = ReduceMean <axes=[2,3], keepdims=0> (i)
        m = ReduceMean <axes=[-1]> (z)
    }"""
    assert op_types(prepared(build(text)).proto) == ["Cast", "ReduceMean", "ReduceMean"]


def model_of_opset(opset: int) -> onnx.ModelProto:
    """Conv, batch norm, Clip, Dropout and Gemm in the forms of an opset."""
    text = f"""net (float[2,3,6,6] x) => (float[2,4] y) {{
        [conv] c = Conv (x, w)
        [norm] b = BatchNormalization (c, n_gamma, n_beta, n_mean, n_var)
        [clip] r = Clip {"<min=0.0, max=6.0> (b)" if opset < 11 else "(b, low, high)"}
        [drop] d = Dropout {"<ratio=0.5> (r)" if opset < 12 else "(r, ratio)"}
        [pool] p = GlobalAveragePool (d)
        [squeeze] f = Squeeze {"<axes=[2,3]> (p)" if opset < 13 else "(p, axes)"}
        [fc] g = Gemm <transB=1> (f, v, bias)
        [soft] y = Softmax <axis=1> (g)
    }}"""
    stored: Arrays = {"w": normal(5, 3, 3, 3), "v": normal(4, 5), "bias": normal(4)} | norm_of("n", 5)
    if opset >= 11:
        stored |= {"low": np.float32(0), "high": np.float32(6)}
    if opset >= 12:
        stored |= {"ratio": np.float32(0.5)}
    if opset >= 13:
        stored |= {"axes": np.array([2, 3], np.int64)}
    return build(text, opset, 10, **stored) if opset >= 9 else listed(build(text, opset, 3, **stored))


def listed(model: onnx.ModelProto) -> onnx.ModelProto:
    """Initialisers among the inputs, as files before IR 4 have them."""
    for tensor in model.graph.initializer:
        model.graph.input.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
    return model


@pytest.mark.parametrize("opset", range(7, 22))
def test_every_opset_that_both_runtimes_load(opset: int) -> None:
    ready = prepared(model_of_opset(opset))
    assert opset_of(ready.proto) == max(opset, 13)
    layers = find_layers(ready).layers
    assert [(layer.name, layer.activation) for layer in layers] == [("conv", "Clip"), ("fc", None)]
    assert layers[0].batch_norm is not None
    assert [value.name for value in ready.proto.graph.input] == ["x"]
    assert 7 <= ready.proto.ir_version <= 10


@pytest.mark.parametrize("opset", [22, 23])
def test_newer_opsets_are_lowered_where_every_node_allows(opset: int) -> None:
    model, old = model_of_opset(opset), model_of_opset(21)
    ready = prepare(read_model(model), "the model")
    assert opset_of(ready.proto) == 21
    assert ready.proto.ir_version == 10
    assert_same_outputs(old, ready.proto)  # onnxruntime 1.19 loads no newer one
    assert opset_of(model) == opset


def test_a_newer_op_keeps_the_newer_opset() -> None:
    text = """net (float[N,4,6] x) => (float[N,4,6] y) {
        n = RMSNormalization (x, gain)
        y = MatMul (n, w)
    }"""
    model = build(text, 23, 10, gain=np.ones(6, np.float32), w=normal(6, 6))
    assert opset_of(prepare(read_model(model), "the model").proto) == 23


def test_files_of_ir_3_lose_their_initialisers_among_the_inputs() -> None:
    model = listed(
        build("net (float[2,3] x) => (float[2,4] y) { y = Gemm (x, w, b) }", 8, 3, w=normal(3, 4), b=normal(4))
    )
    assert len(model.graph.input) == 3
    ready = prepared(model)
    assert [value.name for value in ready.proto.graph.input] == ["x"]


@pytest.mark.parametrize("size", [5, 6, 7])
@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize("mode", ["SAME_UPPER", "SAME_LOWER", "VALID"])
def test_automatic_pads_become_explicit(mode: str, stride: int, size: int) -> None:
    dilation = 2 if mode == "VALID" else 1  # onnxruntime takes no dilation together with SAME
    text = f"""net (float[N,2,{size},8] x) => (float[N,3,H,W] y) {{
        y = Conv <auto_pad="{mode}", strides=[{stride},1], dilations=[1,{dilation}], kernel_shape=[2,4]> (x, w)
    }}"""
    ready = prepared(build(text, w=normal(3, 2, 2, 4)))
    names = {attribute.name for attribute in ready.proto.graph.node[0].attribute}
    assert "auto_pad" not in names
    assert "pads" in names


def test_automatic_pads_stay_where_the_size_is_unknown() -> None:
    text = """net (float[N,2,H,W] x) => (float[N,3,A,B] y) {
        y = Conv <auto_pad="SAME_UPPER", kernel_shape=[3,3], strides=[2,2]> (x, w)
    }"""
    model = build(text, w=normal(3, 2, 3, 3))
    ready = prepare(read_model(model), "the model")
    assert {attribute.name for attribute in ready.proto.graph.node[0].attribute} >= {"auto_pad"}
    feed = {"x": normal(2, 2, 7, 8)}
    np.testing.assert_array_equal(run(ready.proto, feed)["y"], run(model, feed)["y"])


def test_local_functions_are_inlined() -> None:
    text = """
    <ir_version: 8, opset_import: ["" : 15, "own" : 1]>
    net (float[N,3] x) => (float[N,3] y) {
        h = own.dense (x, w, b)
        y = own.dense (h, w, b)
    }
    <opset_import: ["" : 15], domain: "own">
    dense (a, m, v) => (r) {
        p = MatMul (a, m)
        q = Add (p, v)
        r = Relu (q)
    }"""
    model = parser.parse_model(text)
    model.graph.initializer.append(numpy_helper.from_array(normal(3, 3), "w"))
    model.graph.initializer.append(numpy_helper.from_array(normal(3), "b"))
    ready = prepared(model)
    assert not ready.proto.functions
    assert op_types(ready.proto) == ["Gemm", "Relu", "Gemm", "Relu"]
    names = [layer.name for layer in find_layers(ready).layers]
    assert len(set(names)) == 2


def test_nameless_and_duplicate_nodes_get_names_of_their_own() -> None:
    text = """net (float[N,3] x) => (float[N,3] y) {
        [same] a = Gemm (x, w)
        [same] b = Relu (a)
        c = Gemm (b, w)
        d = Relu (c)
        [same] e = Gemm (d, w)
        [same_2] y = Relu (e)
    }"""
    model = build(text, w=normal(3, 3))
    ready = prepare(read_model(model), "the model")
    names = [node.name for node in ready.proto.graph.node]
    assert len(set(names)) == 6
    assert all(names)
    assert names[0] == "same"
    assert names[2] == "Gemm_c"
    for node in model.graph.node:  # onnxruntime loads no file with duplicate names
        node.name = ""
    assert_same_outputs(model, ready.proto)


@pytest.mark.parametrize("opset", [9, 13, 21])
def test_metadata_and_interface_survive(opset: int) -> None:
    model = model_of_opset(opset)
    model.producer_name, model.producer_version, model.domain = "somebody", "2.1", "org.example"
    model.doc_string, model.model_version = "some words", 7
    model.metadata_props.add(key="author", value="me")
    proto = prepared(model).proto
    for field in ("producer_name", "producer_version", "domain", "doc_string", "model_version"):
        assert getattr(proto, field) == getattr(model, field)
    assert list(proto.metadata_props) == list(model.metadata_props)
    for kind in ("input", "output"):
        assert [value.name for value in getattr(proto.graph, kind)] == [
            value.name for value in getattr(model.graph, kind)
        ]


def test_weights_of_a_subgraph_are_kept() -> None:
    """A body reads the outer weight; nothing in the main graph does."""
    body = """
    net (float[N,3] x, bool go) => (float[N,4] y) {
        h = Gemm (x, w)
        y = If (go) <
            then_branch = inner () => (float[N,4] t) { t = MatMul (h, v) },
            else_branch = other () => (float[N,4] e) { e = Identity (h) }
        >
    }"""
    model = build(body, w=normal(3, 4), v=normal(4, 4))
    ready = prepare(read_model(model), "the model")
    for go in (True, False):
        feed = {"x": normal(5, 3), "go": np.array(go)}
        np.testing.assert_allclose(run(ready.proto, feed)["y"], run(model, feed)["y"], rtol=1e-5, atol=1e-5)


def as_double(model: onnx.ModelProto) -> onnx.ModelProto:
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.elem_type = TensorProto.DOUBLE
    for tensor in model.graph.initializer:
        tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float64), tensor.name))
    return model


def test_double_precision_models_keep_their_type() -> None:
    model = as_double(
        build("net (float[N,3] x) => (float[N,5] y) { m = MatMul (x, w) y = Add (m, b) }", w=normal(3, 5), b=normal(5))
    )
    ready = prepare(read_model(model), "the model")
    assert {tensor.data_type for tensor in ready.proto.graph.initializer} == {TensorProto.DOUBLE}
    assert find_layers(ready).float_nodes[0].reason == "its weight is double, not float32"


def test_what_cannot_be_raised_is_a_model_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_model: onnx.ModelProto, _opset: int) -> onnx.ModelProto:
        raise RuntimeError("no adapter for Thing\nat line 3")

    monkeypatch.setattr(version_converter, "convert_version", refuse)
    with pytest.raises(ModelError, match="the model cannot be raised from opset 9 to 13: no adapter for Thing"):
        prepare(read_model(model_of_opset(9)), "the model")
