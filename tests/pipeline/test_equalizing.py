"""Outliers of activations go over to the weights where held-out samples gain by it, and nowhere else."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx
import pytest

from models import build, normal, run
from onnxcalib.analysis.compare import layer_noise
from onnxcalib.analysis.diagnose import diagnose_file
from onnxcalib.data import open_data
from onnxcalib.model.quantized import read_quantized
from onnxcalib.model.read import read_prepared
from onnxcalib.model.shapes import input_specs
from onnxcalib.model.smoothing import IntArray, SiteKind, smoothing_of
from onnxcalib.pipeline.equalizing import _Trials
from onnxcalib.pipeline.pipelines import quantize
from onnxcalib.progress import silent
from onnxcalib.recipe import Pipeline, Recipe, parse_bits
from onnxcalib.targets import find_target

WIDTH, HIDDEN = 16, 24
TEXT = """
net (float[N,T,16] x) => (float[N,T,16] y) {
    [norm] h = LayerNormalization <axis=-1> (x, scale, shift)
    [gate] g = MatMul (h, wg)
    [up] f = MatMul (h, wu)
    [sig] sg = Sigmoid (g)
    [silu] sl = Mul (g, sg)
    [product] gated = Mul (sl, f)
    [down] d = MatMul (gated, wd)
    [add] y = Add (x, d)
}"""


def with_outliers(times: float) -> onnx.ModelProto:
    """A channel of the gated product, and one of the norm, so many times as loud as others."""
    scale, up = np.ones(WIDTH, np.float32), normal(WIDTH, HIDDEN, scale=0.25)
    rows, down = np.ones((WIDTH, 1), np.float32), normal(HIDDEN, WIDTH, scale=0.25)
    scale[3] *= times
    rows[3] /= times
    up, gate = up * rows, normal(WIDTH, HIDDEN, seed=1, scale=0.25) * rows
    up[:, 5] *= times
    down[5] /= times
    return build(TEXT, opset=17, scale=scale, shift=normal(WIDTH, scale=0.1), wg=gate, wu=up, wd=down)


def quantized(model: onnx.ModelProto, pipeline: Pipeline, bits: str = "w8a8") -> onnx.ModelProto:
    return quantize(model, {"x": normal(48, 6, WIDTH, seed=7)}, Recipe(pipeline, parse_bits(bits))).model


def error(model: onnx.ModelProto, made: onnx.ModelProto) -> float:
    feed = {"x": normal(32, 6, WIDTH, seed=8)}
    return float(np.square(run(model, feed)["y"] - run(made, feed)["y"]).mean())


@pytest.mark.parametrize(("bits", "share"), [("w8a8", 0.2), ("w4", 0.8)])
def test_outliers_are_made_good(bits: str, share: float) -> None:
    model = with_outliers(30.0)
    plain, light = (quantized(model, pipeline, bits) for pipeline in (Pipeline.PLAIN, Pipeline.LIGHT))
    assert not smoothing_of(plain)
    assert smoothing_of(light)
    assert error(model, light) < share * error(model, plain)


class Told(_Trials):
    """Losses by the sites that are scaled."""

    def __init__(self, losses: Mapping[frozenset[str], float]) -> None:
        self.losses = losses

    def loss(self, smoothing: Mapping[str, IntArray]) -> float:
        return self.losses[frozenset(smoothing)]


@pytest.mark.parametrize(
    ("losses", "taken"),
    [
        ({"": 1.0, "nuv": 0.9}, "nuv"),
        ({"": 1.0, "nuv": 1.0, "n": 1.1, "u": 0.8, "v": 0.9}, "u"),
        ({"": 1.0, "nuv": 1.2, "n": 1.1, "u": 1.0, "v": 1.3}, ""),
    ],
)
def test_what_loses_least_is_taken_and_nothing_worse_than_none(losses: dict[str, float], taken: str) -> None:
    found = {name: np.zeros(4, np.int64) for name in "nuv"}
    kinds = dict(zip("nuv", SiteKind, strict=True))
    trials = Told({frozenset(names): loss for names, loss in losses.items()})
    assert set(trials.least(found, kinds)) == set(taken)


def test_a_file_with_scaled_channels_is_diagnosed_and_compared() -> None:
    model = with_outliers(30.0)
    made, plain = quantized(model, Pipeline.LIGHT), quantized(model, Pipeline.PLAIN)
    assert "up" in smoothing_of(made)
    data = {"x": normal(16, 6, WIDTH, seed=9)}
    _, found = diagnose_file(read_quantized(made), model, data)
    assert {layer.layer: layer.sqnr_db > 20 for layer in found.layers} == dict.fromkeys(("gate", "up", "down"), True)
    specs = input_specs(read_prepared(model, find_target("ort")).proto)
    noise = layer_noise(plain, made, ["up", "down"], open_data(data, specs), silent)
    assert noise["up"] > 15


def test_few_samples_change_nothing() -> None:
    """Without samples held out, nobody can say whether it helps."""
    result = quantize(with_outliers(30.0), {"x": normal(4, 6, WIDTH)}, Recipe(Pipeline.LIGHT, parse_bits("w8a8")))
    assert not smoothing_of(result.model)
