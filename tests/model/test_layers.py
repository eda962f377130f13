"""The layer list: golden lists for the builders, reasons for what stays float, and the choice by pattern."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from models import BUILDERS, build, conv_net, normal, transformer_block
from onnxcalib import inspect
from onnxcalib.errors import ModelError, RecipeError
from onnxcalib.model.layers import LayerList, choose

# name, op, has bias, activation, groups, parameters, multiply-accumulates; the figures are worked out by hand.
GOLDEN: dict[str, list[tuple[str, str, bool, str | None, int, int, int]]] = {
    "conv_net": [
        ("stem", "Conv", True, "Clip", 1, 8 * 3 * 9 + 8, 8 * 3 * 9 * 64),
        ("depth", "Conv", True, "Clip", 8, 8 * 9 + 8, 8 * 9 * 64),
        ("project", "Conv", True, None, 1, 8 * 8 + 8, 8 * 8 * 64),
        ("head", "Conv", True, "Relu", 1, 16 * 8 + 16, 16 * 8 * 64),
        ("fc", "Gemm", True, None, 1, 16 * 5 + 5, 16 * 5),
    ],
    "transformer_block": [
        ("query", "MatMul", True, None, 1, 36 + 6, 36 * 4),
        ("key", "MatMul", False, None, 1, 36, 36 * 4),
        ("value", "MatMul", False, None, 1, 36, 36 * 4),
        ("up", "MatMul", True, "Relu", 1, 72 + 12, 72 * 4),
        ("down", "MatMul", True, None, 1, 72 + 6, 72 * 4),
    ],
    "conv1d": [
        ("first", "Conv", True, "Relu", 1, 6 * 4 * 3 + 6, 6 * 4 * 3 * 12),
        ("second", "Conv", True, None, 1, 3 * 6 * 3 + 3, 3 * 6 * 3 * 6),
    ],
    "conv3d": [
        ("first", "Conv", True, "Relu", 1, 4 * 2 * 27 + 4, 4 * 2 * 27 * 64),
        ("second", "Conv", False, None, 1, 3 * 4, 3 * 4 * 64),
    ],
    "grouped": [
        ("groups", "Conv", True, "Relu", 2, 6 * 2 * 9 + 6, 6 * 2 * 9 * 36),
        ("join", "Conv", True, None, 1, 2 * 6 + 2, 2 * 6 * 36),
    ],
    "conv_transpose": [
        ("down", "Conv", True, "Relu", 1, 4 * 3 * 9 + 4, 4 * 3 * 9 * 25),
        ("up", "ConvTranspose", True, "Relu", 1, 4 * 6 * 9 + 6, 4 * 6 * 9 * 25),
        ("last", "ConvTranspose", False, None, 2, 6 * 2 * 4, 6 * 2 * 4 * 121),
    ],
    "branches": [
        ("stem", "Conv", True, "Relu", 1, 4 * 3 * 9 + 4, 4 * 3 * 9 * 64),
        ("left", "Conv", True, None, 1, 6 * 4 * 9 + 6, 6 * 4 * 9 * 16),
        ("last", "Conv", True, None, 1, 4 * 10 + 4, 4 * 10 * 16),
    ],
}


@pytest.mark.parametrize("builder", BUILDERS)
def test_golden_lists(builder: str) -> None:
    found = [
        (layer.name, layer.op, layer.bias is not None, layer.activation, layer.groups, layer.parameters, layer.macs)
        for layer in inspect(BUILDERS[builder]()).layers
    ]
    assert found == GOLDEN[builder]


def test_tensors_around_a_layer() -> None:
    layers = inspect(conv_net())
    assert [(layer.input, layer.activated) for layer in layers.layers] == [
        ("x", "r1"), ("r1", "r2"), ("r2", "b3"), ("s", "r4"), ("f", "y"),
    ]  # fmt: skip
    assert [layer.batch_norm is not None for layer in layers.layers] == [True, True, True, False, False]
    assert [layer.is_depthwise for layer in layers.layers] == [False, True, False, False, False]
    assert [layer.channels for layer in layers.layers] == [8, 8, 8, 16, 5]
    assert [layer.channel_axis for layer in layers.layers] == [0, 0, 0, 0, 0]
    assert layers["fc"].transposed
    assert layers["head"].output == "c4"


def test_the_bias_of_a_matmul_lives_in_its_add() -> None:
    layers = inspect(transformer_block())
    up = layers["up"]
    assert (up.bias, up.bias_node, up.output, up.activated) == ("bu", "up_bias", "u0", "u")
    assert up.channel_axis == 1
    assert layers["key"].bias_node is None


def test_channels_of_transposed_convolutions() -> None:
    layers = inspect(BUILDERS["conv_transpose"]())
    up, last = layers["up"], layers["last"]
    assert (up.channels, up.channel_axis, up.per_channel) == (6, 1, True)
    assert (last.channels, last.per_channel) == (4, False)


def only(text: str, **stored: np.ndarray) -> LayerList:
    return inspect(build(text, **stored))


def reason(listed: LayerList) -> str:
    assert listed.layers == ()
    assert len(listed.float_nodes) == 1
    return listed.float_nodes[0].reason


REASONS = [
    ("float[N,4] x", "y = MatMul (w, xt)", "xt = Transpose (x)", (4, 4), "its constant is the left operand"),
    ("float[N,2,4] x", "y = MatMul (x, w)", "", (2, 4, 4), "its weight has 3 axes, not 2"),
    ("float[4,N] x", "y = Gemm <transA=1> (x, w)", "", (4, 4), "its input is transposed (transA)"),
    ("float[N,4] x", "y = Gemm <alpha=0.5> (x, w, c)", "c = ReduceMean <axes=[0]> (x)", (4, 4),
     "alpha or beta is not 1 and its bias is computed"),
    ("float[N,4] x", "y = Gemm (x, w, c)", "c = ReduceMean <axes=[0]> (x)", (4, 4), "its bias is computed"),
    ("float[N,4] x", "y = MatMul (x, v)", "v = Sigmoid (w)", (4, 4), "both operands are computed"),
    ("float[N,4,5,5] x", "y = Conv (x, v)", "v = Sigmoid (w)", (4, 4, 1, 1), "its weight is computed"),
]  # fmt: skip


@pytest.mark.parametrize(("source", "layer", "before", "shape", "why"), REASONS, ids=[case[-1] for case in REASONS])
def test_reasons_to_stay_float(source: str, layer: str, before: str, shape: tuple[int, ...], why: str) -> None:
    rank = {"MatMul (w": 2, "float[N,2,4]": 3, "Conv": 4}
    axes = next((count for word, count in rank.items() if word in layer or word in source), 2)
    output = ",".join("ABCD"[:axes])
    assert reason(only(f"net ({source}) => (float[{output}] y) {{ {before} {layer} }}", w=normal(*shape))) == why


@pytest.mark.parametrize("shape", [(3, 4), (3, 1)])
def test_a_gemm_whose_bias_differs_from_row_to_row_stays_float(shape: tuple[int, ...]) -> None:
    listed = only("net (float[3,4] x) => (float[3,4] y) { y = Gemm (x, w, b) }", w=normal(4, 4), b=normal(*shape))
    assert reason(listed) == f"its bias has shape {list(shape)}, not one value a channel"


def test_products_of_two_computed_tensors_are_named() -> None:
    listed = inspect(transformer_block())
    assert listed.float_nodes == ()
    assert [(it.name, it.op, it.inputs, it.role, it.macs) for it in listed.products] == [
        ("scores", "MatMul", ("q", "kt"), "scores", 4 * 6 * 4),
        ("mix", "MatMul", ("a", "v"), "values", 4 * 4 * 6),
    ]


def test_other_nodes_with_weights_are_named() -> None:
    text = """net (int64[N,3] ids) => (float[N,3,16] y) {
        [embed] e = Gather (table, ids)
        [small] s = Gather (little, ids)
        [sum] a = Add (e, s)
        [cast] y = MatMul (a, w)
    }"""
    listed = only(text, table=normal(300, 16), little=normal(3, 16), w=normal(16, 16))
    assert [(node.name, node.reason) for node in listed.float_nodes] == [
        ("embed", "embedding tables are looked up in float; only their storage may shrink")
    ]
    assert [layer.name for layer in listed.layers] == ["cast"]


def test_recurrent_nodes_lone_norms_and_bodies_are_named() -> None:
    text = """net (float[4,N,3] x, bool go) => (float[N,3] y) {
        [rnn] r, h = RNN <hidden_size=3> (x, wr, rr)
        [flat] f = Squeeze (h, axes)
        [norm] b = BatchNormalization (f, one, zero, zero, one)
        [choice] y = If (go) <
            then_branch = inner () => (float[N,3] t) { [dense] t = Gemm (b, w) },
            else_branch = other () => (float[N,3] e) { e = Identity (b) }
        >
    }"""
    listed = only(
        text, wr=normal(1, 3, 3), rr=normal(1, 3, 3), axes=np.array([0], np.int64), one=np.ones(3, np.float32),
        zero=np.zeros(3, np.float32), w=normal(3, 3),
    )  # fmt: skip
    assert [(node.name, node.op) for node in listed.float_nodes][:2] == [("rnn", "RNN"), ("norm", "BatchNormalization")]
    assert "no layer directly before it" in listed.float_nodes[1].reason


def test_unknown_sizes_give_no_macs() -> None:
    layers = only("net (float[N,3,H,W] x) => (float[N,4,A,B] y) { y = Conv (x, w) }", w=normal(4, 3, 3, 3)).layers
    assert layers[0].macs is None
    assert layers[0].parameters == 108


def test_an_activation_that_others_read_before_it_is_not_the_layers() -> None:
    text = """net (float[N,3] x) => (float[N,3] y, float[N,3] c) {
        c = Gemm (x, w)
        y = Relu (c)
    }"""
    layer = only(text, w=normal(3, 3)).layers[0]
    assert (layer.activation, layer.activated) == (None, "c")


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", ["w4", "bias4"])
def test_weights_that_are_not_finite_are_refused(value: float, where: str) -> None:
    model = conv_net()
    tensor = next(tensor for tensor in model.graph.initializer if tensor.name == where)
    array = onnx.numpy_helper.to_array(tensor).copy()
    array.reshape(-1)[3] = value
    tensor.CopyFrom(onnx.numpy_helper.from_array(array, where))
    with pytest.raises(ModelError, match=f"'{where}' of layer 'head' holds NaN or infinite values"):
        inspect(model)


def chosen(include: tuple[str, ...] = (), exclude: tuple[str, ...] = ()) -> list[str]:
    return [layer.name for layer in choose(inspect(conv_net()), include, exclude)]


def test_patterns_choose_layers() -> None:
    assert chosen() == ["stem", "depth", "project", "head", "fc"]
    assert chosen(exclude=("stem", "f?")) == ["depth", "project", "head"]
    assert chosen(include=("*e*",)) == ["stem", "depth", "project", "head"]
    assert chosen(include=("*e*",), exclude=("[dp]*",)) == ["stem", "head"]


@pytest.mark.parametrize("option", ["include", "exclude"])
def test_a_pattern_that_matches_nothing_lists_near_names(option: str) -> None:
    with pytest.raises(RecipeError) as caught:
        chosen(**{option: ("stem", "projekt")})
    assert f"{option}='projekt'" in caught.value.message
    assert "project" in caught.value.hint
    assert "fc" not in caught.value.hint


def test_patterns_mind_case() -> None:
    with pytest.raises(RecipeError):
        chosen(exclude=("STEM",))


def test_nothing_left_is_an_error() -> None:
    with pytest.raises(RecipeError, match="every layer is excluded"):
        chosen(exclude=("*",))
