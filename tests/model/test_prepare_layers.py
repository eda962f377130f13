"""Batch norms, factors and added constants move into the layers before them."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from prepared import prepared

from models import Arrays, build, conv_net, feed_for, initializer, norm_of, normal, op_types, run
from onnxcalib import quantize
from onnxcalib.model.layers import find_layers
from onnxcalib.model.prepare import Model
from onnxcalib.model.quantized import read_quantized

NORMED: dict[str, tuple[str, Arrays]] = {
    "conv": ("Conv (x, w)", {"w": normal(4, 4, 3, 3)}),
    "conv with bias": ("Conv (x, w, b)", {"w": normal(4, 4, 3, 3), "b": normal(4)}),
    "grouped conv": ("Conv <group=2> (x, w)", {"w": normal(4, 2, 3, 3)}),
    "depthwise conv": ("Conv <group=4> (x, w, b)", {"w": normal(4, 1, 3, 3), "b": normal(4)}),
    "transposed": ("ConvTranspose <strides=[2,2]> (x, w, b)", {"w": normal(4, 4, 3, 3), "b": normal(4)}),
    "narrow transposed": ("ConvTranspose (x, w)", {"w": normal(4, 4, 1, 2)}),
    "grouped transposed": ("ConvTranspose <group=2> (x, w, b)", {"w": normal(4, 2, 3, 3), "b": normal(4)}),
    "depthwise transposed": ("ConvTranspose <group=4> (x, w)", {"w": normal(4, 1, 3, 3)}),
}


@pytest.mark.parametrize("kind", NORMED)
def test_batch_norm_joins_a_convolution(kind: str) -> None:
    op, weights = NORMED[kind]
    text = f"""net (float[N,4,6,6] x) => (float[N,4,H,W] y) {{
        [layer] c = {op}
        [norm] y = BatchNormalization <epsilon=0.01> (c, n_gamma, n_beta, n_mean, n_var)
    }}"""
    norm = norm_of("n", 4)
    ready = prepared(build(text, **weights, **norm))
    assert op_types(ready.proto) == [op.split()[0]]
    remembered = ready.batch_norms["layer"]
    np.testing.assert_array_equal(remembered.gamma, norm["n_gamma"])
    np.testing.assert_array_equal(remembered.beta, norm["n_beta"])
    assert remembered.eps == pytest.approx(0.01)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("transposed", [0, 1])
def test_batch_norm_joins_a_gemm(transposed: int, bias: bool) -> None:
    text = f"""net (float[N,3] x) => (float[N,5] y) {{
        [layer] c = Gemm <transB={transposed}> (x, w{", b" if bias else ""})
        y = BatchNormalization (c, n_gamma, n_beta, n_mean, n_var)
    }}"""
    weights = {"w": normal(5, 3) if transposed else normal(3, 5)} | ({"b": normal(5)} if bias else {})
    ready = prepared(build(text, **weights, **norm_of("n", 5)))
    assert op_types(ready.proto) == ["Gemm"]
    assert list(ready.batch_norms) == ["layer"]


def test_batch_norm_joins_a_matmul_of_rows() -> None:
    """As a linear layer without a bias is exported; left apart beside another output, onnxruntime cannot load it."""
    text = """net (float[N,3] x) => (float[N,4] first, float[N,5] y) {
        h = Gemm (x, v)
        first = Identity (h)
        [layer] c = MatMul (h, w)
        y = BatchNormalization (c, n_gamma, n_beta, n_mean, n_var)
    }"""
    model = build(text, v=normal(3, 4), w=normal(4, 5), **norm_of("n", 5))
    model.graph.node.append(onnx.helper.make_node("Relu", ["c"], ["dead"]))  # with it even onnxruntime keeps them apart
    ready = prepared(model)
    assert sorted(op_types(ready.proto)) == ["Gemm", "Gemm", "Identity"]
    assert list(ready.batch_norms) == ["layer"]


def test_a_weight_that_is_computed_from_constants_is_one() -> None:
    text = """net (float[N,3,5,5] x) => (float[N,4,5,5] y) {
        n = ReduceL2 <axes=[1, 2, 3]> (v)
        u = Div (v, n)
        w = Mul (u, g)
        [layer] y = Conv (x, w)
    }"""
    ready = prepared(build(text, v=normal(4, 3, 1, 1), g=normal(4, 1, 1, 1)))
    assert [layer.name for layer in find_layers(ready).layers] == ["layer"]
    assert op_types(ready.proto) == ["Conv"]


def test_arithmetic_that_would_store_more_is_left_to_the_runtime() -> None:
    text = """net (float[N,32] x) => (float[N,32] y) {
        t = Add (row, column)
        y = MatMul (x, t)
    }"""
    ready = prepared(build(text, row=normal(1, 32), column=normal(32, 1)))
    assert "Add" in op_types(ready.proto)


# Biases that add the same to every row of five channels.
ROWS = pytest.mark.parametrize("shape", [(5,), (1, 5), (1,), (1, 1), ()])


def bias_of(ready: Model, name: str) -> np.ndarray:
    layer = find_layers(ready)[name]
    assert layer.bias is not None
    return initializer(ready.proto, layer.bias)


@ROWS
def test_batch_norm_after_a_gemm_with_a_broadcast_bias(shape: tuple[int, ...]) -> None:
    text = """net (float[N,3] x) => (float[N,5] y) {
        [layer] c = Gemm (x, w, b)
        y = BatchNormalization (c, n_gamma, n_beta, n_mean, n_var)
    }"""
    ready = prepared(build(text, w=normal(3, 5), b=normal(*shape), **norm_of("n", 5)))
    assert op_types(ready.proto) == ["Gemm"]
    assert bias_of(ready, "layer").shape == (5,)


@ROWS
@pytest.mark.parametrize("transposed", [0, 1])
def test_the_bias_of_a_gemm_is_one_value_a_channel(transposed: int, shape: tuple[int, ...]) -> None:
    text = f"""net (float[N,3] x) => (float[N,5] y) {{
        [layer_bias] a = Gemm <alpha=0.5, beta=2.0, transB={transposed}> (x, w, b)
        [layer] c = Gemm <transB={transposed}> (x, w, b)
        y = Add (a, c)
    }}"""
    bias = normal(*shape)
    ready = prepared(build(text, w=normal(5, 3) if transposed else normal(3, 5), b=bias))
    np.testing.assert_array_equal(bias_of(ready, "layer"), np.broadcast_to(bias, (1, 5))[0])
    np.testing.assert_array_equal(bias_of(ready, "layer_bias"), 2 * np.broadcast_to(bias, (1, 5))[0])


@pytest.mark.parametrize("shape", [(1,), (1, 1), ()])
def test_a_number_that_gemms_of_different_widths_share(shape: tuple[int, ...]) -> None:
    text = """net (float[N,3] x) => (float[N,1] y) {
        [one] a = Gemm (x, w, b)
        [two] y = Gemm (a, v, b)
    }"""
    ready = prepared(build(text, w=normal(3, 5), v=normal(5, 1), b=np.full(shape, 0.7, np.float32)))
    assert (bias_of(ready, "one").shape, bias_of(ready, "two").shape) == ((5,), (1,))


def test_the_quantized_file_of_a_gemm_with_a_row_for_a_bias() -> None:
    text = "net (float[N,8] x) => (float[N,5] y) { [fc] y = Gemm (x, w, fc_bias) }"
    model = build(text, w=normal(8, 5), fc_bias=10 * normal(1, 5))
    feed = feed_for(model, 64)
    found = quantize(model, feed).model
    assert [layer.bias for layer in read_quantized(found).layers] == ["int32"]
    reference = run(model, feed)["y"]
    assert np.abs(run(found, feed)["y"] - reference).max() < 0.02 * np.abs(reference).max()


def test_batch_norms_that_cannot_be_folded_stay() -> None:
    text = """net (float[N,3,6,6] x) => (float[N,4,4,4] y, float[N,4,4,4] c2) {
        n = BatchNormalization (x, a_gamma, a_beta, a_mean, a_var)
        c1 = Conv (n, w1)
        r = Relu (c1)
        m = BatchNormalization (r, n_gamma, n_beta, n_mean, n_var)
        c2 = Conv (m, w2)
        y = BatchNormalization (c2, n_gamma, n_beta, n_mean, n_var)
    }"""
    ready = prepared(build(text, w1=normal(4, 3, 3, 3), w2=normal(4, 4, 1, 1), **norm_of("a", 3), **norm_of("n", 4)))
    assert op_types(ready.proto).count("BatchNormalization") == 3
    assert not ready.batch_norms


def test_a_weight_that_two_layers_share_is_folded_only_where_a_batch_norm_follows() -> None:
    text = """net (float[N,4,6,6] x) => (float[N,4,6,6] y) {
        [one] c1 = Conv (x, w)
        b1 = BatchNormalization (c1, n_gamma, n_beta, n_mean, n_var)
        [two] c2 = Conv (b1, w)
        b2 = BatchNormalization (c2, m_gamma, m_beta, m_mean, m_var)
        [three] y = Conv (b2, w)
    }"""
    weight = normal(4, 4, 1, 1)
    ready = prepared(build(text, w=weight, **norm_of("n", 4), **norm_of("m", 4, seed=1)))
    layers = find_layers(ready).layers
    assert len({layer.weight for layer in layers}) == 3
    np.testing.assert_array_equal(initializer(ready.proto, layers[2].weight), weight)


@pytest.mark.parametrize("transposed", [0, 1])
@pytest.mark.parametrize(("alpha", "beta"), [(0.5, 1.0), (1.0, 2.0), (-0.25, 0.0), (2.0, 3.0)])
def test_alpha_and_beta_move_into_the_constants(alpha: float, beta: float, transposed: int) -> None:
    text = f"""net (float[N,3] x) => (float[N,5] y) {{
        y = Gemm <alpha={alpha}, beta={beta}, transB={transposed}> (x, w, b)
    }}"""
    ready = prepared(build(text, w=normal(5, 3) if transposed else normal(3, 5), b=normal(5)))
    assert {attribute.name for attribute in ready.proto.graph.node[0].attribute} == {"transB"}
    assert len(find_layers(ready).layers) == 1


def test_alpha_without_a_bias_and_with_a_shared_weight() -> None:
    text = """net (float[N,4] x) => (float[N,4] y) {
        h = Gemm <alpha=0.5> (x, w)
        y = Gemm (h, w)
    }"""
    ready = prepared(build(text, w=normal(4, 4)))
    assert len(find_layers(ready).layers) == 2


@ROWS
@pytest.mark.parametrize("order", ["m, b", "b, m"])
def test_matmul_and_add_of_a_matrix_become_a_gemm(order: str, shape: tuple[int, ...]) -> None:
    text = f"""net (float[N,3] x) => (float[N,5] y) {{
        [dense] m = MatMul (x, w)
        [bias] y = Add ({order})
    }}"""
    ready = prepared(build(text, w=normal(3, 5), b=normal(*shape)))
    assert [(node.name, node.op_type) for node in ready.proto.graph.node] == [("dense", "Gemm")]
    np.testing.assert_array_equal(bias_of(ready, "dense"), np.broadcast_to(normal(*shape), (1, 5))[0])


@pytest.mark.parametrize("shape", [(5,), (1, 5), (1, 1, 5), (1,), (1, 1, 1), ()])
@pytest.mark.parametrize("order", ["m, b", "b, m"])
def test_the_vector_added_to_a_product_of_more_axes_is_its_bias(order: str, shape: tuple[int, ...]) -> None:
    text = f"""net (float[N,2,3] x) => (float[N,2,5] y) {{
        [dense] m = MatMul (x, w)
        [bias] y = Add ({order})
    }}"""
    ready = prepared(build(text, w=normal(3, 5), b=normal(*shape)))
    assert op_types(ready.proto) == ["MatMul", "Add"]
    assert find_layers(ready)["dense"].bias_node == "bias"
    np.testing.assert_array_equal(bias_of(ready, "dense"), np.broadcast_to(normal(*shape), (1, 1, 5)).reshape(-1))


@pytest.mark.parametrize(
    ("sizes", "columns", "shape"),
    [
        ("N,2,3", 5, (2, 5)), ("N,2,3", 5, (2, 1)), ("N,2,3", 5, (1, 1, 1, 5)), ("3", 5, (1, 5)), ("N,3", 5, (4, 5)),
        ("N,3", 5, (1, 1, 5)), ("N,3", 1, (5,)), ("N,2,3", 1, (5,)),
    ],
)  # fmt: skip
def test_what_is_added_otherwise_is_no_bias(sizes: str, columns: int, shape: tuple[int, ...]) -> None:
    """It differs from row to row, or makes the result wider or gives it more axes."""
    rank = max(sizes.count(",") + 1, len(shape))
    text = f"""net (float[{sizes}] x) => (float[{",".join("ABCD"[:rank])}] y) {{
        m = MatMul (x, w)
        y = Add (m, b)
    }}"""
    ready = prepared(build(text, w=normal(3, columns), b=normal(*shape)))
    assert op_types(ready.proto) == ["MatMul", "Add"]
    assert find_layers(ready).layers[0].bias is None


def test_products_of_integers_stay() -> None:
    """No runtime has a Gemm of integers."""
    text = """net (float[N,3] x) => (float[N,5] y) {
        i = Cast <to=6> (x)
        m = MatMul (i, w)
        s = Add (m, b)
        y = Cast <to=1> (s)
    }"""
    ready = prepared(build(text, w=np.ones((3, 5), np.int32), b=np.ones(5, np.int32)))
    assert op_types(ready.proto) == ["Cast", "MatMul", "Add", "Cast"]


@pytest.mark.parametrize(("shapes", "bias"), [(("N,2,3", "N,2,5"), (5,)), (("3", "5"), (5,))])
def test_other_matmuls_stay(shapes: tuple[str, str], bias: tuple[int, ...]) -> None:
    text = f"""net (float[{shapes[0]}] x) => (float[{shapes[1]}] y) {{
        m = MatMul (x, w)
        y = Add (m, b)
    }}"""
    model = build(text, w=normal(3, 5), b=normal(*bias))
    assert op_types(prepared(model).proto) == ["MatMul", "Add"]


def test_a_matmul_that_somebody_else_reads_stays() -> None:
    text = """net (float[N,3] x) => (float[N,5] y, float[N,5] m) {
        m = MatMul (x, w)
        y = Add (m, b)
    }"""
    assert op_types(prepared(build(text, w=normal(3, 5), b=normal(5))).proto) == ["MatMul", "Add"]


@pytest.mark.parametrize(
    ("op", "weight"),
    [
        ("Conv (x, w)", (5, 4, 3, 3)),
        ("Conv <group=2> (x, w)", (5 - 1, 2, 3, 3)),
        ("ConvTranspose (x, w)", (4, 5, 3, 3)),
        ("ConvTranspose <group=2> (x, w)", (4, 3, 3, 3)),
    ],
)
@pytest.mark.parametrize("axes", [0, 1, 3, 4])
def test_an_added_constant_becomes_the_bias(op: str, weight: tuple[int, ...], axes: int) -> None:
    groups = 2 if "group" in op else 1
    channels = weight[1] * groups if "Transpose" in op else weight[0]
    text = f"""net (float[N,4,6,6] x) => (float[N,{channels},H,W] y) {{
        [layer] c = {op}
        y = Add (layer_bias, c)
    }}"""
    shape = {0: (), 1: (1,), 3: (channels, 1, 1), 4: (1, channels, 1, 1)}[axes]
    ready = prepared(build(text, w=normal(*weight), layer_bias=normal(*shape)))
    assert op_types(ready.proto) == [op.split(maxsplit=1)[0]]
    assert bias_of(ready, "layer").shape == (channels,)


@pytest.mark.parametrize("shape", [(4,), (1, 4), (1, 5, 4, 4), (5, 1, 4), (2, 5, 1, 1), (1, 1, 5, 1, 1)])
def test_constants_that_are_no_bias_stay_added(shape: tuple[int, ...]) -> None:
    text = """net (float[2,4,6,6] x) => (float[2,5,4,4] y) {
        c = Conv (x, w)
        y = Add (c, k)
    }"""
    ready = prepared(build(text, w=normal(5, 4, 3, 3), k=np.full(shape, 0.3, np.float32)))
    assert op_types(ready.proto) == ["Conv", "Add"]


def test_bias_add_then_batch_norm() -> None:
    text = """net (float[N,4,6,6] x) => (float[N,5,4,4] y) {
        [layer] c = Conv (x, w)
        a = Add (c, k)
        y = BatchNormalization (a, n_gamma, n_beta, n_mean, n_var)
    }"""
    ready = prepared(build(text, w=normal(5, 4, 3, 3), k=normal(1, 5, 1, 1), **norm_of("n", 5)))
    assert op_types(ready.proto) == ["Conv"]
    assert list(ready.batch_norms) == ["layer"]


def test_remembered_batch_norms_of_a_net() -> None:
    model = conv_net()
    ready = prepared(model)
    assert list(ready.batch_norms) == ["stem", "depth", "project"]
    for place, norm in enumerate(ready.batch_norms.values(), 1):
        np.testing.assert_array_equal(norm.gamma, initializer(model, f"n{place}_gamma"))
        np.testing.assert_array_equal(norm.beta, initializer(model, f"n{place}_beta"))
        assert norm.eps == pytest.approx(1e-5)
