"""Which range estimators `auto` takes."""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx
import pytest

from models import Arrays, build, conv_net, feed_for, normal, run
from onnxcalib import Recipe, quantize
from onnxcalib.algorithms.teacher import Distance
from onnxcalib.model.layers import find_layers
from onnxcalib.model.outputs import find_output_kinds
from onnxcalib.model.qdq import write_qdq
from onnxcalib.model.read import read_prepared
from onnxcalib.numerics.output_kind import OutputKind
from onnxcalib.pipeline.ranges import MINMAX, MSE, TRIED, select
from onnxcalib.plan import QuantPlan
from onnxcalib.recipe import RangeMethod, parse_bits
from onnxcalib.targets import find_target

AVERAGED, PERCENTILE = TRIED[1:3]


def distances(
    losses: tuple[float, ...], noise: tuple[float, ...] = (30.0,) * 4
) -> dict[tuple[RangeMethod, ...], Distance]:
    return {each: distance(loss, y=db) for each, loss, db in zip(TRIED, losses, noise, strict=True)}


def distance(loss: float, **db: float) -> Distance:
    return Distance(loss, dict.fromkeys(db, 1.0), {name: 10 ** (-ratio / 10) for name, ratio in db.items()})


def test_others_must_be_clearly_better_than_mse() -> None:
    assert select(distances((1.0, 0.95, 0.91, 2.0))) == MSE
    assert select(distances((1.0, 0.95, 0.85, 2.0))) == PERCENTILE
    assert select(distances((1.0, 0.95, 0.85, 0.8))) == MINMAX


def test_no_output_may_be_clearly_noisier_than_with_minmax() -> None:
    assert select(distances((0.1, 0.05, 0.5, 1.0), (28.0, 28.0, 29.8, 30.0))) == PERCENTILE
    assert select(distances((0.1, 0.05, 0.5, 1.0), (28.0, 28.0, 28.0, 30.0))) == MINMAX
    both = {each: distance(0.1, y=40.0, z=30.0) for each in TRIED}
    both[MSE] = distance(0.01, y=50.0, z=20.0)
    assert select(both) != MSE


def test_one_column_is_no_distribution() -> None:
    text = "net (float[N,4] x) => (float[N,{}] y) {{ [one] y = Gemm (x, w) }}"
    assert find_output_kinds(build(text.format(1), w=normal(4, 1)))["y"] is OutputKind.VALUES
    assert find_output_kinds(build(text.format(2), w=normal(4, 2)))["y"] is OutputKind.LOGITS


def regression() -> onnx.ModelProto:
    text = """
    net (float[N,8] x) => (float[N,6] y) {
        [one] a = Gemm (x, w1, b1)
        [act] r = Relu (a)
        [two] y = Gemm (r, w2)
    }"""
    return build(text, w1=normal(8, 16, seed=1), b1=normal(16, seed=2), w2=normal(16, 6, seed=3))


def sqnr(model: onnx.ModelProto, data: Arrays, recipe: Recipe) -> float:
    reference, found = run(model, data)["y"].astype(np.float64), run(quantize(model, data, recipe).model, data)["y"]
    return float(10 * np.log10((reference**2).sum() / ((reference - found) ** 2).sum()))


@pytest.mark.parametrize("bits", ["8", "w8a4", "w4a8", "w8"])
@pytest.mark.parametrize(("seed", "samples"), [*((seed, 200) for seed in range(6)), (0, 700), (1, 700)])
def test_heavy_tails_are_not_cut_off(seed: int, samples: int, bits: str) -> None:
    """Most samples are small and a few are huge: as logits, what is cut off would hardly count."""
    model, rng = regression(), np.random.default_rng(seed)
    data = {"x": rng.standard_t(1.2, (samples, 8)).astype(np.float32)}
    recipe = Recipe(bits=parse_bits(bits))
    least = sqnr(model, data, dataclasses.replace(recipe, ranges=RangeMethod.MINMAX))
    assert sqnr(model, data, recipe) >= least - 1


def test_what_narrow_weights_lose_does_not_choose_the_ranges_of_activations() -> None:
    """Not where weights are rounded anew later; plain writes them as they are, and judges them so."""
    model, data = conv_net(), feed_for(conv_net(), 48)

    def chosen(pipeline: str, bits: str) -> str:
        return quantize(model, data, Recipe(pipeline, bits=bits)).plan.ranges

    assert chosen("light", "w2a4") == chosen("light", "w8a4") == RangeMethod.MSE
    assert chosen("plain", "w2a4") != RangeMethod.MSE


def test_auto_takes_the_activation_ranges_with_the_least_loss() -> None:
    model, data, target = conv_net(), feed_for(conv_net(), 48), find_target("ort")
    data["x"][0, 0, 0, 0] = 12.0  # an outlier, so that the estimators differ
    plans = {each: quantize(model, data, Recipe(ranges=each[0])).plan for each in TRIED}
    prepared, reference = read_prepared(model, target), run(model, data)["y"]

    def error(plan: QuantPlan) -> float:
        found = run(write_qdq(prepared, find_layers(prepared).layers, plan, target), data)["y"]
        return float(((reference - found) ** 2).sum() / (reference**2).sum())

    # The weights are those with the least squared error, but for minmax.
    same = {each: dataclasses.replace(plan, layers=plans[MSE].layers) for each, plan in plans.items()}
    errors = {each: error(plans[each] if each == MINMAX else same[each]) for each in TRIED}
    assert len(set(errors.values())) == len(errors)
    found = quantize(model, data, Recipe()).plan
    assert error(found) <= min(errors.values()) / 0.85
