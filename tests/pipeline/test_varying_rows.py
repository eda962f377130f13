"""How many rows an output has may depend on values, and so on rounding: nothing takes them for the same rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

from models import Arrays, build, normal, run
from onnxcalib.api import Pipeline, Precision, Recipe, evaluate, quantize

FOUR = (Precision(4, 4),)
CHOSEN = {
    "Compress": "k = Compress <axis=0> (r, c)",
    "Gather": "n = NonZero (c) i = Squeeze (n, zero) k = Gather <axis=0> (r, i)",  # which has a gradient
}


def choosing(how: str) -> onnx.ModelProto:
    text = f"""net (float[N,6] x) => (float[K,4] y, float[N,3] z) {{
        a = Gemm (x, w1, b1)
        r = Relu (a)
        s = ReduceMean <axes=[1], keepdims=0> (r)
        c = Greater (s, least)
        {CHOSEN[how]}
        y = Gemm (k, w2, b2)
        z = Gemm (r, w3)
    }}"""
    zero = {"zero": np.array([0], np.int64)} if how == "Gather" else {}
    weights = {"w1": normal(6, 8), "b1": normal(8), "w2": normal(8, 4, seed=1), "b2": normal(4), "w3": normal(8, 3)}
    return build(text, 17, **weights, **zero, least=np.array([0.6], np.float32))


def rows(model: onnx.ModelProto | Path, feed: Arrays) -> int:
    return len(run(model, feed)["y"])


@pytest.mark.parametrize("how", CHOSEN)
@pytest.mark.parametrize("pipeline", Pipeline)
def test_every_pipeline_goes_through(how: str, pipeline: Pipeline, tmp_path: Path) -> None:
    model, feed, output = choosing(how), {"x": normal(64, 6, seed=3)}, tmp_path / "q.onnx"
    steps = {"steps": 3} if pipeline is Pipeline.ADVANCED else {}
    quantize(model, feed, Recipe(pipeline=pipeline, bits=FOUR, **steps), output=output)
    assert rows(output, feed) != rows(model, feed)  # else this asks for nothing
    onnx.save(model, tmp_path / "float.onnx")
    _, found = evaluate([tmp_path / "float.onnx", output], feed, reference=tmp_path / "float.onnx")
    assert found.sqnr_db is not None
    assert np.isfinite(found.sqnr_db)
