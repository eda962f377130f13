"""Gradients of convolutions, matrix products, pools and normalizations against finite differences."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from gradient_check import check, feed_for, loss_model
from hypothesis import given, settings
from hypothesis import strategies as st

from models import BUILDERS, norm_of, normal, op_types, run
from onnxcalib.autodiff.interface import NoGradientError
from onnxcalib.autodiff.standard.gradient_model import gradient_model

# Input, weight and settings.
CONVS = {
    "line": ("2,8", "5,2,3", "group=1"),
    "line, strides and pads": ("2,9", "5,2,3", "strides=[2], pads=[2,1]"),
    "line, depthwise": ("4,9", "4,1,3", "group=4, pads=[1,1]"),
    "plain": ("3,7,6", "4,3,3,3", "group=1"),
    "pads": ("3,7,6", "4,3,3,3", "pads=[1,1,1,1]"),
    "uneven pads": ("3,7,6", "4,3,3,2", "pads=[0,1,2,1]"),
    "pads beyond the kernel": ("3,4,4", "4,3,2,2", "pads=[2,2,2,2]"),
    "strides": ("3,7,7", "4,3,3,3", "strides=[2,2], pads=[1,1,1,1]"),
    "strides with a remainder": ("3,8,9", "4,3,3,3", "strides=[2,3], pads=[1,1,1,1]"),
    "strides beyond the kernel": ("3,8,8", "4,3,1,1", "strides=[2,2]"),
    "dilations": ("3,9,9", "4,3,3,3", "dilations=[2,3], pads=[2,3,2,3]"),
    "dilations and strides": ("3,9,9", "4,3,3,2", "dilations=[2,3], strides=[3,2], pads=[1,0,2,1]"),
    "many positions": ("3,12,12", "4,3,3,3", "pads=[1,1,1,1]"),
    "many positions and channels": ("40,11,11", "3,40,2,2", "strides=[1,1], pads=[1,0,0,1]"),
    "many positions, strides": ("3,23,22", "4,3,3,3", "strides=[2,2], pads=[1,1,1,1]"),
    "one by one": ("6,5,5", "4,6,1,1", "group=1"),
    "one by one, many positions": ("6,11,11", "4,6,1,1", "group=1"),
    "groups": ("6,6,6", "4,3,3,3", "group=2, pads=[1,1,1,1]"),
    "groups, strides": ("6,7,6", "9,2,3,3", "group=3, strides=[2,2], pads=[1,0,1,1]"),
    "depthwise": ("5,6,7", "5,1,3,3", "group=5, pads=[1,1,1,1]"),
    "depthwise, strides": ("5,8,7", "5,1,3,3", "group=5, strides=[2,2], pads=[1,1,1,1]"),
    "depthwise, all settings": ("4,9,8", "4,1,3,2", "group=4, strides=[2,3], dilations=[2,3], pads=[1,0,2,3]"),
    "depthwise, five": ("3,8,8", "3,1,5,5", "group=3, pads=[2,2,2,2]"),
    "depthwise, wide": ("2,3,130", "2,1,3,3", "group=2, pads=[1,1,1,1]"),
    "depth multiplier": ("3,6,6", "6,1,3,3", "group=3, pads=[1,1,1,1]"),
    "volume": ("2,5,4,5", "3,2,3,2,3", "pads=[1,0,1,1,1,1]"),
    "volume, strides": ("2,5,4,6", "3,2,2,2,3", "strides=[2,1,2], pads=[1,0,1,1,1,1]"),
    "volume, groups": ("4,4,4,3", "4,2,2,2,2", "group=2"),
    "volume, depthwise": ("2,4,4,3", "2,1,2,2,2", "group=2"),
    "valid": ("3,7,6", "4,3,3,3", 'auto_pad="VALID"'),
}


@pytest.mark.parametrize("case", CONVS)
def test_conv(case: str) -> None:
    x, w, attributes = CONVS[case]
    body = f"h = Mul (x, p) y = Conv <{attributes}> (h, w, b)"
    check(loss_model(body, {"x": f"N,{x}", "p": x, "w": w, "b": w.split(",")[0]}), ["p", "w", "b"])


def test_conv_without_bias_and_on_free_sizes() -> None:
    free = {"x": "N,3,H,W", "p": "3,1,1", "w": "4,3,3,3"}
    feed = {"x": normal(2, 3, 12, 10), "p": normal(3, 1, 1, seed=1), "w": normal(4, 3, 3, 3, seed=2)}
    body = "h = Mul (x, p) y = Conv <pads=[1,1,1,1]> (h, w)"
    check(loss_model(body, free), ["p", "w"], feed)
    with pytest.raises(NoGradientError, match="must be fixed"):
        gradient_model(loss_model("h = Mul (x, p) y = Conv <strides=[2,2]> (h, w)", free), ["p"])


@st.composite
def convolutions(draw: st.DrawFn) -> tuple[str, str, str]:
    """A convolution of one to three axes whose windows fit."""
    axes, group = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    inputs, outputs = draw(st.integers(1, 3)), group * draw(st.integers(1, 2))
    sizes, kernel, strides, dilations = [], [], [], []
    begins, ends = [], []
    for _ in range(axes):
        kernel.append(draw(st.integers(1, 3)))
        strides.append(draw(st.integers(1, 3)))
        dilations.append(draw(st.integers(1, 2)))
        begins.append(draw(st.integers(0, 2)))
        ends.append(draw(st.integers(0, 2)))
        sizes.append((kernel[-1] - 1) * dilations[-1] + 1 + draw(st.integers(0, 4)))
    x, w = [group * inputs, *sizes], [outputs, inputs, *kernel]
    attributes = f"group={group}, strides={strides}, dilations={dilations}, pads={begins + ends}"
    return *(",".join(map(str, dims)) for dims in (x, w)), attributes  # type: ignore[return-value]


@given(convolutions())
@settings(max_examples=60)
def test_any_conv(case: tuple[str, str, str]) -> None:
    x, w, attributes = case
    check(loss_model(f"h = Mul (x, p) y = Conv <{attributes}> (h, w)", {"x": f"N,{x}", "p": x, "w": w}), ["p", "w"])


TRANSPOSED = {
    "plain": ("3,4,4", "3,4,3,3", "group=1"),
    "strides": ("3,4,4", "3,4,3,3", "strides=[2,2], pads=[1,1,1,1], output_padding=[1,1]"),
    "uneven": ("3,4,5", "3,4,2,3", "strides=[3,2], pads=[1,0,0,1], output_padding=[2,0]"),
    "groups": ("4,4,4", "4,3,2,2", "group=2, strides=[2,2]"),
    "depthwise": ("4,4,4", "4,1,2,2", "group=4, strides=[2,2]"),
    "dilations": ("2,4,4", "2,2,2,2", "dilations=[2,2], pads=[1,1,1,1]"),
    "line": ("2,6", "2,3,4", "strides=[2], pads=[1,1]"),
    "volume": ("2,3,3,3", "2,2,2,2,2", "strides=[2,2,2]"),
}


@pytest.mark.parametrize("case", TRANSPOSED)
def test_conv_transpose(case: str) -> None:
    x, w, attributes = TRANSPOSED[case]
    group = int(attributes.split("group=")[1][0]) if "group=" in attributes else 1
    inputs = {"x": f"N,{x}", "p": x, "w": w, "b": str(int(w.split(",")[1]) * group)}
    check(loss_model(f"h = Mul (x, p) y = ConvTranspose <{attributes}> (h, w, b)", inputs), ["p", "w", "b"])


@pytest.mark.parametrize("transposed", [(0, 0), (0, 1), (1, 0), (1, 1)])
@pytest.mark.parametrize("bias", ["5", "3,1", "1,5", "3,5", "", None])
def test_gemm(transposed: tuple[int, int], bias: str | None) -> None:
    inputs = {"a": "4,3" if transposed[0] else "3,4", "b": "5,4" if transposed[1] else "4,5"}
    head = f"Gemm <transA={transposed[0]}, transB={transposed[1]}, alpha=0.7, beta=1.3>"
    if bias is None:
        check(loss_model(f"y = {head} (a, b)", inputs), ["a", "b"])
        return
    feed = {name: normal(*map(int, shape.split(",")), seed=len(name)) for name, shape in inputs.items()}
    feed["c"] = np.asarray(normal(*(int(dim) for dim in bias.split(",") if dim)))
    check(loss_model(f"y = {head} (a, b, c)", inputs | {"c": bias}), ["a", "b", "c"], feed)


MATMULS = [("N,4,6", "6,5"), ("4,6", "6,5"), ("N,2,4,6", "6,5"), ("N,4,6", "1,6,5"), ("2,1,4,6", "3,6,5"),
           ("4,6", "2,6,5"), ("N,2,4,6", "N,2,6,5"), ("2,4,6", "2,6,5")]  # fmt: skip


@pytest.mark.parametrize(("a", "b"), MATMULS)
def test_matmul(a: str, b: str) -> None:
    scales = {"p": a.removeprefix("N,"), "q": b.removeprefix("N,")}
    model = loss_model("g = Mul (a, p) h = Mul (b, q) y = MatMul (g, h)", {"a": a, "b": b, **scales})
    check(model, ["p", "q"])


@given(st.lists(st.tuples(st.sampled_from([1, 2]), st.sampled_from([1, 2])), max_size=2), st.integers(0, 2),
       st.lists(st.integers(1, 4), min_size=3, max_size=3))  # fmt: skip
@settings(max_examples=40)
def test_any_matmul(batch: list[tuple[int, int]], dropped: int, sizes: list[int]) -> None:
    a = [*(pair[0] for pair in batch), sizes[0], sizes[1]]
    b = [*[pair[1] for pair in batch][dropped:], sizes[1], sizes[2]]
    shapes = (",".join(map(str, dims)) for dims in (a, b))
    check(loss_model("y = MatMul (a, b)", dict(zip("ab", shapes, strict=True))), ["a", "b"])


def test_a_matmul_with_a_weight_is_one_product() -> None:
    result = check(loss_model("y = MatMul (x, w)", {"x": "N,7,6", "w": "6,5"}), ["w"])
    assert op_types(result).count("MatMul") == 2
    assert "ReduceSum" not in op_types(result)


POOLS = [
    "MaxPool <kernel_shape=[2,2], strides=[2,2]>",
    "MaxPool <kernel_shape=[3,3], strides=[2,2], pads=[1,1,1,1]>",
    "MaxPool <kernel_shape=[3,2], pads=[1,0,0,1]>",
    "MaxPool <kernel_shape=[2,2], strides=[2,3], ceil_mode=1>",
    "MaxPool <kernel_shape=[2,2], dilations=[2,2]>",
    "AveragePool <kernel_shape=[2,2], strides=[2,2]>",
    "AveragePool <kernel_shape=[3,3], strides=[2,2], pads=[1,1,1,1]>",
    "AveragePool <kernel_shape=[3,3], strides=[2,2], pads=[1,1,1,1], count_include_pad=1>",
    "AveragePool <kernel_shape=[3,2], strides=[1,3], pads=[1,0,2,1]>",
    "GlobalAveragePool",
    "GlobalMaxPool",
]


@pytest.mark.parametrize("pool", POOLS)
def test_pools(pool: str) -> None:
    check(loss_model(f"h = Mul (x, p) y = {pool} (h)", {"x": "N,3,7,8", "p": "3,7,8"}), ["p"])


def test_pools_of_lines_and_volumes() -> None:
    for kind in ("Max", "Average"):
        line = f"h = Mul (x, p) y = {kind}Pool <kernel_shape=[3], strides=[2], pads=[1,1]> (h)"
        check(loss_model(line, {"x": "N,3,8", "p": "3,8"}), ["p"])
        volume = f"h = Mul (x, p) y = {kind}Pool <kernel_shape=[2,2,2], strides=[1,2,1]> (h)"
        check(loss_model(volume, {"x": "N,2,3,4,3", "p": "2,3,4,3"}), ["p"])


def test_the_first_of_equal_values_gets_a_pools_gradient() -> None:
    model = loss_model("y = MaxPool <kernel_shape=[2], strides=[2]> (p)", {"p": "1,1,4"})
    found = run(gradient_model(model, ["p"]), {"p": np.array([[[2, 2, 1, 3]]], np.float32)})["p:gradient"]
    np.testing.assert_allclose(found, [[[2.5, 0, 0, 3.5]]])


def test_batch_normalization() -> None:
    stored = norm_of("n", 4)
    model = loss_model("h = Mul (x, p) y = BatchNormalization (h, s, b, n_mean, n_var)",
                       {"x": "N,4,3,3", "p": "4,3,3", "s": "4", "b": "4"},
                       15, n_mean=stored["n_mean"], n_var=stored["n_var"])  # fmt: skip
    check(model, ["p", "s", "b"])


@pytest.mark.parametrize(("axis", "shape"), [(-1, "5"), (2, "5"), (1, "4,5"), (-2, "4,5")])
def test_layer_normalization(axis: int, shape: str) -> None:
    model = loss_model(f"h = Mul (x, p) y = LayerNormalization <axis={axis}> (h, s, b)",
                       {"x": "N,4,5", "p": "4,5", "s": shape, "b": shape}, 17)  # fmt: skip
    check(model, ["p", "s", "b"])


def test_layer_normalization_without_bias() -> None:
    check(loss_model("h = Mul (x, p) y = LayerNormalization (h, s)", {"x": "N,6", "p": "6", "s": "6"}, 17), ["p", "s"])


@pytest.mark.parametrize("opset", [13, 18])
def test_instance_normalization(opset: int) -> None:
    model = loss_model("h = Mul (x, p) y = InstanceNormalization (h, s, b)",
                       {"x": "N,4,3,5", "p": "4,3,5", "s": "4", "b": "4"}, opset)  # fmt: skip
    check(model, ["p", "s", "b"])


@pytest.mark.parametrize("name", BUILDERS)
def test_whole_models(name: str) -> None:
    """All weights are parameters, statistics of batch norms are not."""
    model = BUILDERS[name]()
    model.opset_import[0].version = 15  # the reference takes older batch norms for ones in training
    moved = [
        tensor for tensor in model.graph.initializer if tensor.dims and not tensor.name.endswith(("_mean", "_var"))
    ]
    feed = feed_for(model, 2)
    for tensor in moved:
        value = onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
        model.graph.input.append(value)
        feed[tensor.name] = onnx.numpy_helper.to_array(tensor)
        model.graph.initializer.remove(tensor)
    model.graph.node.append(onnx.helper.make_node("Mul", ["y", "y"], ["square"]))
    model.graph.node.append(onnx.helper.make_node("ReduceMean", ["square"], ["loss"], keepdims=0))
    model.graph.output.insert(0, onnx.helper.make_tensor_value_info("loss", onnx.TensorProto.FLOAT, []))
    check(model, [tensor.name for tensor in moved], feed)
