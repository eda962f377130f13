"""Scales that leave no result halfway between two quantized values."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import numpy_helper

from models import BUILDERS, build, clipped_net, feed_for, normal, run
from onnxcalib import Precision, RangeMethod, Recipe, quantize
from onnxcalib.algorithms.rounding_safe import ACTIVATION_MOVE, MOST_WEIGHT_MOVE
from onnxcalib.model.subgraph import with_outputs
from onnxcalib.numerics.fractions import MOST
from onnxcalib.numerics.quant_params import QuantParams
from onnxcalib.pipeline.job import Job, start
from onnxcalib.pipeline.stages import final_scales, statistics, uniform_plan
from onnxcalib.plan import QuantPlan

UNOPTIMIZED = {"graph_optimization_level": ort.GraphOptimizationLevel.ORT_DISABLE_ALL}
SAFE = 0.4 / MOST  # half a step over the largest denominator, less what float32 loses


def padded_shortcut() -> onnx.ModelProto:
    """A stage that halves the picture, with a shortcut of slices and zeros; means at its end."""
    text = """
    net (float[N,3,8,8] x) => (float[N,4] y) {
        [stem] c1 = Conv <pads=[1,1,1,1]> (x, w1, b1)
        [relu1] r1 = Relu (c1)
        [down] c2 = Conv <pads=[1,1,1,1], strides=[2,2]> (r1, w2, b2)
        [slice] s = Slice (r1, starts, ends, axes, steps)
        [pad] p = Pad (s, pads)
        [sum] a = Add (c2, p)
        [relu2] r2 = Relu (a)
        [again] c3 = Conv <pads=[1,1,1,1]> (r2, w3, b3)
        [sum2] a2 = Add (c3, r2)
        [relu3] r3 = Relu (a2)
        [mean] m = ReduceMean <axes=[2,3], keepdims=0> (r3)
        [fc] y = Gemm <transB=1> (m, w4, b4)
    }"""
    return build(
        text,
        w1=normal(6, 3, 3, 3, scale=0.3), b1=normal(6), w2=normal(12, 6, 3, 3, scale=0.2), b2=normal(12),
        w3=normal(12, 12, 3, 3, scale=0.1), b3=normal(12), w4=normal(4, 12), b4=normal(4),
        starts=np.array([0, 0]), ends=np.array([8, 8]), axes=np.array([2, 3]), steps=np.array([2, 2]),
        pads=np.array([0, 3, 0, 0, 0, 3, 0, 0]),
    )  # fmt: skip


MODELS = {"padded_shortcut": padded_shortcut, "conv_net": BUILDERS["conv_net"], "clipped_net": clipped_net}


def planned(model: onnx.ModelProto, target: str) -> tuple[Job, QuantPlan]:
    recipe = Recipe(bits=(Precision.parse("w8a8"),), target=target, ranges=RangeMethod.MSE)
    job = start(model, feed_for(model), recipe).jobs[0]
    return job, uniform_plan(job, statistics(job))


def nearest_tie(file: onnx.ModelProto, feed: dict[str, np.ndarray], but: tuple[str, ...] = ()) -> float:
    """How near to halfway between two quantized values anything comes that the file computes and rounds, in steps."""
    scales = {tensor.name: numpy_helper.to_array(tensor) for tensor in file.graph.initializer}
    quantizers = [node for node in file.graph.node if node.op_type == "QuantizeLinear"]
    rounded = {node.input[0]: scales[node.input[1]] for node in quantizers if node.input[0] not in (*feed, *but)}
    values = run(with_outputs(file, list(rounded)), feed, **UNOPTIMIZED)
    steps = np.concatenate([(values[name].astype(np.float64) / scale).ravel() for name, scale in rounded.items()])
    return float(np.abs(np.abs(steps - np.rint(steps)) - 0.5).min())


# For OpenVINO two quantizers round what a sliced shortcut starts from: a scale fits one of them.
@pytest.mark.parametrize(
    ("name", "target"), [*((name, target) for name in MODELS for target in ("ort", "rknn")), ("conv_net", "openvino")]
)
def test_nothing_comes_near_a_tie(name: str, target: str) -> None:
    model = MODELS[name]()
    job, plan = planned(model, target)
    feed = feed_for(model, 64, seed=9)
    # What OpenVINO takes a mean of was not rounded before, and so the mean is no multiple of a step.
    means = ("f",) if target == "openvino" else ()
    assert nearest_tie(job.write(plan), feed, means) < SAFE
    assert nearest_tie(job.write(final_scales(job, plan)), feed, means) > SAFE


@pytest.mark.parametrize("target", ["ort", "openvino"])
def test_fused_and_unfused_kernels_compute_the_same(target: str) -> None:
    model = padded_shortcut()
    recipe = Recipe(bits=(Precision.parse("w8a8"),), target=target, ranges=RangeMethod.MSE)
    result = quantize(model, feed_for(model), recipe)
    feed = feed_for(model, 64, seed=9)
    fused, unfused = (run(result.model, feed, **settings)["y"] for settings in ({}, UNOPTIMIZED))
    assert np.abs(fused - unfused).max() < 1e-5 * np.abs(fused).max()


@pytest.mark.parametrize("target", ["ort", "openvino", "rknn"])
def test_scales_move_by_little_and_codes_stay(target: str) -> None:
    job, plan = planned(padded_shortcut(), target)
    final = final_scales(job, plan)
    moves = [final.layers[name].qparams.scale / params.qparams.scale - 1 for name, params in plan.layers.items()]
    assert 0 < max(np.abs(move).max() for move in moves) <= MOST_WEIGHT_MOVE * 1.001
    assert all(final.layers[name].quantized is params.quantized for name, params in plan.layers.items())
    for before, after in ((plan.shared, final.shared), (plan.inputs, final.inputs)):
        assert all(
            np.abs(after[name].scale / qparams.scale - 1) < 3 * ACTIVATION_MOVE for name, qparams in before.items()
        )
        assert all(after[name].zero_point == qparams.zero_point for name, qparams in before.items())


def pooled_net() -> onnx.ModelProto:
    """Sums, a Concat and means of what three activations cut, and an activation of such a sum."""
    text = """
    net (float[N,3,4,4] x) => (float[N,2] y) {
        [one] c1 = Conv (x, w1, b1) a = Clip (c1, zero, six)
        [two] c2 = Conv (x, w2, b2) b = Clip (c2, zero, two)
        [three] c3 = Conv (x, w3, b3) c = Clip (c3, zero, six)
        [sum] s = Add (a, b) d = Clip (s, zero, six)
        [again] t = Add (c, d) e = Clip (t, zero, two)
        [both] k = Concat <axis=1> (e, b)
        [last] l = Conv (k, w4, b4) f = Clip (l, zero, six)
        [mean] p = GlobalAveragePool (f) q = Flatten (p)
        [fc] y = Gemm (q, w5, b5)
    }"""
    weights = {f"w{place}": normal(4, 3, 1, 1, seed=place, scale=3.0) for place in (1, 2, 3)}
    return build(
        text, **weights, w4=normal(4, 8, 1, 1), w5=normal(4, 2), b5=normal(2), b1=normal(4), b2=normal(4), b3=normal(4),
        b4=normal(4), zero=np.float32(0), six=np.float32(6), two=np.float32(2),
    )  # fmt: skip


@pytest.fixture(scope="module")
def pooled() -> tuple[Job, QuantPlan]:
    return planned(pooled_net(), "ort")


CUTS = {"a": 6, "b": 2, "c": 6, "d": 6, "e": 2, "f": 6}


@settings(max_examples=100)
@given(st.integers(0, 2**32 - 1))
def test_no_scale_moves_beyond_where_an_activation_cuts(pooled: tuple[Job, QuantPlan], seed: int) -> None:
    """Ranges that end at the cut, as those of extremes do, or somewhat below it."""
    (job, plan), rng = pooled, np.random.default_rng(seed)

    def moved(name: str, qparams: QuantParams) -> QuantParams:
        high = CUTS.get(name, rng.uniform(1, 8)) * rng.choice([1.0, 0.9999, 0.997, 0.99, rng.uniform(0.5, 1)])
        return replace(qparams, scale=np.array(high / 255, np.float32))

    shared = {name: moved(name, qparams) for name, qparams in plan.shared.items()}
    shared["q"] = shared["p"]  # one grid for both
    final = final_scales(job, replace(plan, shared=shared))
    assert set(CUTS) <= set(final.shared)
    for name, qparams in shared.items():
        assert np.abs(final.shared[name].scale / qparams.scale - 1) < 3 * ACTIVATION_MOVE
        assert final.shared[name].range[1] <= CUTS.get(name, np.inf), name
    assert any(final.shared[name].scale != qparams.scale for name, qparams in shared.items())


@pytest.mark.parametrize("other", [{"rounding_safe": False}, {"power_of_two": True}, {"float_activations": True}])
def test_a_target_that_does_not_ask_keeps_its_plan(other: dict[str, bool]) -> None:
    job, plan = planned(padded_shortcut(), "ort")
    job = replace(job, target=replace(job.target, **other))
    assert final_scales(job, plan) is plan


def test_tensors_that_keep_a_grid_still_do() -> None:
    job, plan = planned(padded_shortcut(), "ort")
    final = final_scales(job, plan)
    kept = {name: place.same_qparams_as for name, place in job.points.tensors.items() if place.same_qparams_as}
    assert kept
    assert all(final.shared[name].scale == final.shared[source].scale for name, source in kept.items())
