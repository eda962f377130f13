"""A head that shares its table with an embedding, weights alone: the same codes for both, stored once."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx
import pytest

from models import Arrays, build, normal, run
from onnxcalib import Pipeline, Recipe, quantize
from onnxcalib.algorithms.reconstruction import end_to_end
from onnxcalib.checks.check import check_model
from onnxcalib.model.io import constant_bytes
from onnxcalib.model.quantized import read_quantized
from onnxcalib.model.subgraph import with_outputs
from onnxcalib.numerics.quant_params import dequantize
from onnxcalib.targets import find_target

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


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("block", [None, 32, 128])
@pytest.mark.parametrize("bits", [3, 4, 6])
def test_the_table_follows_a_head_of_fewer_bits(bits: int, block: int | None, turned: bool) -> None:
    model, asked = language_model(turned=turned), {"head": f"w{bits}"}
    result = quantize(model, tokens(), Recipe("light", bits="w4", block_size=block, overrides=asked), workers=1)
    assert result.plan.precisions["head"].weight == bits
    (table,) = result.plan.constants.values()
    assert table.qparams.bits == bits
    scales = 1 if block is None or WIDTH % block else WIDTH // block
    assert table.qparams.scale.size == ROWS * scales
    head = result.plan.layers["head"]
    rows = dequantize(head.quantized, head.qparams) if turned else dequantize(head.quantized, head.qparams).T
    found = run(with_outputs(result.model, ["read", "hidden", "y"]), tokens())
    np.testing.assert_array_equal(found["read"], rows[tokens()["ids"]])
    logits = found["hidden"].reshape(-1, WIDTH) @ rows.T + (0 if head.bias is None else head.bias)
    np.testing.assert_allclose(found["y"].reshape(-1, ROWS), logits, atol=1e-4)
    own = ROWS * WIDTH * (4 if bits <= 4 else 8) // 8 + 4 * ROWS * (scales + turned)
    assert constant_bytes(result.model) < own + WIDTH * WIDTH // 2 + 4 * WIDTH * 2 + 4 * WIDTH + 100


@pytest.mark.parametrize("bits", ["w3", "w4"])
def test_advanced_goes_on_from_light_and_loses_less(bits: str) -> None:
    light = quantize(language_model(), tokens(), Recipe("light", bits=bits, block_size=32), workers=1)
    found = quantize(language_model(), tokens(), Recipe("advanced", bits=bits, block_size=32, steps=10), workers=1)
    assert light.tuned is not None
    assert found.end_to_end is not None
    assert found.end_to_end.before == pytest.approx(light.tuned.after, rel=1e-4)
    assert found.end_to_end.after < 0.97 * light.tuned.after
    # Rounding is as it was; every block of the inner layer has another scale.
    ours, theirs = (it.plan.layers["inner"] for it in (found, light))
    np.testing.assert_array_equal(ours.quantized, theirs.quantized)
    assert (ours.qparams.scale != theirs.qparams.scale).mean() > 0.9
    np.testing.assert_array_equal(found.plan.layers["head"].quantized, light.plan.layers["head"].quantized)


def test_training_that_does_not_help_leaves_what_light_made(monkeypatch: pytest.MonkeyPatch) -> None:
    # Rates beyond all reason.
    monkeypatch.setattr(end_to_end, "SCALES", replace(end_to_end.SCALES, scale=0.5))
    light = quantize(language_model(), tokens(), Recipe("light", bits="w4", block_size=32), workers=1)
    found = quantize(language_model(), tokens(), Recipe("advanced", bits="w4", block_size=32, steps=5), workers=1)
    assert found.end_to_end is not None
    assert found.end_to_end.after == found.end_to_end.before
    assert found.model == light.model


def test_a_head_of_fewer_bits_is_told_by_the_file() -> None:
    result = quantize(language_model(), tokens(), Recipe(bits="w4", block_size=32, overrides={"head": "w4"}))
    head = next(it for it in read_quantized(result.model).layers if it.name == "head")
    assert (head.bits, head.stored) == ("w4a32", ROWS * WIDTH // 2)
    assert check_model(result.model, find_target("ort")) == []


def test_two_heads_of_one_table_have_bits_of_their_own() -> None:
    model = language_model()
    model.graph.node.append(onnx.helper.make_node("MatMul", ["bent", "turned"], ["z"], "other"))
    model.graph.output.append(onnx.helper.make_tensor_value_info("z", 1, ["N", "T", ROWS]))
    result = quantize(model, tokens(), Recipe("light", bits="w4", overrides={"head": "w4"}), workers=1)
    assert {name: it.weight for name, it in result.plan.precisions.items()} == {"inner": 4, "head": 4, "other": 8}
    (table,) = result.plan.constants.values()
    assert table.qparams.bits == 8


@pytest.mark.parametrize(("compression", "bits"), [(0.27, 8), (0.22, 4), (0.17, 4)])
def test_the_integer_program_knows_what_the_table_takes(compression: float, bits: int) -> None:
    model = language_model()
    recipe = Recipe("light", bits="w4,w8", block_size=32, compression=compression)
    result = quantize(model, tokens(), recipe)
    assert result.plan.precisions["head"].weight == bits
    assert constant_bytes(result.model) <= compression * constant_bytes(model)


def test_the_sensitivity_of_a_head_is_that_of_its_embedding_too() -> None:
    model = language_model()
    recipe = Recipe("light", bits="w4,w8", rounding="nearest", ranges="minmax", loss="mse", compression=0.3)
    table = quantize(model, tokens(), recipe, workers=1).table
    assert table is not None
    told = next(
        it for row in table.layers if row.layer == "head" for choice, it in row.losses.items() if choice.weight == 4
    )
    asked = Recipe(bits="w8", overrides={"head": "w4"}, ranges="minmax")
    wanted, found = (run(it, tokens())["y"] for it in (model, quantize(model, tokens(), asked).model))
    noise = np.square(found - wanted).sum() / np.square(wanted).sum()
    assert table.base_loss + told == pytest.approx(noise, rel=0.1)
