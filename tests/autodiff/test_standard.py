"""Gradient rules against finite differences in double precision."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from gradient_check import check, loss_model

import models
from models import normal, op_types
from onnxcalib.autodiff.interface import NoGradientError, gradient_name
from onnxcalib.autodiff.standard.gradient_model import gradient_model
from onnxcalib.errors import ModelError


def ints(*values: int) -> np.ndarray:
    """A constant list of integers."""
    return np.array(values, np.int64)


UNARY = {
    "Neg (p)": 13,
    "Abs (p)": 13,
    "Exp (p)": 13,
    "Identity (p)": 13,
    "Relu (p)": 13,
    "LeakyRelu <alpha=0.2> (p)": 16,
    "Elu <alpha=0.7> (p)": 13,
    "Selu (p)": 13,
    "Sigmoid (p)": 13,
    "HardSigmoid <alpha=0.3, beta=0.4> (p)": 13,
    "HardSwish (p)": 14,
    "Tanh (p)": 13,
    "Erf (p)": 13,
    "Gelu (p)": 20,
    'Gelu <approximate="tanh"> (p)': 20,
    "Softplus (p)": 13,
    "Mish (p)": 18,
    "Softmax <axis=1> (p)": 13,
    "Softmax (p)": 13,
    "LogSoftmax <axis=0> (p)": 13,
    "LogSoftmax (p)": 21,
    "Transpose (p)": 13,
    "Transpose <perm=[1,2,0]> (p)": 13,
    "Flatten <axis=2> (p)": 13,
    "ReduceMean <axes=[0,2], keepdims=0> (p)": 13,
    "ReduceMean <axes=[-1]> (p)": 13,
    "ReduceSum (p)": 18,
    "ReduceSumSquare <axes=[1], keepdims=0> (p)": 13,
    "ReduceMax <axes=[1], keepdims=0> (p)": 13,
    "ReduceMin (p)": 18,
    "Dropout (p)": 13,
    "Cast <to=1> (p)": 13,
}


@pytest.mark.parametrize(("op", "opset"), UNARY.items(), ids=list(UNARY))
def test_one_operand(op: str, opset: int) -> None:
    model = loss_model(f"h = Mul (p, x) q = Mul (h, two) y = {op.replace('(p)', '(q)')}", {"p": "3,4,5", "x": "3,4,5"},
                       opset, two=np.float32(2))  # fmt: skip
    check(model, ["p"])


@pytest.mark.parametrize("op", ["Sqrt", "Log", "Reciprocal"])
def test_one_positive_operand(op: str) -> None:
    check(loss_model(f"y = {op} (p)", {"p": "3,4"}), ["p"], {"p": np.abs(normal(3, 4)) + 0.5})


SHAPES = [("N,4,5", "4,5"), ("4,5", "4,5"), ("N,4,5", "1,5"), ("N,4,5", "4,1"), ("N,1,5", "4,1"), ("N,4,5", ""),
          ("N,M,5", "4,5"), ("4", "1"), ("5", "2,4,1")]  # fmt: skip


@pytest.mark.parametrize("op", ["Add", "Sub", "Mul", "Div", "Max", "Min", "Sum", "Mean"])
@pytest.mark.parametrize(("x", "p"), SHAPES)
def test_two_operands_with_broadcasting(op: str, x: str, p: str) -> None:
    sizes = [int(dim) if dim.isdigit() else {"N": 3, "M": 4}[dim] for dim in x.split(",")]
    shape = [int(dim) for dim in p.split(",") if dim]
    feed = {"x": normal(*sizes, seed=1), "p": np.asarray(normal(*shape, seed=2) + 3 * np.float32(op == "Div"))}
    check(loss_model(f"y = {op} (x, p)", {"x": x, "p": p}), ["p"], feed)
    check(loss_model(f"d = Abs (x) c = Add (d, one) y = {op} (p, c)", {"x": x, "p": p}, one=np.float32(1)), ["p"], feed)


def test_broadcasting_that_only_the_data_decides() -> None:
    model = loss_model("s = Add (x, p) y = Mul (s, x)", {"x": "N,K", "p": "1,4"})
    assert "NonZero" not in op_types(check(model, ["p"], {"x": normal(3, 4), "p": normal(1, 4, seed=1)}))
    grown = loss_model("e = Expand (p, shape) f = Mul (e, x) y = Add (f, q)", {"x": "M,4", "p": "1,4", "q": "3,4"})
    grown.graph.input.append(onnx.helper.make_tensor_value_info("shape", onnx.TensorProto.INT64, [None]))
    feed = {"x": normal(3, 4), "p": normal(1, 4, seed=1), "q": normal(3, 4, seed=2), "shape": ints(3, 1)}
    check(grown, ["p", "q"], feed)


@pytest.mark.parametrize("exponent", [np.float32(2), np.float32(3), np.float32(0.5), np.int64(3), normal(4) + 3])
def test_constant_powers(exponent: np.ndarray) -> None:
    model = loss_model("y = Pow (p, e)", {"p": "3,4"}, e=exponent)
    check(model, ["p"], {"p": np.abs(normal(3, 4)) + 0.5})


def test_power_given_as_data() -> None:
    feed = {"p": np.abs(normal(3, 1)) + 0.5, "e": normal(4, seed=1)}
    check(loss_model("y = Pow (p, e)", {"p": "3,1", "e": "4"}), ["p"], feed)
    with pytest.raises(NoGradientError, match="Pow"):
        gradient_model(loss_model("[node] y = Pow (p, e)", {"p": "3,1", "e": "4"}), ["e"])


def test_three_operands_of_max_and_a_tie() -> None:
    check(loss_model("y = Max (p, x, q)", {"p": "3,4", "x": "3,4", "q": "4"}), ["p", "q"])
    check(loss_model("y = Min (p, p)", {"p": "3,4"}), ["p"])


def test_clip_with_constant_and_computed_bounds() -> None:
    low, high = np.float32(-0.5), np.float32(0.7)
    check(loss_model("y = Clip (p, low, high)", {"p": "5,6"}, low=low, high=high), ["p"])
    check(loss_model("y = Clip (p, , high)", {"p": "5,6"}, high=high), ["p"])
    model = loss_model("low = Neg (high) y = Clip (p, low, high)", {"p": "5,6", "high": ""})
    check(model, ["p", "high"], {"p": normal(5, 6), "high": np.array(0.7, np.float32)})


def test_round_is_straight_through() -> None:
    model = loss_model("r = Round (p) y = Mul (r, x)", {"p": "3,4", "x": "3,4"})
    feed = models.feed_for(model)
    found = models.run(gradient_model(model, ["p"]), feed)[gradient_name("p")]
    y = np.round(feed["p"]) * feed["x"]
    np.testing.assert_allclose(found, (2 * y + 1) * feed["x"] / y.size, rtol=1e-5, atol=1e-7)


def test_where_to_both_branches() -> None:
    model = loss_model("c = Greater (x, q) y = Where (c, p, q)", {"p": "4", "q": "3,1", "x": "3,4"})
    check(model, ["p", "q"])


@pytest.mark.parametrize("slope", ["4,1,1", "1"])
def test_prelu(slope: str) -> None:
    check(loss_model("y = PRelu (p, s)", {"p": "3,4,2,2", "s": slope}, 16), ["p", "s"])


REDUCED = {"N,4,5": [(1,), (-1, 0), (0, 1, 2)], "4,5": [(0,), (1,)]}


@pytest.mark.parametrize("op", ["ReduceSum", "ReduceMean", "ReduceMax"])
@pytest.mark.parametrize(("shape", "axes"), [(shape, axes) for shape, many in REDUCED.items() for axes in many])
@pytest.mark.parametrize("keep", [0, 1])
def test_reductions_with_axes_as_an_input(op: str, shape: str, axes: tuple[int, ...], keep: int) -> None:
    model = loss_model(f"h = Mul (x, p) y = {op} <keepdims={keep}> (h, axes)", {"x": shape, "p": "4,5"}, 18,
                       axes=ints(*axes))  # fmt: skip
    check(model, ["p"])


def test_reduction_that_does_nothing() -> None:
    for op in ("ReduceSum", "ReduceMean", "ReduceMax"):
        model = loss_model(f"y = {op} <noop_with_empty_axes=1> (p, axes)", {"p": "3,4"}, 18, axes=ints())
        check(model, ["p"])


def test_losses_of_other_forms() -> None:
    for tail in ("ReduceSumSquare <keepdims=0> (d)", "ReduceMean <keepdims=0> (s)"):
        text = f"net (float[N,4] x, float[4] p) => (float loss) {{ d = Sub (x, p) s = Pow (d, two) loss = {tail} }}"
        check(models.build(text, two=np.float32(2)), ["p"])


SHAPE_OPS = {
    "Reshape (h, to)": {"to": ints(0, -1)},
    "Squeeze (u, one)": {"one": ints(1)},
    "Unsqueeze (h, one)": {"one": ints(1)},
    "Concat <axis=1> (h, x, h)": {},
    "Concat <axis=-1> (x, h)": {},
    "Concat <axis=0> (h, x)": {},
    "Slice (h, from, to, axes)": {"from": ints(1), "to": ints(-1), "axes": ints(2)},
    "Slice (h, from, to, axes, by)": {"from": ints(1, 0), "to": ints(99, 4), "axes": ints(-1, 1), "by": ints(2, 3)},
    "Gather <axis=1> (h, at)": {"at": ints(2, 0, 2, -1)},
    "Gather <axis=2> (h, at)": {"at": np.array([[1, 1], [4, -2]])},
    "Gather <axis=1> (h, at) ": {"at": np.array(1)},
    "Expand (h, to)": {"to": ints(2, 1, 4, 1)},
    "Pad (h, by)": {"by": ints(0, 1, 2, 0, 0, 1)},
    "Pad (h, by, value)": {"by": ints(0, 1, 2, 0, 0, 1), "value": np.float32(0.3)},
}


@pytest.mark.parametrize("op", SHAPE_OPS)
@pytest.mark.parametrize("batch", ["3", "N"])
def test_ops_that_move_values(op: str, batch: str) -> None:
    body = f"h = Mul (x, p) u = Unsqueeze (h, axis) y = {op}"
    model = loss_model(body, {"x": f"{batch},4,5", "p": "4,5"}, axis=ints(1), **SHAPE_OPS[op])
    check(model, ["p"])


def test_joined_parts_of_free_sizes() -> None:
    model = loss_model("a = Mul (x, p) b = Mul (z, p) y = Concat <axis=0> (a, x, b)",
                       {"x": "N,4", "z": "M,4", "p": "4"})  # fmt: skip
    check(model, ["p"], {"x": normal(2, 4), "z": normal(3, 4, seed=1), "p": normal(4, seed=2)})


def test_split_with_an_unused_output() -> None:
    model = loss_model("h = Mul (x, p) a, b, c = Split <axis=1> (h, sizes) y = Concat <axis=1> (c, a)",
                       {"x": "N,6", "p": "6"}, sizes=ints(1, 2, 3))  # fmt: skip
    check(model, ["p"])


def test_rows_picked_by_data() -> None:
    model = loss_model("y = Gather (p, at)", {"p": "6,3"})
    model.graph.input.append(onnx.helper.make_tensor_value_info("at", onnx.TensorProto.INT64, ["N", 2]))
    check(model, ["p"], {"p": normal(6, 3), "at": np.array([[0, 5], [-1, 2], [2, 2]])})


def test_pads_given_by_axes_or_computed() -> None:
    model = loss_model("y = Pad (p, by, , axes)", {"p": "3,4"}, 18, by=ints(1, 2), axes=ints(1))
    check(model, ["p"])
    model = loss_model("by = Mul (half, two) y = Pad (p, by)", {"p": "3,4"}, half=ints(1, 0, 0, 1), two=ints(2))
    check(model, ["p"])


@pytest.mark.parametrize("op", ['DepthToSpace <blocksize=2, mode="DCR">', 'DepthToSpace <blocksize=2, mode="CRD">',
                                "SpaceToDepth <blocksize=2>"])  # fmt: skip
def test_depth_and_space(op: str) -> None:
    check(loss_model(f"h = Mul (x, p) y = {op} (h)", {"x": "N,8,4,6", "p": "8,4,6"}), ["p"])


RESIZES = [
    ('mode="nearest", coordinate_transformation_mode="asymmetric", nearest_mode="floor"', (1, 1, 2, 3)),
    ('mode="nearest"', (1, 1, 2, 2)),
    ('mode="nearest", nearest_mode="ceil"', (1, 1, 1.5, 2)),
    ('mode="linear"', (1, 1, 2, 2)),
    ('mode="linear", coordinate_transformation_mode="align_corners"', (1, 1, 2, 1.5)),
    ('mode="linear", coordinate_transformation_mode="pytorch_half_pixel"', (1, 1, 0.5, 1)),
]


@pytest.mark.parametrize(("settings", "scales"), RESIZES)
def test_resize(settings: str, scales: tuple[float, ...]) -> None:
    model = loss_model(f"h = Mul (x, p) y = Resize <{settings}> (h, , scales)", {"x": "N,2,4,6", "p": "2,4,6"},
                       scales=np.array(scales, np.float32))  # fmt: skip
    check(model, ["p"])


def test_resize_to_sizes() -> None:
    model = loss_model('h = Mul (x, p) y = Resize <mode="linear"> (h, , , sizes)', {"x": "3,2,4,6", "p": "2,4,6"},
                       sizes=ints(3, 2, 7, 9))  # fmt: skip
    check(model, ["p"])


def test_a_tensor_that_is_read_often_and_a_parameter_that_is_not() -> None:
    body = "a = Mul (p, x) b = Sigmoid (a) c = Mul (a, b) d = Add (c, a) e = Sub (d, p) y = Add (e, a)"
    model = loss_model(body, {"p": "4", "x": "N,4", "idle": "2,3"})
    check(model, ["p", "idle"])


def test_integers_stop_gradients() -> None:
    body = "h = Mul (x, p) s = Shape (h) f = Cast <to=1> (s) k = Cast <to=7> (h) c = Cast <to=1> (k) z = Mul (c, zero)"
    model = loss_model(f"{body} m = ReduceSum <keepdims=0> (f) i = Mul (h, m) y = Add (i, z)", {"x": "N,4", "p": "4"},
                       zero=np.float32(0))  # fmt: skip
    check(model, ["p"])


def test_several_outputs_are_kept() -> None:
    head, body = "float[N,4] x, float[4] p", "h = Mul (x, p) loss = ReduceMean <keepdims=0> (h)"
    model = models.build(f"net ({head}) => (float loss, float[N,4] h) {{ {body} }}")
    before = model.SerializeToString()
    result = gradient_model(model, ["p"])
    assert model.SerializeToString() == before
    assert [value.name for value in result.graph.output] == ["loss", "h", gradient_name("p")]
    assert (result.ir_version, result.opset_import) == (model.ir_version, model.opset_import)
    assert [value.name for value in result.graph.input] == ["x", "p"]
    found = models.run(result, feed := models.feed_for(model))
    np.testing.assert_allclose(found[gradient_name("p")], feed["x"].sum(axis=0) / feed["x"].size, rtol=1e-5)


def test_a_branch_without_parameters_makes_no_nodes() -> None:
    plain = loss_model("h = Mul (x, p) y = Add (h, x)", {"x": "N,4", "p": "4"})
    body = (
        'e = Einsum <equation="ij->ij"> (x) f = Floor (e) g = Conv (w, v) r = ReduceSum <keepdims=0> (g) k = Add (f, r)'
    )
    longer = loss_model(f"{body} h = Mul (x, p) y = Add (h, k)", {"x": "N,4", "p": "4"},
                        w=normal(1, 1, 3, 3), v=normal(1, 1, 2, 2))  # fmt: skip
    added = [op_types(gradient_model(model, ["p"]))[len(model.graph.node) :] for model in (plain, longer)]
    assert added[0] == added[1]


def test_an_op_without_a_rule_is_named() -> None:
    with pytest.raises(NoGradientError, match="Floor node 'down'") as caught:
        gradient_model(loss_model("[down] y = Floor (p)", {"p": "3"}), ["p"])
    assert (caught.value.op, caught.value.node) == ("Floor", "down")
    assert isinstance(caught.value, ModelError)
    assert caught.value.hint


UNCOVERED = {
    'Conv <auto_pad="SAME_UPPER"> (h, w)': "auto_pad",
    "AveragePool <kernel_shape=[2,2], ceil_mode=1> (h)": "ceil_mode",
    'Pad <mode="reflect"> (h, by)': "reflect",
    'Resize <mode="cubic"> (h, , scales)': "cubic",
    "MatMul (h, v)": "vector",
    "ReduceLogSum (h)": "ReduceLogSum",
}


@pytest.mark.parametrize("op", UNCOVERED)
def test_a_setting_without_a_rule_is_named(op: str) -> None:
    stored = {"w": normal(2, 2, 3, 3), "by": ints(0, 0, 1, 1, 0, 0, 1, 1), "v": normal(6),
              "scales": np.array([1, 1, 2, 2], np.float32)}  # fmt: skip
    model = loss_model(f"h = Mul (x, p) [odd] y = {op}", {"x": "N,2,6,6", "p": "2,6,6"}, **stored)
    with pytest.raises(NoGradientError, match="'odd'") as caught:
        gradient_model(model, ["p"])
    assert UNCOVERED[op] in caught.value.message


def test_a_parameter_must_be_an_input_of_fixed_shape() -> None:
    model = loss_model("y = Mul (x, p)", {"x": "N,4", "p": "4"})
    for name in ("x", "h"):
        with pytest.raises(ModelError, match=f"'{name}'"):
            gradient_model(model, [name])
