"""Norms, activations, rotary positions and attention, as one op and as exporters spell them."""

import numpy as np
import onnx
import pytest
from onnx import numpy_helper, parser

from onnxcalib.model.attention import find_attention
from onnxcalib.model.patterns import Kind, Norm, find_norms, find_patterns
from onnxcalib.model.prepare import prepare


def prepared(body: str, inputs: str = "float[N,T,8] x", opset: int = 20, **constants: object) -> onnx.GraphProto:
    """The prepared graph of a body that makes y, with constants beside it."""
    text = f'<ir_version: 9, opset_import: ["" : {opset}]> g ({inputs}) => (float[N,T,8] y) {{ {body} }}'
    graph = parser.parse_model(text)
    for name, value in constants.items():
        graph.graph.initializer.append(numpy_helper.from_array(np.asarray(value, np.float32), name))
    return prepare(graph, "test").proto.graph


VECTOR = np.arange(1, 9) / 4
SPELLED_NORMS = {
    "division": (
        "m = ReduceMean<keepdims = 1>(x, a) d = Sub(x, m) s = Mul(d, d) v = ReduceMean<keepdims = 1>(s, a) "
        "e = Add(v, eps) r = Sqrt(e) u = Div(d, r) w = Mul(scale, u) y = Add(w, bias)"
    ),
    "reciprocal": (
        "m = ReduceMean<keepdims = 1>(x, a) d = Sub(x, m) s = Pow(d, two) v = ReduceMean<keepdims = 1>(s, a) "
        "e = Add(eps, v) r = Sqrt(e) i = Reciprocal(r) u = Mul(i, d) w = Mul(u, scale) y = Add(w, bias)"
    ),
    "keras": (
        "m = ReduceMean<keepdims = 1>(x, a) d = Sub(x, m) s = Mul(d, d) v = ReduceMean<keepdims = 1>(s, a) "
        "e = Add(v, eps) r = Sqrt(e) i = Reciprocal(r) f = Mul(i, scale) a1 = Mul(x, f) b1 = Mul(m, f) "
        "c1 = Sub(bias, b1) y = Add(a1, c1)"
    ),
    "op": "y = LayerNormalization(x, scale, bias)",
}


@pytest.mark.parametrize("form", SPELLED_NORMS)
def test_layer_norms_are_found_with_their_constants(form: str) -> None:
    graph = prepared(
        f"a = Constant<value = int64[1] {{-1}}>() {SPELLED_NORMS[form]}",
        opset=18, eps=1e-5, two=2, scale=VECTOR, bias=VECTOR,
    )  # fmt: skip
    (norm,) = find_norms(graph)
    assert (norm.kind, norm.input, norm.output, norm.scale, norm.bias) == (Kind.LAYER_NORM, "x", "y", "scale", "bias")


def test_an_rms_norm_has_no_mean_and_no_bias() -> None:
    graph = prepared(
        "a = Constant<value = int64[1] {-1}>() s = Pow(x, two) v = ReduceMean(s, a) e = Add(v, eps) r = Sqrt(e) "
        "u = Div(x, r) w = Mul(u, scale) y = Add(w, x)",
        opset=18, eps=1e-5, two=2, scale=VECTOR,
    )  # fmt: skip
    (norm,) = find_norms(graph)
    assert (norm.kind, norm.input, norm.output, norm.scale, norm.bias) == (Kind.RMS_NORM, "x", "w", "scale", None)


def test_the_root_of_something_else_is_no_norm() -> None:
    graph = prepared("s = Mul(x, x) r = Sqrt(s) y = Div(x, r)")
    assert find_norms(graph) == ()


ACTIVATIONS = {
    "erf, half last": ("d = Div(x, root) e = Erf(d) p = Add(e, one) m = Mul(x, p) y = Mul(m, half)", Kind.GELU),
    "erf, half first": ("d = Mul(x, part) e = Erf(d) p = Add(one, e) h = Mul(x, half) y = Mul(h, p)", Kind.GELU),
    "tanh": (
        (
            "c = Pow(x, three) k = Mul(c, small) a = Add(x, k) b = Mul(a, wide) t = Tanh(b) p = Add(t, one) "
            "h = Mul(p, half) y = Mul(x, h)"
        ),
        Kind.GELU,
    ),
    "quick": ("q = Mul(x, quick) s = Sigmoid(q) y = Mul(x, s)", Kind.GELU),
    "gelu op": ("y = Gelu(x)", Kind.GELU),
    "silu": ("s = Sigmoid(x) y = Mul(s, x)", Kind.SILU),
}


@pytest.mark.parametrize("form", ACTIVATIONS)
def test_activations_are_found(form: str) -> None:
    body, kind = ACTIVATIONS[form]
    graph = prepared(
        body, root=2**0.5, part=0.5**0.5, one=1, half=0.5, three=3, small=0.044715, wide=0.79788, quick=1.702
    )
    (found,) = find_patterns(graph)
    assert (found.kind, found.input, found.output) == (kind, "x", "y")
    assert set(found.nodes) == {node.name for node in graph.node}


def test_a_gate_is_no_silu() -> None:
    assert find_patterns(prepared("h = Neg(x) s = Sigmoid(h) y = Mul(s, x)")) == ()


def test_rotated_halves_are_found() -> None:
    graph = prepared(
        "a, b = Split<axis = -1, num_outputs = 2>(x) n = Neg(b) t = Concat<axis = -1>(n, a) c = Mul(x, cosines) "
        "s = Mul(t, sines) y = Add(c, s)",
        cosines=np.ones((1, 8)), sines=np.zeros((1, 8)),
    )  # fmt: skip
    (found,) = find_patterns(graph)
    assert (found.kind, found.input, found.output, isinstance(found, Norm)) == (Kind.ROPE, "x", "y", False)


ATTENTION = (
    "q = MatMul(x, w) k = MatMul(x, w2) t = Transpose<perm = [0, 2, 1]>(k) s = MatMul(q, t) d = Div(s, root) "
    "m = Add(d, mask) p = Softmax<axis = -1>(m) y = MatMul(p, x)"
)


def test_attention_is_a_softmax_between_two_products() -> None:
    graph = prepared(
        ATTENTION, "float[N,T,8] x, float[N,1,T] mask", root=8**0.5, w=np.eye(8), w2=np.eye(8)
    )  # fmt: skip
    (found,) = find_attention(graph)
    made = {node.output[0]: node.name for node in graph.node}
    assert (found.softmax, found.scores, found.values) == (made["p"], (made["s"],), (made["y"],))


def test_a_product_without_a_softmax_is_no_attention() -> None:
    assert find_attention(prepared("t = Transpose<perm = [0, 2, 1]>(x) s = MatMul(x, t) y = MatMul(s, x)")) == ()
