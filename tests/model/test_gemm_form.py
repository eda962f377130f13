"""Transformers as they are written: rows through a Gemm that takes the bias in, and integer products of attention."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

from models import BUILDERS, feed_for, optimized_ops, run
from onnxcalib import Recipe, quantize


@pytest.mark.parametrize("length", [4, None])
def test_onnxruntime_takes_in_biases_and_multiplies_integers_in_attention(length: int | None, tmp_path: Path) -> None:
    model = BUILDERS["transformer_block"]()
    feed = feed_for(model)
    if length is None:
        for value in (*model.graph.input, *model.graph.output):
            value.type.tensor_type.shape.dim[1].dim_param = "T"
    made = quantize(model, feed, Recipe(ranges="minmax")).model
    shorter = {"x": feed["x"][:3, :length] if length else feed["x"][:3, :2]}
    assert run(made, shorter)["y"].shape == shorter["x"].shape
    ops = optimized_ops(made, tmp_path)
    assert ops.count("QGemm") == 3
    assert not {"MatMul", "FusedMatMul", "Gemm", "Relu", "DequantizeLinear"} & set(ops)
    assert ops.count("Add") == 2  # the residual ones


def test_an_output_that_a_product_reads_stays_float() -> None:
    model = BUILDERS["transformer_block"]()
    model.graph.output.append(onnx.helper.make_tensor_value_info("v", onnx.TensorProto.FLOAT, ["N", 4, 6]))
    feed = feed_for(model, 2)
    recipe = Recipe(ranges="minmax", include=["query", "key", "scores", "mix"])
    made = quantize(model, feed_for(model), recipe).model
    np.testing.assert_allclose(run(made, feed)["v"], run(model, feed)["v"], rtol=1e-6)
