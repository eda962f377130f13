"""Gradients through ONNX Runtime training against finite differences in float64 and closed forms."""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import onnx
import pytest
from gradient_check import doubled
from onnx.reference import ReferenceEvaluator
from said import refused

from models import HAS_TRAINING, Arrays, build, normal, run, session_of
from onnxcalib.autodiff.interface import NoGradientError, gradient_name
from onnxcalib.autodiff.training.gradient_model import gradient_model
from onnxcalib.errors import ModelError

pytestmark = pytest.mark.skipif(not HAS_TRAINING, reason="needs onnxruntime-training-cpu")

IMAGE = (2, 4, 5, 5)
CHANNELS = {"g": (4,), "b": (4,), "m": (4,), "v": (4,)}
POSITIVE = {"v", "p"}


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def declared(name: str, shape: Sequence[int]) -> str:
    return f"float[{','.join(map(str, shape))}] {name}" if shape else f"float {name}"


def loss_of(expression: str, shapes: dict[str, tuple[int, ...]], opset: int, **stored: np.ndarray) -> onnx.ModelProto:
    """A loss that weighs every value of the expression differently."""
    inputs = ", ".join(declared(name, shape) for name, shape in shapes.items())
    body = expression if " = " in expression else f"y = {expression}"
    text = f"""net ({inputs}) => (float loss) {{
        {body}
        turned = Cos (y)
        mixed = Mul (turned, y)
        loss = ReduceSum <keepdims=0> (mixed)
    }}"""
    return build(text, opset=opset, ir=10, **stored)


def values_for(shapes: dict[str, tuple[int, ...]]) -> Arrays:
    """Values that are all different, so that no two tie."""
    rng = np.random.default_rng(3)
    feed = {}
    for name, shape in shapes.items():
        size = math.prod(shape)
        spread = rng.permutation((np.arange(size) + 0.37) / size * 4 - 2).reshape(shape)
        feed[name] = (np.abs(spread) + 0.5 if name in POSITIVE else spread).astype(np.float32)
    return feed


def differences(model: onnx.ModelProto, parameters: Sequence[str], feed: Arrays, step: float = 1e-5) -> Arrays:
    """Central differences of the loss in float64."""
    evaluator = ReferenceEvaluator(doubled(model))
    point = {name: value.astype(np.float64) for name, value in feed.items()}
    found = {}
    for name in parameters:
        slopes = np.zeros_like(point[name])
        for place in np.ndindex(slopes.shape):
            kept, losses = point[name][place], []
            for move in (step, -step):
                point[name][place] = kept + move
                losses.append(float(evaluator.run(["loss"], point)[0]))
            point[name][place] = kept
            slopes[place] = (losses[0] - losses[1]) / (2 * step)
        found[name] = slopes
    return found


def assert_right(
    model: onnx.ModelProto, parameters: Sequence[str], feed: Arrays, reference: onnx.ModelProto | None = None
) -> None:
    outputs = run(gradient_model(model, parameters), feed)
    np.testing.assert_allclose(outputs["loss"], run(model, feed)["loss"], rtol=1e-5)
    for name, wanted in differences(reference or model, parameters, feed).items():
        got = outputs[gradient_name(name)]
        assert got.shape == wanted.shape
        np.testing.assert_allclose(got, wanted, rtol=0, atol=2e-5 * max(np.abs(wanted).max(), 1e-3), err_msg=name)


# What stands for y, the shapes of inputs, and constants; every input but k, m and v is a parameter.
Case = tuple[str, dict[str, tuple[int, ...]], dict[str, np.ndarray]]

PLAIN: dict[str, Case] = {
    **{
        op: (f"{op} (x)", {"x": (2, 12)}, {})
        for op in ("Abs", "Exp", "LeakyRelu", "Neg", "Relu", "Sigmoid", "Sin", "Softmax", "LogSoftmax", "Tanh")
    },
    **{op: (f"{op} (p)", {"p": (12,)}, {}) for op in ("Log", "Reciprocal", "Sqrt")},
    **{
        f"{op} broadcast {side}": (f"{op} ({side})", {"x": (2, 3, 4), "p": (3, 1)}, {})
        for op in ("Add", "Sub", "Mul", "Max", "Min")
        for side in ("x, p", "p, x")
    },
    "Div": ("Div (x, p)", {"x": (2, 3, 4), "p": (3, 1)}, {}),
    "Clip": ("Clip (x, low, high)", {"x": (24,)}, {"low": np.float32(-0.5), "high": np.float32(0.7)}),
    "Cast": ("Cast <to=1> (x)", {"x": (6,)}, {}),
    "MatMul": ("MatMul (x, w)", {"x": (2, 3, 4), "w": (4, 5)}, {}),
    "MatMul of batches": ("MatMul (x, w)", {"x": (2, 1, 3, 4), "w": (2, 4, 5)}, {}),
    "Gemm": ("Gemm <transB=1, alpha=0.5> (x, w, b)", {"x": (3, 4), "w": (5, 4), "b": (5,)}, {}),
    "Conv": ("Conv <pads=[1,1,1,1]> (x, w, b)", {"x": (1, 2, 4, 4), "w": (3, 2, 3, 3), "b": (3,)}, {}),
    "Conv strides": ("Conv <strides=[2,2]> (x, w)", {"x": (1, 2, 5, 5), "w": (3, 2, 3, 3)}, {}),
    "Conv dilations": ("Conv <dilations=[2,2]> (x, w)", {"x": (1, 2, 5, 5), "w": (2, 2, 2, 2)}, {}),
    "Conv groups": ("Conv <group=2> (x, w)", {"x": (1, 4, 4, 4), "w": (4, 2, 3, 3)}, {}),
    "Conv depthwise": ("Conv <group=4> (x, w)", {"x": (1, 4, 4, 4), "w": (4, 1, 3, 3)}, {}),
    "Conv of a line": ("Conv <pads=[1,1]> (x, w)", {"x": (1, 2, 6), "w": (3, 2, 3)}, {}),
    "Conv of a line, groups": ("Conv <group=2, kernel_shape=[3], strides=[2], dilations=[2], pads=[1,2]> (x, w, b)",
        {"x": (2, 4, 9), "w": (6, 2, 3), "b": (6,)}, {}),
    "Conv of a line, depthwise": ("Conv <group=4> (x, w)", {"x": (2, 4, 6), "w": (4, 1, 2)}, {}),
    "Conv of a line, depthwise, padded": ("Conv <group=4, auto_pad=\"SAME_UPPER\"> (x, w)",
        {"x": (2, 4, 6), "w": (4, 1, 2)}, {}),
    "Conv of a volume": ("Conv (x, w)", {"x": (1, 2, 3, 3, 3), "w": (2, 2, 2, 2, 2)}, {}),
    "MaxPool": ("MaxPool <kernel_shape=[3,3], strides=[2,2], pads=[1,1,1,1]> (x)", {"x": IMAGE}, {}),
    "AveragePool": ("AveragePool <kernel_shape=[3,3], strides=[2,2], pads=[1,1,1,1]> (x)", {"x": IMAGE}, {}),
    "GlobalAveragePool": ("GlobalAveragePool (x)", {"x": IMAGE}, {}),
    "ReduceMean": ("ReduceMean <axes=[1,-1], keepdims=0> (x)", {"x": IMAGE}, {}),
    "ReduceSum": ("ReduceSum <keepdims=0> (x, axes)", {"x": IMAGE}, {"axes": ints(1, 3)}),
    "Reshape": ("Reshape (x, shape)", {"x": IMAGE}, {"shape": ints(2, -1)}),
    "Flatten": ("Flatten (x)", {"x": IMAGE}, {}),
    "Transpose": ("Transpose <perm=[0,2,3,1]> (x)", {"x": IMAGE}, {}),
    "Squeeze": ("Squeeze (x, axes)", {"x": (2, 4, 1, 1)}, {"axes": ints(2, 3)}),
    "Unsqueeze": ("Unsqueeze (x, axes)", {"x": (2, 4)}, {"axes": ints(0, 3)}),
    "Expand": ("Expand (x, shape)", {"x": (4, 1)}, {"shape": ints(2, 4, 3)}),
    "Tile": ("Tile (x, repeats)", {"x": (2, 3)}, {"repeats": ints(2, 3)}),
    "Pad": ("Pad (x, pads)", {"x": (2, 3)}, {"pads": ints(0, 1, 1, 2)}),
    "Slice": ("Slice (x, start, end, axes, steps)", {"x": (3, 6)},
              {"start": ints(1, 0), "end": ints(3, 5), "axes": ints(0, 1), "steps": ints(1, 3)}),
    "Gather": ("Gather <axis=1> (x, places)", {"x": (2, 4)}, {"places": ints(0, 2, 2, -1)}),
    "GatherElements": ("GatherElements <axis=1> (x, places)", {"x": (2, 4)}, {"places": np.array([[0, 2], [1, 1]])}),
    "GatherND": ("GatherND (x, places)", {"x": (2, 4)}, {"places": np.array([[0, 2], [1, 1]])}),
}  # fmt: skip

REWRITTEN: dict[str, Case] = {
    "a Conv padded above": ("Conv <auto_pad=\"SAME_UPPER\", strides=[2,2]> (x, w)",
                            {"x": (1, 2, 6, 6), "w": (2, 2, 3, 3)}, {}),
    "a Conv padded below": ("Conv <auto_pad=\"SAME_LOWER\", strides=[2,2]> (x, w)",
                            {"x": (1, 2, 6, 6), "w": (2, 2, 3, 3)}, {}),
    "a Conv not padded": ("Conv <auto_pad=\"VALID\"> (x, w)", {"x": (1, 2, 5, 5), "w": (2, 2, 3, 3)}, {}),
    "an AveragePool padded above": ("AveragePool <auto_pad=\"SAME_UPPER\", kernel_shape=[3,3], strides=[2,2]> (x)",
                                    {"x": (1, 2, 6, 6)}, {}),
    "a MaxPool padded above": ("MaxPool <auto_pad=\"SAME_UPPER\", kernel_shape=[2,2], strides=[2,2]> (x)",
                               {"x": (1, 2, 5, 5)}, {}),
    "BatchNormalization": ("BatchNormalization (x, g, b, m, v)", {"x": (2, 4, 3, 3), **CHANNELS}, {}),
    "BatchNormalization of rows": ("BatchNormalization (x, g, b, m, v)", {"x": (3, 4), **CHANNELS}, {}),
    "InstanceNormalization": ("InstanceNormalization (x, g, b)", {"x": (2, 4, 3, 3), "g": (4,), "b": (4,)}, {}),
    "LayerNormalization": ("LayerNormalization (x, g, b)", {"x": (2, 3, 4), "g": (4,), "b": (4,)}, {}),
    "LayerNormalization without a bias": ("LayerNormalization (x, g)", {"x": (2, 3, 4), "g": (4,)}, {}),
    "HardSwish": ("HardSwish (x)", {"x": (24,)}, {}),
    "HardSigmoid": ("HardSigmoid <alpha=0.4> (x)", {"x": (24,)}, {}),
    "PRelu": ("PRelu (x, g)", {"x": (2, 4, 3), "g": (4, 1)}, {}),
    "Elu": ("Elu <alpha=0.7> (x)", {"x": (24,)}, {}),
    "Softplus": ("Softplus (x)", {"x": (24,)}, {}),
    "Sum": ("Sum (x, g, b)", {"x": (2, 4, 3), "g": (4, 1), "b": (3,)}, {}),
    "Sum of one": ("Sum (x)", {"x": (4,)}, {}),
    "Mean": ("Mean (x, g, b)", {"x": (2, 4, 3), "g": (4, 1), "b": (3,)}, {}),
    "ReduceMax": ("ReduceMax <axes=[1,-1], keepdims=0> (x)", {"x": (2, 4, 3, 3)}, {}),
    "ReduceMin of all": ("ReduceMin (x)", {"x": (2, 4, 3, 3)}, {}),
    "GlobalMaxPool": ("GlobalMaxPool (x)", {"x": (2, 4, 3, 3)}, {}),
    "Dropout": ("Dropout (x)", {"x": (6,)}, {}),
    "Where with a broadcast value": ("Where (which, x, g)", {"x": (2, 3), "g": (3,)},
                                     {"which": np.array([[True], [False]])}),
    "Pow by an integer": ("Pow (x, two)", {"x": (6,)}, {"two": ints(2)}),
    "Pow by a matrix": ("Pow (p, powers)", {"p": (3,)}, {"powers": np.full((2, 3), 1.5, np.float32)}),
    "an input read twice": ("Concat <axis=0> (x, x)", {"x": (3, 2)}, {}),
    "a product with itself": ("MatMul (x, x)", {"x": (3, 3)}, {}),
    "Split with an unused part": ("a, y = Split <axis=1> (x)", {"x": (2, 4)}, {}),
    "Split in given sizes": ("a, y, c = Split <axis=-1> (x, sizes)", {"x": (2, 6)}, {"sizes": ints(1, 2, 3)}),
    "Split with all parts": ("a, c = Split <axis=1> (x)\n y = Mul (a, c)", {"x": (2, 4)}, {}),
    "a gate that is not differentiable": ("c = Greater (x, zero)\n d = Cast <to=1> (c)\n y = Mul (d, x)",
                                          {"x": (6,)}, {"zero": np.float32(0)}),
}  # fmt: skip


def check_case(case: Case, opset: int = 17) -> None:
    expression, shapes, stored = case
    model = loss_of(expression, shapes, opset, **stored)
    assert_right(model, [name for name in shapes if name not in ("k", "m", "v")], values_for(shapes))


@pytest.mark.parametrize("name", PLAIN)
def test_a_plain_op_has_the_right_gradient(name: str) -> None:
    check_case(PLAIN[name])


@pytest.mark.parametrize("name", REWRITTEN)
def test_a_rewritten_op_has_the_right_gradient(name: str) -> None:
    check_case(REWRITTEN[name])


@pytest.mark.parametrize("opset", [13, 21])
@pytest.mark.parametrize(
    "name", ["Clip", "Conv", "Gemm", "MatMul", "MaxPool", "Softmax", "Add broadcast x, p", "Slice", "Expand", "Pad"]
)
def test_plain_ops_are_right_at_the_ends_of_the_opset_range(name: str, opset: int) -> None:
    check_case(PLAIN[name], opset)


@pytest.mark.parametrize("opset", [13, 21])
@pytest.mark.parametrize(
    "name", ["InstanceNormalization", "PRelu", "Elu", "Sum", "GlobalMaxPool", "a Conv padded above", "Softplus"]
)
def test_rewrites_are_right_at_the_ends_of_the_opset_range(name: str, opset: int) -> None:
    check_case(REWRITTEN[name], opset)


def test_ops_that_came_or_changed_with_later_opsets() -> None:
    check_case(("Mish (x)", {"x": (12,)}, {}), 18)
    check_case(('Gelu <approximate="tanh"> (x)', {"x": (12,)}, {}), 20)
    check_case(("ReduceMax <keepdims=0> (x, axes)", {"x": (2, 3, 4)}, {"axes": ints(0, 2)}), 18)
    check_case(("ReduceMean (x, axes)", {"x": (2, 3, 4)}, {"axes": ints(0, 2)}), 18)
    check_case(("a, y, c = Split <axis=0, num_outputs=3> (x)", {"x": (8,)}, {}), 18)
    scale = {"x": (2, 4, 3), "g": (2,), "b": (2,)}
    check_case(("GroupNormalization <num_groups=2> (x, g, b)", scale, {}), 18)
    check_case(("GroupNormalization <num_groups=2, stash_type=11> (x, g, b)", {**scale, "g": (4,), "b": (4,)}, {}), 21)


def test_batch_norm_of_the_oldest_opset() -> None:
    shapes = {"x": (2, 4, 3, 3), **CHANNELS}
    older, newer = (loss_of("BatchNormalization (x, g, b, m, v)", shapes, opset) for opset in (13, 15))
    assert_right(older, ["x", "g", "b"], values_for(shapes), reference=newer)


def test_a_max_pool_padded_below() -> None:
    shapes = {"x": (1, 2, 5, 5)}
    automatic = loss_of('MaxPool <auto_pad="SAME_LOWER", kernel_shape=[2,2], strides=[2,2]> (x)', shapes, 17)
    explicit = loss_of("MaxPool <pads=[1,1,0,0], kernel_shape=[2,2], strides=[2,2]> (x)", shapes, 17)
    assert_right(automatic, ["x"], values_for(shapes), reference=explicit)


def test_gelu_and_erf_follow_their_closed_forms() -> None:
    x = normal(200)
    for expression, slope in (
        ("Erf (x)", 2 / np.sqrt(np.pi) * np.exp(-(x.astype(np.float64) ** 2))),
        ("Gelu (x)", [0.5 * (1 + math.erf(v / 2**0.5)) + v * math.exp(-v * v / 2) / (2 * math.pi) ** 0.5 for v in x]),
    ):
        text = f"net (float[200] x) => (float loss) {{ y = {expression}\n loss = ReduceSum <keepdims=0> (y) }}"
        found = run(gradient_model(build(text, opset=20, ir=10), ["x"]), {"x": x})["x:gradient"]
        np.testing.assert_allclose(found, slope, atol=1e-6)


def test_the_slope_of_softplus_at_zero() -> None:
    text = "net (float[1] x) => (float loss) { y = Softplus (x)\n loss = ReduceSum <keepdims=0> (y) }"
    assert run(gradient_model(build(text), ["x"]), {"x": np.zeros(1, np.float32)})["x:gradient"] == 0.5


def test_equal_maxima_share_the_gradient() -> None:
    text = "net (float[4] x) => (float loss) { loss = ReduceMax <keepdims=0> (x) }"
    found = run(gradient_model(build(text), ["x"]), {"x": np.array([1, 3, 3, 2], np.float32)})
    assert found["x:gradient"].tolist() == [0, 0.5, 0.5, 0]
    assert found["loss"] == 3


def test_the_interface_of_the_gradient_model() -> None:
    text = """net (float[N,3] x, float[2,3] w, float[2] unused) => (float loss, float[N,2] y) {
        y = Gemm <transB=1> (x, w)
        loss = ReduceMean <keepdims=0> (y)
    }"""
    model = build(text, ir=11)
    before = model.SerializeToString()
    made = gradient_model(model, ["unused", "w"])
    assert model.SerializeToString() == before
    assert [value.name for value in made.graph.input] == ["x", "w", "unused"]
    assert [value.name for value in made.graph.output] == ["loss", "y", "unused:gradient", "w:gradient"]
    found = run(made, {"x": normal(4, 3), "w": normal(2, 3), "unused": np.ones(2, np.float32)})
    assert found["unused:gradient"].tolist() == [0, 0]
    np.testing.assert_allclose(found["w:gradient"], np.tile(normal(4, 3).mean(axis=0) / 2, (2, 1)), rtol=1e-5)


UNSUPPORTED: dict[str, tuple[str, int]] = {
    "Floor": ("Floor (x)", 17),
    "Ceil": ("Ceil (x)", 17),
    "Sign": ("Sign (x)", 17),
    "Softsign": ("Softsign (x)", 17),
    "CumSum": ("CumSum (x, one)", 17),
    "Einsum": ('Einsum <equation="nchw->nc"> (x)', 17),
    "DepthToSpace": ("DepthToSpace <blocksize=2> (x)", 17),
    "SpaceToDepth": ("SpaceToDepth <blocksize=2> (x)", 17),
    "ConvTranspose": ("ConvTranspose (x, w)", 17),
    "Resize": ("Resize (x, , twice)", 17),
    "Pad": ('Pad <mode="reflect"> (x, pads)', 17),
    "Pow": ("Pow (base, x)", 17),
    "Clip": ("c = ReduceMin <keepdims=0> (x)\n y = Clip (base, c)", 17),
    "Slice": ("Slice (x, last, first, axes, back)", 17),
    "AveragePool": ("AveragePool <kernel_shape=[2,2], dilations=[2,2]> (x)", 19),
}


@pytest.mark.parametrize("op", UNSUPPORTED)
def test_an_op_without_a_gradient_is_named(op: str) -> None:
    expression, opset = UNSUPPORTED[op]
    model = loss_of(
        expression, {"x": (1, 4, 4, 4)}, opset,
        one=np.array(1), w=normal(4, 2, 3, 3), twice=np.array([1, 1, 2, 2], np.float32), base=normal(1, 4, 4, 4),
        pads=ints(0, 0, 1, 1, 0, 0, 1, 1), last=ints(-1), first=ints(-9), axes=ints(3), back=ints(-1),
    )  # fmt: skip
    node = next(node for node in model.graph.node if node.op_type == op)
    node.name = "culprit"
    with pytest.raises(NoGradientError, match=f"{op}.*culprit|culprit.*{op}"):
        gradient_model(model, ["x"])


def test_an_op_without_a_gradient_does_no_harm_off_the_path() -> None:
    text = """net (float[N,4] x, float[4] w) => (float loss) {
        f = Floor (x)
        d = Mul (f, w)
        loss = ReduceSum <keepdims=0> (d)
    }"""
    found = run(gradient_model(build(text), ["w"]), {"x": normal(3, 4), "w": normal(4)})
    np.testing.assert_allclose(found["w:gradient"], np.floor(normal(3, 4)).sum(axis=0))


def test_what_cannot_be_is_refused_in_a_sentence() -> None:
    text = "net (float[4] x) => (float loss) { loss = ReduceSum <keepdims=0> (x) }"
    with refused(ModelError, "opset", 13, 21, 22):
        gradient_model(build(text, opset=22, ir=10), ["x"])
    with refused(ModelError, "'w'"):
        gradient_model(build(text), ["w"])
    free = """net (float[N,2,H,H] x, float[3,2,3,3] w) => (float loss) {
        [free] y = Conv <auto_pad="SAME_UPPER"> (x, w)
        loss = ReduceSum <keepdims=0> (y)
    }"""
    with refused(ModelError, "Conv 'free'"):
        gradient_model(build(free), ["w"])


def test_groups_of_a_volume_are_left_to_the_other_engine() -> None:
    model = loss_of("Conv <group=2> (x, w)", {"x": (1, 4, 3, 3, 3), "w": (2, 2, 2, 2, 2)}, 17)
    with pytest.raises(NoGradientError, match="Conv"):
        gradient_model(model, ["x", "w"])
    assert gradient_model(model, ["w"])  # nothing is wrong with that of weights


def test_groups_along_a_line_leave_the_tensors_of_a_run_beside_them_alone() -> None:
    shapes = {"x": (4, 6, 8), "w": (6, 1, 2), "b": (6,)}
    model = gradient_model(loss_of("Conv <group=6> (x, w, b)", shapes, 17), ["x", "w", "b"])
    session, feed = session_of(model), values_for(shapes)
    alone = session.run(None, feed)
    with ThreadPoolExecutor(2) as pool:
        for found in pool.map(lambda _: session.run(None, feed), range(400)):
            assert all(np.array_equal(one, other) for one, other in zip(alone, found, strict=True))
