"""A head that shares its table with an embedding, weights alone: eight bits for both, stored once."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from models import Arrays, build, normal, run
from onnxcalib import Pipeline, Recipe, quantize
from onnxcalib.model.io import constant_bytes

ROWS, WIDTH = 96, 64


def language_model(*, turned: bool = False) -> onnx.ModelProto:
    """Token ids to logits: the head reads the table through a Transpose, or as a Gemm does."""
    head = "flat = Reshape (hidden, rows) y = Gemm <transB=1> (flat, table)" if turned else ""
    straight = "turned = Transpose <perm=[1,0]> (table) [head] y = MatMul (hidden, turned)"
    kind = f"float[M,{ROWS}]" if turned else f"float[N,T,{ROWS}]"
    text = f"""
    net (int64[N,T] ids) => ({kind} y) {{
        read = Gather (table, ids)
        [inner] mixed = MatMul (read, w)
        bent = Tanh (mixed)
        hidden = Add (read, bent)
        {head.replace("y = Gemm", "[head] y = Gemm") or straight}
    }}"""
    stored = {"table": normal(ROWS, WIDTH, scale=0.5), "w": normal(WIDTH, WIDTH, scale=0.2)}
    return build(text, 17, **stored, **({"rows": np.array([-1, WIDTH])} if turned else {}))


def tokens(count: int = 48) -> Arrays:
    return {"ids": np.random.default_rng(0).integers(0, ROWS, (count, 12))}


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("block", [None, 32])
@pytest.mark.parametrize("pipeline", Pipeline)
def test_the_head_takes_the_codes_of_the_table(pipeline: Pipeline, block: int | None, turned: bool) -> None:
    model, steps = language_model(turned=turned), {"steps": 2} if pipeline is Pipeline.ADVANCED else {}
    result = quantize(model, tokens(), Recipe(pipeline, bits="w4", block_size=block, **steps), workers=1)
    assert {name: str(it) for name, it in result.plan.precisions.items()} == {"inner": "w4", "head": "w8"}
    (table,) = result.plan.constants.values()
    head = result.plan.layers["head"].quantized
    np.testing.assert_array_equal(head if turned else head.T, table.quantized)
    scales = 4 * (ROWS * 2 + WIDTH * (WIDTH // block if block else 1))
    assert constant_bytes(result.model) < ROWS * WIDTH + WIDTH * WIDTH // 2 + scales + 600
    wanted, found = (run(it, tokens())["y"] for it in (model, result.model))
    assert np.square(found - wanted).sum() < 0.01 * np.square(wanted).sum()


def test_bits_of_its_own_are_what_the_user_asks_for() -> None:
    result = quantize(language_model(), tokens(), Recipe("light", bits="w4", block_size=32, overrides={"head": "w4"}))
    assert result.plan.precisions["head"].weight == 4


def test_the_integer_program_knows_that_eight_bits_cost_the_head_nothing() -> None:
    model = language_model()
    recipe = Recipe("light", bits="w4,w8", block_size=32, compression=0.27)
    result = quantize(model, tokens(), recipe)
    assert result.plan.precisions["head"].weight == 8
    assert constant_bytes(result.model) <= 0.27 * constant_bytes(model)
