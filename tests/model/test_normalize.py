"""What runtimes accept and the checker does not is put in order; what cannot be is named."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import parser
from prepared import assert_same_outputs
from said import refused

from models import build, feed_for, normal, op_types, run
from onnxcalib.errors import ModelError
from onnxcalib.model.io import read_model
from onnxcalib.model.prepare import prepare

NET = "net (float[N,6] x) => (float[N,3] y) { a = MatMul (x, w) r = Relu (a) y = MatMul (r, v) }"
HEAD = '<ir_version: 8, opset_import: ["" : 17, "loc" : 1]>'


def net() -> onnx.ModelProto:
    return build(NET, w=normal(6, 4), v=normal(4, 3))


def ready(model: onnx.ModelProto) -> onnx.ModelProto:
    return prepare(read_model(model), "the model").proto


def test_nodes_out_of_order_and_a_nameless_graph() -> None:
    model = net()
    nodes = list(model.graph.node)[::-1]
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    model.graph.name = ""
    assert op_types(ready(model)) == ["MatMul", "Relu", "MatMul"]
    assert_same_outputs(net(), ready(model))


def test_nodes_of_a_subgraph_out_of_order() -> None:
    text = """net (float[N,4] x, bool c) => (float[N,4] y) {
        y = If (c) <
            then_branch = a () => (float[N,4] p) { p = Relu (p1)  p1 = Tanh (late) },
            else_branch = b () => (float[N,4] q) { q = Identity (late) }
        >
        late = MatMul (x, w)
    }"""
    whole = ready(build(text, w=normal(4, 4)))
    onnx.checker.check_model(whole)
    feed = {"x": normal(2, 4), "c": np.array(True)}
    expected = np.maximum(np.tanh(feed["x"] @ normal(4, 4)), 0)
    np.testing.assert_allclose(run(whole, feed)["y"], expected, rtol=1e-5)


def test_a_cycle_is_named() -> None:
    text = "net (float[N,4] x) => (float[N,4] y) { [one] a = Add (x, b)  [two] b = Relu (a)  y = MatMul (b, w) }"
    with refused(ModelError, "cycle", "one"):
        read_model(build(text, w=normal(4, 4)))


@pytest.mark.parametrize("field", ["shape", "type"])
def test_outputs_without_a_declaration_get_one(field: str) -> None:
    model = net()
    value = model.graph.output[0]
    value.ClearField("type") if field == "type" else value.type.tensor_type.ClearField("shape")
    before = model.SerializeToString()
    declared = ready(model).graph.output[0].type.tensor_type
    assert declared.elem_type == onnx.TensorProto.FLOAT
    assert declared.shape.dim[1].dim_value == 3
    assert model.SerializeToString() == before


def test_what_no_output_needs_is_left_out() -> None:
    text = """net (float[N,6] x, bool c) => (float[N,4] y) {
        [live] y = MatMul (x, w)
        [dead] d = MatMul (y, u)
        e = If (c) <
            then_branch = a () => (float[N,4] p) { p = MatMul (d, u) },
            else_branch = b () => (float[N,4] q) { q = Relu (d) }
        >
    }"""
    assert op_types(ready(build(text, w=normal(6, 4), u=normal(4, 4)))) == ["MatMul"]


def function_model(function_opset: int, call: str, functions: str, domains: str = "") -> onnx.ModelProto:
    text = f"""{HEAD} net (float[N,4] x) => (float[N,4] y) <float[4,4] w = {{{",".join(map(str, range(16)))}}}>
    {{ a = MatMul (x, w)  y = {call} }}"""
    return parser.parse_model(text + functions.format(opset=f'opset_import : ["" : {function_opset}{domains}]'))


NESTED = """
<domain : "loc", {opset}> outer <slope> (a, w) => (c) {{ d = MatMul (a, w)  c = loc.inner <by : float = @slope> (d) }}
<domain : "loc", opset_import : ["" : 16]> inner <by, more : float = 0.5> (a) => (c) {{
    d = LeakyRelu <alpha : float = @by> (a)
    c = Elu <alpha : float = @more> (d)
}}"""


@pytest.mark.parametrize("opset", [15, 17, 18])
def test_functions_of_other_opsets_are_inlined(opset: int) -> None:
    model = function_model(opset, "loc.outer <slope = 0.25> (a, w)", NESTED, ', "loc" : 1')
    inlined = ready(model)
    assert op_types(inlined) == ["MatMul", "MatMul", "LeakyRelu", "Elu"]
    feed = feed_for(model, 3)
    weight = np.arange(16, dtype=np.float32).reshape(4, 4)
    product = feed["x"] @ weight @ weight
    leaky = np.where(product > 0, product, 0.25 * product)
    expected = np.where(leaky > 0, leaky, 0.5 * np.expm1(np.minimum(leaky, 0)))
    np.testing.assert_allclose(run(inlined, feed)["y"], expected, rtol=1e-4)


def test_a_function_whose_nodes_changed_is_converted() -> None:
    body = '\n<domain : "loc", {opset}> f (a) => (c) {{ u = Unsqueeze <axes = [0]> (a)  c = Squeeze <axes = [0]> (u) }}'
    inlined = ready(function_model(11, "loc.f (a)", body))
    feed = feed_for(inlined, 3)
    expected = feed["x"] @ np.arange(16, dtype=np.float32).reshape(4, 4)
    np.testing.assert_allclose(run(inlined, feed)["y"], expected, rtol=1e-4)


def test_a_function_that_calls_itself_is_refused() -> None:
    body = '\n<domain : "loc", {opset}> f (a) => (c) {{ c = loc.f (a) }}'
    with refused(ModelError, "f"):
        ready(function_model(17, "loc.f (a)", body, ', "loc" : 1'))


def test_a_raised_model_declares_no_more_than_it_did() -> None:
    # The converter infers a size of zero for the Reshape from the negative sizes of the input.
    text = """net (float[N,2,4] x) => (float[N,K] y) {
        t = Transpose <perm = [1,0,2]> (x)
        s = Squeeze <axes = [1]> (u)
        u = Unsqueeze <axes = [1]> (t)
        y = Reshape (s, to)
    }"""
    model = build(text, 11, 7, to=np.array([0, -1]))
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.shape.dim[0].dim_value = -1
    raised = ready(model)
    assert not raised.graph.value_info
    assert run(raised, {"x": normal(3, 2, 4)})["y"].shape == (2, 12)


def test_constants_that_hold_too_little_or_have_no_known_type_are_named() -> None:
    short, strange = net(), net()
    short.graph.initializer[0].raw_data = short.graph.initializer[0].raw_data[:-4]
    strange.graph.initializer[1].data_type = 99
    with refused(ModelError, "w", 92, 96):
        read_model(short)
    with refused(ModelError, "v", 99):
        read_model(strange)
