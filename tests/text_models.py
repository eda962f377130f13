"""Small models that read token ids, and feeds with padding for them."""

from __future__ import annotations

import numpy as np
import onnx

from models import Arrays, build, normal

WORDS, WIDTH, CLASSES = 11, 8, 7

BODY = """
        [embed] e = Gather (table, ids)
        [up] u = MatMul (e, w1)
        [bias] b = Add (u, b1)
        [relu] r = Relu (b)
"""


def token_model(
    head: str = "y = MatMul (r, w2)", shape: str = "N,T,7", more: str = "", **weights: np.ndarray
) -> onnx.ModelProto:
    """Ids and a mask in; by default the logits of a class at every position out."""
    text = f"""
    net (int64[N,T] ids, int64[N,T] mask) => (float[{shape}] y{more}) {{
        {BODY}
        [cast] m = Cast <to=1> (mask)
        [ends] ends = Constant <value_ints=[-1]> ()
        [wide] wide = Unsqueeze (m, ends)
        {head}
    }}"""
    own = {"table": normal(WORDS, WIDTH), "w1": normal(WIDTH, WIDTH), "b1": normal(WIDTH), "w2": normal(WIDTH, CLASSES)}
    return build(text, **own, **weights)


def embedding_model() -> onnx.ModelProto:
    """The mean over positions that are no padding, beside the states that it is the mean of."""
    head = """
        [kept] kept = Mul (r, wide)
        [axis] axis = Constant <value_ints=[1]> ()
        [total] total = ReduceSum <keepdims=0> (kept, axis)
        [many] many = ReduceSum <keepdims=0> (wide, axis)
        [mean] y = Div (total, many)
    """
    return token_model(head, "N,8", ", float[N,T,8] r")


def padded_feed(samples: int = 12, positions: int = 6, seed: int = 0) -> Arrays:
    """Ids from one to the last, zero at padding, where the mask is zero."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(2, positions + 1, samples)
    lengths[0] = positions
    mask = (np.arange(positions) < lengths[:, None]).astype(np.int64)
    return {"ids": rng.integers(1, WORDS, (samples, positions)) * mask, "mask": mask}
