"""What outputs mean, told from graphs as people export them."""

from __future__ import annotations

import onnx
import pytest
from text_models import embedding_model, token_model

from models import build, normal
from onnxcalib.model.outputs import find_output_kinds
from onnxcalib.numerics.output_kind import LossKind, OutputKind, kinds_that_count, loss_in_words

CAPPED = """
    [logits] l = MatMul (r, w2)
    [small] s = Div (l, c)
    [tanh] t = Tanh (s)
    [large] y = Mul (t, c)
"""
POOLER = """
    [which] which = Constant <value_int=0> ()
    [first] f = Gather <axis=1> (r, which)
    [dense] d = Gemm (f, w1, b1)
    [tanh] y = Tanh (d)
"""
LENGTHS = """
    [axis] axis = Constant <value_ints=[-1]> ()
    [squares] q = Mul (x, x)
    [sum] s = ReduceSum <keepdims=1> (q, axis)
    [root] l = Sqrt (s)
    [unit] y = Div (x, l)
"""


@pytest.mark.parametrize(
    ("model", "kind"),
    [
        (token_model(), OutputKind.TOKEN_LOGITS),
        (token_model("l = MatMul (r, w2)\n y = Softmax <axis=-1> (l)"), OutputKind.TOKEN_PROBABILITIES),
        (token_model("l = MatMul (r, w2)\n y = LogSoftmax <axis=-1> (l)"), OutputKind.TOKEN_LOGITS),
        (token_model(CAPPED, c=normal()), OutputKind.TOKEN_LOGITS),
        (token_model("y = MatMul (r, w3)", "N,T,1", w3=normal(8, 1)), OutputKind.VALUES),
        (token_model("y = Identity (r)", "N,T,8"), OutputKind.VALUES),
        (embedding_model(), OutputKind.EMBEDDING),
        (token_model(POOLER, "N,8"), OutputKind.EMBEDDING),
        (token_model("y = ReduceMean <axes=[1], keepdims=0> (r)", "N,8"), OutputKind.EMBEDDING),
        (token_model("y = ReduceMean <axes=[2], keepdims=0> (r)", "N,T"), OutputKind.VALUES),
        (build(f"net (float[N,8] x) => (float[N,8] y) {{ {LENGTHS} }}"), OutputKind.EMBEDDING),
        (build("net (float[N,8] x) => (float[N,8] y) { y = Tanh (x) }"), OutputKind.VALUES),
        (build("net (float[N,T,8] x) => (float[N,T,7] y) { y = MatMul (x, w) }", w=normal(8, 7)), OutputKind.VALUES),
    ],
)
def test_the_kind_of_an_output(model: onnx.ModelProto, kind: OutputKind) -> None:
    onnx.checker.check_model(model)
    assert find_output_kinds(model)["y"] is kind


def test_hidden_states_do_not_count_beside_what_is_made_of_them() -> None:
    kinds = find_output_kinds(embedding_model())
    assert kinds == {"y": OutputKind.EMBEDDING, "r": OutputKind.HIDDEN}
    assert kinds_that_count(kinds) == {"y": OutputKind.EMBEDDING}
    assert kinds_that_count(kinds, LossKind.MSE) == {"y": OutputKind.VALUES, "r": OutputKind.VALUES}
    assert "cosine distance of 'y'" in loss_in_words(kinds)
    assert "'r'" not in loss_in_words(kinds)


def test_a_loss_named_by_hand_takes_outputs_for_what_it_compares() -> None:
    kinds = {"a": OutputKind.LOGITS, "b": OutputKind.VALUES}
    assert kinds_that_count(kinds, LossKind.DIVERGENCE) == {"a": OutputKind.TOKEN_LOGITS}
    assert kinds_that_count({"b": OutputKind.VALUES}, LossKind.DIVERGENCE) == {"b": OutputKind.TOKEN_LOGITS}
    assert set(kinds_that_count(kinds, LossKind.COSINE).values()) == {OutputKind.EMBEDDING}
