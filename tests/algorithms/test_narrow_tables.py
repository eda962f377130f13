"""Embedding tables at four bits: when they have them, what they take, and that the file computes what was decided."""

import numpy as np
import onnx
import pytest

from models import build, normal, run
from onnxcalib import Recipe, quantize
from onnxcalib.model.quantized import bytes_by_kind
from onnxcalib.numerics.quant_params import dequantize

ROWS, WIDTH = 200, 32
IDS = {"ids": np.random.default_rng(0).integers(0, ROWS, (16, 5))}


def embedder(head: str = "w") -> onnx.ModelProto:
    """A table, and a layer that reads its rows."""
    text = f"""net (int64[N,5] ids) => (float[N,5,{WIDTH}] y) {{
        [embed] e = Gather (table, ids)
        [layer] y = MatMul (e, {head})
    }}"""
    return build(text, table=normal(ROWS, WIDTH), w=normal(WIDTH, WIDTH, seed=3, scale=0.2))


@pytest.mark.parametrize(("bits", "width"), [("w4a8", 4), ("w3a8", 4), ("w4", 4), ("w8a8", 8), ("w5a8", 8)])
def test_tables_follow_layers_of_four_bits(bits: str, width: int) -> None:
    plan = quantize(embedder(), IDS, Recipe(bits=bits, ranges="minmax")).plan
    assert plan.constants["table"].qparams.bits == width


def test_targets_without_them_keep_eight_bits() -> None:
    plan = quantize(embedder(), IDS, Recipe(bits="w4a8", ranges="minmax", target="openvino")).plan
    assert plan.constants["table"].qparams.bits == 8


def test_the_file_looks_up_what_the_plan_says_at_half_a_byte_a_value() -> None:
    model = embedder()
    model.graph.output.append(onnx.helper.make_tensor_value_info("e", onnx.TensorProto.FLOAT, ["N", 5, WIDTH]))
    result = quantize(model, IDS, Recipe(bits="w4", ranges="minmax"))
    table = result.plan.constants["table"]
    rows = dequantize(table.quantized, table.qparams)[IDS["ids"]]
    np.testing.assert_array_equal(run(result.model, IDS)["e"], rows)
    assert table.bytes == ROWS * WIDTH // 2 + 4 * ROWS
    stored = bytes_by_kind(result.model)
    assert stored["quantized weights"] == ROWS * WIDTH // 2 + WIDTH * WIDTH // 2
    assert stored["float constants"] < 100


def test_a_table_that_the_outputs_need_keeps_eight_bits() -> None:
    model = embedder()
    table = next(it for it in model.graph.initializer if it.name == "table")
    values = normal(ROWS, WIDTH) * np.float32(0.05)
    values[:, 0] = 20  # one column takes the whole grid, and the layer does not read it
    table.CopyFrom(onnx.numpy_helper.from_array(values, "table"))
    weight = next(it for it in model.graph.initializer if it.name == "w")
    blind = onnx.numpy_helper.to_array(weight).copy()
    blind[0] = 0
    weight.CopyFrom(onnx.numpy_helper.from_array(blind, "w"))
    plan = quantize(model, IDS, Recipe(bits="w4", ranges="minmax")).plan
    assert "table" not in plan.constants or plan.constants["table"].qparams.bits > 4
