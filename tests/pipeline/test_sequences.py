"""Sequences of token ids, padded with a mask or each of its own length, through every pipeline and command."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest

import onnxcalib
from models import build, normal, run
from onnxcalib import Recipe

WORDS, LONGEST = 24, 9


def tagger() -> onnx.ModelProto:
    """Ids and their types looked up, a small feed-forward pair and logits; two inputs beside the mask."""
    text = """
    net (int64[N,T] ids, int64[N,T] attention_mask, int64[N,T] types) => (float[N,T,6] y) {
        [word] w = Gather (table, ids)
        [kind] k = Gather (kinds, types)
        [sum] e = Add (w, k)
        [first] a = MatMul (e, w1)
        [bias] b = Add (a, b1)
        [relu] r = Relu (b)
        [second] c = MatMul (r, w2)
        [cast] m = Cast <to=1> (attention_mask)
        [axis] m3 = Unsqueeze (m, last)
        [masked] y = Mul (c, m3)
    }"""
    return build(
        text, table=normal(WORDS, 8), kinds=normal(2, 8), w1=normal(8, 16, scale=0.4), b1=normal(16),
        w2=normal(16, 6, scale=0.4), last=np.array([-1]),
    )  # fmt: skip


def alone(count: int = 32) -> list[dict[str, np.ndarray]]:
    """Each sentence of its own length."""
    rng = np.random.default_rng(0)
    found = []
    for _ in range(count):
        ids = rng.integers(1, WORDS, (1, rng.integers(3, LONGEST + 1)))
        found.append({"ids": ids, "attention_mask": np.ones_like(ids), "types": (np.arange(ids.size) > 3)[None] * 1})
    return found


def padded(count: int = 32) -> dict[str, np.ndarray]:
    """The same sentences in one array."""
    feeds = alone(count)
    return {
        name: np.concatenate([np.pad(feed[name], ((0, 0), (0, LONGEST - feed[name].size))) for feed in feeds])
        for name in feeds[0]
    }


FORMS = {"padded": padded, "alone": alone}
RECIPES = {
    "plain": {},
    "light": {"pipeline": "light", "bits": "w4a8"},
    "dynamic": {"activations": "dynamic", "pipeline": "light", "bits": "w4a8"},
    "auto": {"activations": "auto", "pipeline": "light"},
    "mixed": {"pipeline": "light", "bits": "w4a8,w8a8", "compression": 0.82},
    "advanced": {"pipeline": "advanced", "bits": "w4a8", "steps": 4},
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_every_pipeline_takes_sequences(form: str, recipe: str) -> None:
    model = tagger()
    result = onnxcalib.quantize(model, FORMS[form](), Recipe(**RECIPES[recipe]))
    wanted = [run(model, feed)["y"] for feed in alone()]
    found = [run(result.model, feed)["y"] for feed in alone()]
    signal = sum(float(np.square(each).sum()) for each in wanted)
    noise = sum(float(np.square(one - other).sum()) for one, other in zip(wanted, found, strict=True))
    assert noise < 0.04 * signal


@pytest.mark.parametrize("form", FORMS)
def test_what_measures_takes_sequences(form: str, tmp_path: Any) -> None:
    model, data = tagger(), FORMS[form]()
    onnx.save(model, tmp_path / "float.onnx")
    onnxcalib.quantize(model, data, Recipe(), output=tmp_path / "small.onnx")
    rows = onnxcalib.evaluate([tmp_path / "small.onnx"], data, reference=tmp_path / "float.onnx")
    assert rows[-1].samples == 32
    table = onnxcalib.sensitivity(model, data, Recipe(pipeline="light", bits="w4a8,w8a8", compression=0.5))
    assert [row.layer for row in table.layers] == ["first", "second"]


def test_padded_or_alone_the_ranges_are_the_same() -> None:
    plans = [onnxcalib.quantize(tagger(), make(), Recipe(ranges="minmax")).plan for make in FORMS.values()]
    for name, qparams in plans[0].inputs.items():
        np.testing.assert_allclose(qparams.scale, plans[1].inputs[name].scale, rtol=1e-6)
