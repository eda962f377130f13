"""Branches of Ifs: taken out as models, put back without a change, and names that never clash."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import parser

from models import change, initializer
from onnxcalib.algorithms.calibration import calibrate
from onnxcalib.data import open_data
from onnxcalib.model.branches import Branch, branch_model, find_branches, outer_part, with_branch
from onnxcalib.model.graph import attributes
from onnxcalib.model.layers import find_layers, weights_of
from onnxcalib.model.placement import find_insertion_points
from onnxcalib.model.prepare import Model, prepare
from onnxcalib.model.qdq import write_qdq
from onnxcalib.model.shapes import input_specs
from onnxcalib.numerics.quant_params import make_qparams, quantize
from onnxcalib.pipeline.branch_data import BranchData
from onnxcalib.plan import LayerParams, QuantPlan
from onnxcalib.recipe import Precision
from onnxcalib.runtime.session import Session
from onnxcalib.targets import find_target

HEAD = '<ir_version: 8, opset_import: ["" : 17]>\n'

# Both branches and the main graph read the initialiser w, only the then branch reads v. The nested If reads from the
# body around it (t), from the main graph (h, which comes late) and a constant of the body (k).
MODEL = """
main (float[N,2] x, int64 mode) => (float[N,2] y, float[N,2] z)
<int64 one = {1}, float[2,2] w = {1.0, -2.0, 0.5, 3.0}, float[2,2] v = {0.25, 1.0, -1.0, 2.0}>
{
    c = Equal (mode, one)
    h0 = MatMul (x, w)
    h1 = Relu (h0)
    h = Sigmoid (h1)
    y = If (c) <
        then_branch = then_body () => (float[N,2] t_out) {
            k = Constant <value_float = 0.0> ()
            t0 = MatMul (x, w)
            t = MatMul (t0, v)
            sum = ReduceSum <keepdims = 0> (t)
            inner = Greater (sum, k)
            t1 = If (inner) <
                then_branch = positive () => (float[N,2] p) { p0 = Add (t, h)  p = Add (p0, k) },
                else_branch = negative () => (float[N,2] p) { p = Sub (t, h) }
            >
            t_out = Identity (t1)
        },
        else_branch = else_body () => (float[N,2] e_out) { e0 = MatMul (h, w)  e_out = Tanh (e0) }
    >
    z = Add (y, h)
}
"""


def parsed(text: str) -> onnx.ModelProto:
    model = parser.parse_model(HEAD + text)
    onnx.checker.check_model(model)
    return model


def prepared(text: str = MODEL) -> Model:
    return prepare(parsed(text), "test")


def feeds() -> list[dict[str, np.ndarray]]:
    """Both conditions, and inputs that take both nested branches."""
    x = np.array([[1.0, 2.0], [-0.5, 0.25], [0.1, -3.0]], np.float32)
    return [{"x": sign * x, "mode": np.array(mode, np.int64)} for mode in (0, 1) for sign in (1, -1)]


def outputs(model: onnx.ModelProto) -> list[dict[str, np.ndarray]]:
    session = Session(model)
    return [session.run(feed) for feed in feeds()]


def assert_same(model: onnx.ModelProto, other: onnx.ModelProto, atol: float = 0.0) -> None:
    for left, right in zip(outputs(model), outputs(other), strict=True):
        assert left.keys() == right.keys()
        for name, value in left.items():
            np.testing.assert_allclose(right[name], value, rtol=0, atol=atol, err_msg=name)


def body_of(model: onnx.ModelProto, branch: Branch) -> onnx.GraphProto:
    node = next(node for node in model.graph.node if node.name == branch.node)
    return attributes(node)[branch.attribute]


def names_made(graph: onnx.GraphProto) -> set[str]:
    return {tensor.name for tensor in graph.initializer} | {name for node in graph.node for name in node.output}


def test_finds_both_branches_and_what_they_capture() -> None:
    then, other = find_branches(prepared().proto)
    assert then == Branch("If_y", "then_branch", "c", True, ("x", "h"))
    assert other == Branch("If_y", "else_branch", "c", False, ("h",))


def test_a_branch_needs_a_layer_directly_in_its_body() -> None:
    deep = """
    main (float[N,2] x, bool c) => (float[N,2] y) <float[2,2] w = {1.0, 2.0, 3.0, 4.0}>
    {
        y = If (c) <
            then_branch = a () => (float[N,2] p) {
                p = If (c) <then_branch = b () => (float[N,2] q) { q = MatMul (x, w) },
                            else_branch = d () => (float[N,2] r) { r = Relu (x) }>
            },
            else_branch = e () => (float[N,2] s) { s = MatMul (x, w) }
        >
    }
    """
    assert [branch.attribute for branch in find_branches(prepared(deep).proto)] == ["else_branch"]


def test_no_branch_where_a_captured_type_is_unknown() -> None:
    model = prepared().proto
    make_unknown = next(node for node in model.graph.node if node.output[0] == "h")
    make_unknown.domain = "custom"
    model.opset_import.append(onnx.helper.make_opsetid("custom", 1))
    assert find_branches(model) == ()


@pytest.mark.parametrize("number", [0, 1])
def test_branch_model_is_valid_and_computes_the_branch(number: int) -> None:
    model = prepared().proto
    branch = find_branches(model)[number]
    alone = branch_model(model, branch)
    onnx.checker.check_model(alone, full_check=True)
    assert [value.name for value in alone.graph.input] == list(branch.captured)
    assert {tensor.name for tensor in alone.graph.initializer} == ({"w", "v"} if number == 0 else {"w"})
    assert alone.opset_import == model.opset_import
    assert alone.ir_version == model.ir_version
    whole, part, body = Session(model), Session(outer_part(model, branch)), Session(alone)
    for feed in feeds():
        tensors = {**feed, **part.run(feed)}
        if bool(tensors["c"]) is branch.taken_when:
            (result,) = body.run({name: tensors[name] for name in branch.captured}).values()
            np.testing.assert_array_equal(result, whole.run(feed)["y"])


def test_inputs_keep_types_and_take_inferred_shapes_over_stale_ones() -> None:
    model = prepared().proto
    model.graph.value_info.append(onnx.helper.make_tensor_value_info("h", onnx.TensorProto.FLOAT, [7, 2]))
    (value,) = branch_model(model, find_branches(model)[1]).graph.input
    assert value.type.tensor_type.elem_type == onnx.TensorProto.FLOAT
    first, second = value.type.tensor_type.shape.dim
    assert not first.HasField("dim_value")
    assert second.dim_value == 2


def test_other_element_types_are_captured() -> None:
    text = """
    main (float16[N,2] x, int64[1] i, bool c) => (float[N,2] y) <float[2,2] w = {1.0, 2.0, 3.0, 4.0}>
    {
        j = Add (i, i)
        y = If (c) <
            then_branch = a () => (float[N,2] p) { p0 = Cast <to = 1> (x)  p = MatMul (p0, w) },
            else_branch = b () => (float[N,2] q) {
                q0 = Cast <to = 1> (j)
                q1 = Cast <to = 1> (x)
                q2 = MatMul (q1, w)
                q = Add (q2, q0)
            }
        >
    }
    """
    model = prepared(text).proto
    other = branch_model(model, find_branches(model)[1])
    kinds = {value.name: value.type.tensor_type.elem_type for value in other.graph.input}
    # Half precision is float32 from the input on.
    assert kinds == {"j": onnx.TensorProto.INT64, "x_float": onnx.TensorProto.FLOAT}
    Session(other)


def test_untyped_outputs_of_a_body_get_their_types() -> None:
    model = prepared().proto
    branch = find_branches(model)[0]
    for value in body_of(model, branch).output:
        value.ClearField("type")
    alone = branch_model(model, branch)
    onnx.checker.check_model(alone)
    assert alone.graph.output[0].type.tensor_type.elem_type == onnx.TensorProto.FLOAT


def test_round_trip_changes_nothing() -> None:
    model = prepared().proto
    before = model.SerializeToString()
    spliced = model
    for branch in find_branches(model):
        spliced = with_branch(spliced, branch, branch_model(model, branch))
    assert_same(model, spliced)
    assert model.SerializeToString() == before
    for branch in find_branches(model):
        assert not body_of(spliced, branch).input
        assert not body_of(spliced, branch).initializer  # w and v stay where they were
    assert [tensor.name for tensor in spliced.graph.initializer] == [tensor.name for tensor in model.graph.initializer]


def test_round_trip_through_prepare() -> None:
    model = prepared().proto
    spliced = model
    for branch in find_branches(model):
        spliced = with_branch(spliced, branch, prepare(branch_model(model, branch), "branch").proto)
    assert_same(model, spliced)
    then = find_branches(model)[0]
    assert [tensor.name for tensor in body_of(spliced, then).initializer] == ["k"]


def test_an_initialiser_with_other_values_is_renamed_not_shared() -> None:
    model = prepared().proto
    then, _ = find_branches(model)
    body = branch_model(model, then)
    change(body, "w", 10 * initializer(body, "w"))
    spliced = with_branch(model, then, body)
    assert [tensor.name for tensor in body_of(spliced, then).initializer] == ["w_2"]
    float_outputs, changed = outputs(model), outputs(spliced)
    for number, feed in enumerate(feeds()):
        same = np.allclose(float_outputs[number]["y"], changed[number]["y"])
        assert same is (int(feed["mode"]) == 0)  # the else branch and the main graph still read the old one
        added = [each[number]["z"] - each[number]["y"] for each in (float_outputs, changed)]
        np.testing.assert_allclose(*added, atol=1e-4)


def test_weights_that_nobody_reads_any_more_leave_the_main_graph() -> None:
    model = prepared().proto
    then, _ = find_branches(model)
    body = branch_model(model, then)
    for tensor in body.graph.initializer:
        if tensor.name == "v":
            tensor.name = "v_codes"
    for node in body.graph.node:
        node.input[:] = ["v_codes" if name == "v" else name for name in node.input]
    spliced = with_branch(model, then, body)
    assert {tensor.name for tensor in spliced.graph.initializer} == {"one", "w"}
    assert_same(model, spliced)


def test_new_names_that_the_main_graph_or_a_nested_body_has_are_changed() -> None:
    model = prepared().proto
    then, _ = find_branches(model)
    body = branch_model(model, then)
    # z and h0 are made in the main graph (z after the If), p in both nested bodies; t_out is the output.
    new = {"t0": "h0", "t1": "z", "sum": "p", "t_out": "y"}
    for node in body.graph.node:
        node.input[:] = [new.get(name, name) for name in node.input]
        node.output[:] = [new.get(name, name) for name in node.output]
    body.graph.output[0].name = "y"
    spliced = with_branch(model, then, body)
    inside = body_of(spliced, then)
    assert not names_made(inside) & names_made(spliced.graph)
    assert {"h0_2", "z_2", "y_2", "p"} <= names_made(inside)
    nested = next(node for node in inside.node if node.op_type == "If")
    assert all("p" not in names_made(attribute.g) for attribute in nested.attribute)
    assert_same(model, spliced)


def test_nodes_get_names_that_no_other_graph_uses() -> None:
    text = """
    main (float[N,2] x, bool c) => (float[N,2] y) <float[2,2] w = {1.0, 2.0, 3.0, 4.0}>
    {
        [fc] h = MatMul (x, w)
        y = If (c) <
            then_branch = a () => (float[N,2] p) { [fc] p0 = MatMul (h, w)  [own] p = MatMul (p0, w) },
            else_branch = b () => (float[N,2] q) { q = MatMul (h, w) }
        >
    }
    """
    model = prepared(text).proto
    bodies = [branch_model(model, branch) for branch in find_branches(model)]
    assert [node.name for node in bodies[0].graph.node] == ["If_y/then_branch/fc", "own"]
    assert [node.name for node in bodies[1].graph.node] == ["If_y/else_branch/MatMul_q"]


def test_opsets_of_the_body_are_taken_over() -> None:
    model = prepared().proto
    then, _ = find_branches(model)
    body = branch_model(model, then)
    body.opset_import.append(onnx.helper.make_opsetid("com.microsoft", 1))
    spliced = with_branch(model, then, body)
    assert {entry.domain: entry.version for entry in spliced.opset_import} == {"": 17, "com.microsoft": 1}


def test_outer_part_runs_neither_the_if_nor_what_follows() -> None:
    model = prepared().proto
    part = outer_part(model, find_branches(model)[1])
    assert [node.op_type for node in part.graph.node] == ["Equal", "MatMul", "Relu", "Sigmoid"]
    assert [value.name for value in part.graph.output] == ["c", "h"]
    assert {tensor.name for tensor in part.graph.initializer} == {"one", "w"}


def quantized(model: Model, data: object) -> onnx.ModelProto:
    """Eight bits from extremes; one scale a weight."""
    target, layers = find_target("ort"), find_layers(model).layers
    places = find_insertion_points(model, layers, target)
    seen = calibrate(model, places, data, lambda *_: None).tensors  # type: ignore[arg-type]
    shared, inputs, params = {}, {}, {}
    for tensor in places.tensors.values():
        statistics = seen[tensor.same_qparams_as or tensor.name]
        qparams = inputs if tensor.layers and not tensor.shared else shared
        qparams[tensor.name] = make_qparams(statistics.low, statistics.high, target.activation_scheme(8))
    for layer in layers:
        weight = weights_of(model, [layer.weight])[layer.weight]
        qparams = make_qparams(weight.min(), weight.max(), target.weight_scheme(8))
        params[layer.name] = LayerParams(quantize(weight, qparams), qparams, None, weight)
    plan = QuantPlan(target.name, "minmax", {layer.name: Precision(8, 8) for layer in layers}, params, shared, inputs)
    return write_qdq(model, layers, plan, target)


def test_main_graph_and_branches_quantized_together() -> None:
    model = prepared()
    data = open_data(feeds(), input_specs(model.proto))
    result = quantized(model, data)
    assert sum(node.op_type == "DequantizeLinear" for node in result.graph.node) > 0
    for branch in find_branches(model.proto):
        alone = prepare(branch_model(model.proto, branch), branch.attribute)
        assert len(find_layers(alone).layers) == (2 if branch.taken_when else 1)
        result = with_branch(result, branch, quantized(alone, BranchData(model, branch, data)))
        assert any(node.op_type == "DequantizeLinear" for node in body_of(result, branch).node)
    assert not {"w", "v"} & {tensor.name for tensor in result.graph.initializer}
    spread = np.ptp([value for each in outputs(model.proto) for value in each["y"]])
    assert_same(model.proto, result, atol=0.02 * float(spread))
