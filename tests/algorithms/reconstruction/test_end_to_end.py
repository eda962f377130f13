"""Training through the network: the held-out loss falls or nothing changes, and what has no gradient is named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import onnx
import pytest
from end_to_end_training import QUICK, QUICK_END_TO_END, TARGETS, held_out_loss, job_for, tuned, tuner_of
from jobs import job_on, plan_of
from onnx import parser
from said import refused
from tuning import Judge

from models import any_length, branches, build, conv1d, conv_net, conv_transpose, normal, transformer_block
from onnxcalib.algorithms.reconstruction.end_to_end import CHECKS, NetworkTuned, Schedule
from onnxcalib.autodiff.interface import NoGradientError
from onnxcalib.errors import ModelError
from onnxcalib.model.outputs import find_output_kinds
from onnxcalib.numerics.output_kind import OutputKind
from onnxcalib.pipeline.job import Job
from onnxcalib.plan import QuantPlan
from onnxcalib.progress import silent
from onnxcalib.recipe import Pipeline


def shifted(plan: QuantPlan, by: float = 0.3) -> QuantPlan:
    """The plan with biases that are off: there is something to mend."""
    layers = {
        name: params if params.bias is None else replace(params, bias=params.bias + normal(params.bias.size, scale=by))
        for name, params in plan.layers.items()
    }
    return replace(plan, layers=layers)


def assert_only_biases_moved(before: QuantPlan, after: QuantPlan) -> None:
    assert (after.target, after.ranges) == (before.target, before.ranges)
    assert after.precisions is before.precisions
    assert after.shared is before.shared
    assert after.inputs is before.inputs
    assert after.layers.keys() == before.layers.keys()
    for name, params in before.layers.items():
        assert after.layers[name].quantized is params.quantized
        assert after.layers[name].qparams is params.qparams
        assert after.layers[name].weight is params.weight
        assert after.layers[name].input is params.input


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("builder", [conv_net, conv1d, transformer_block, conv_transpose, branches])
def test_the_held_out_loss_falls_and_only_biases_move(builder: Callable[[], onnx.ModelProto], target: str) -> None:
    job = job_for(builder(), target=target)
    plan = shifted(plan_of(job))
    found = tuned(job, plan)
    assert found.skip_reason is None
    assert found.after < 0.9 * found.before
    assert found.before == pytest.approx(held_out_loss(job, plan), rel=1e-4)
    assert found.after == pytest.approx(held_out_loss(job, found.plan), rel=1e-4)
    assert_only_biases_moved(plan, found.plan)
    moved = [name for name, params in plan.layers.items() if params.bias is not found.plan.layers[name].bias]
    assert moved
    assert all(found.plan.layers[name].bias.dtype == np.float32 for name in moved)


@pytest.mark.parametrize("schedule", [QUICK, QUICK_END_TO_END], ids=["biases", "joint"])
def test_the_plan_stays_where_nothing_helps(schedule: Schedule) -> None:
    job = job_for(conv_net())
    plan = plan_of(job)
    found = tuned(job, plan, schedule=replace(schedule, bias=1e6, last=False))  # every step lands far away
    assert found.plan is plan
    assert found.before == found.after == pytest.approx(held_out_loss(job, plan), rel=1e-4)


def judged(job: Job, schedule: Schedule, *losses: float) -> tuple[NetworkTuned, Judge, list[tuple[int, int]]]:
    """What comes of training whose checks give these losses, who judged, and how far it said it was."""
    judge, told = Judge(*losses, kinds=find_output_kinds(job.model.proto)), []
    tuner = replace(tuner_of(job, schedule=schedule), teacher=judge)
    found = tuner.tune(plan_of(job), lambda _stage, done, total: told.append((done, total)))
    return found, judge, told


def test_the_best_state_on_the_way_is_kept() -> None:
    job, losses = job_for(conv1d()), (1.0, 2.0, 3.0, 3.0, 2.0, 0.7, 0.5, 0.6, 2.0, 0.9, 3.0)
    found, judge, told = judged(job, replace(QUICK, patience=None), *losses)
    assert (found.before, found.after) == (1.0, 0.5)
    assert len(judge.shown) == 1 + CHECKS
    assert [model == job.simulate(found.plan) for model in judge.shown] == [loss == 0.5 for loss in losses]
    assert told == [(done, 40) for done in range(1, 41)]


def test_training_ends_after_three_checks_in_vain() -> None:
    found, _, told = judged(job_for(conv1d()), QUICK, 1.0, 2.0, 0.9, 3.0, 2.0, 0.9, 0.1)
    assert found.after == 0.9
    assert told == [*((done, 40) for done in range(1, 21)), (40, 40)]


def test_the_given_plan_is_not_changed() -> None:
    job = job_for(conv_net())
    plan = shifted(plan_of(job))
    before = {name: params.bias.copy() for name, params in plan.layers.items()}
    assert tuned(job, plan).plan is not plan
    assert all(np.array_equal(plan.layers[name].bias, bias) for name, bias in before.items())


def test_equal_calls_give_equal_biases() -> None:
    job = job_for(conv_net())
    plan = shifted(plan_of(job))
    once, again = (tuned(job, plan).plan for _ in range(2))
    for name in plan.layers:
        np.testing.assert_array_equal(once.layers[name].bias, again.layers[name].bias)


def bare() -> onnx.ModelProto:
    """A convolution, a ConvTranspose and a Gemm without bias, and MatMuls with and without."""
    text = """
    net (float[N,3,5,5] x) => (float[N,4] y) {
        [conv] c = Conv (x, w1)
        [relu] r = Relu (c)
        [up] u = ConvTranspose (r, w2)
        [pool] p = GlobalAveragePool (u)
        [flat] f = Flatten (p)
        [gemm] g = Gemm (f, w3)
        [plain] m = MatMul (g, w4)
        [tanh] t = Tanh (m)
        [last] l = MatMul (t, w5)
        [bias] y = Add (b5, l)
    }"""
    return build(
        text, w1=normal(4, 3, 3, 3, scale=0.4), w2=normal(4, 6, 2, 2, scale=0.5), w3=normal(6, 8), w4=normal(8, 6),
        w5=normal(6, 4), b5=normal(4),
    )  # fmt: skip


@pytest.mark.parametrize("target", TARGETS)
def test_who_gets_a_bias(target: str) -> None:
    job = job_for(bare(), "w3a8", target, 64)
    plan = shifted(plan_of(job), 1.0)
    found = tuned(job, plan)
    assert found.after < found.before
    biases = {name: params.bias for name, params in found.plan.layers.items()}
    assert biases.pop("plain") is None
    assert found.plan.layers["plain"] is plan.layers["plain"]
    assert {name: bias.shape for name, bias in biases.items()} == {
        "conv": (4,), "up": (6,), "gemm": (8,), "last": (4,),
    }  # fmt: skip
    assert all(bias.any() for bias in biases.values())
    assert found.after == pytest.approx(held_out_loss(job, found.plan), rel=1e-4)


@pytest.mark.parametrize("tail", ["", "[best] k = ArgMax <axis=1, keepdims=0> (y)"], ids=["no_bias", "no_float_output"])
def test_nothing_to_tune(tail: str) -> None:
    bias = ", b" if tail else ""
    shown = "int64[N] k" if tail else "float[N,3] y"
    text = f"net (float[N,6] x) => ({shown}) {{ [one] y = {'Gemm' if tail else 'MatMul'} (x, w{bias}) {tail} }}"
    job = job_for(build(text, w=normal(6, 3), **({"b": normal(3)} if tail else {})))
    plan = plan_of(job)
    found = tuned(job, plan)
    assert found.plan is plan
    assert found.skip_reason is None
    assert found.before == found.after


def test_an_int32_bias_keeps_within_its_bounds() -> None:
    job = job_for(conv_net())
    plan = shifted(plan_of(job), 2.0)
    found = replace(tuner_of(job), bias_steps=40.0).tune(plan, silent).plan  # as narrow as no file is
    assert found is not plan
    most = 0.0
    for layer in job.layers:
        params = found.layers[layer.name]
        quantized = np.abs(
            params.bias / (params.qparams.scale.astype(np.float64) * found.layer_input(layer.input).scale)
        )
        assert quantized.max() <= 40 * (1 + 1e-5)
        most = max(most, float(quantized.max()))
    assert most == pytest.approx(40, rel=1e-4)  # the bound was in the way


def test_a_float_bias_knows_no_bounds() -> None:
    job = job_for(conv1d(), target="paper")
    found = replace(tuner_of(job), bias_steps=1e-3).tune(shifted(plan_of(job)), silent)
    assert found.after < 0.9 * found.before


def test_a_model_of_values() -> None:
    text = """
    net (float[N,6] x) => (float[N,2] y) {
        [one] a = Gemm (x, w1, b1)
        [relu] r = Relu (a)
        [two] c = Gemm (r, w2, b2)
        [out] y = Sigmoid (c)
    }"""
    model = build(text, w1=normal(6, 8), b1=normal(8), w2=normal(8, 2, scale=0.3), b2=normal(2))
    job = job_for(model, "w4a8")
    tuner = tuner_of(job)
    assert tuner.teacher.kinds == {"y": OutputKind.VALUES}
    plan = shifted(plan_of(job), 1.0)
    found = tuner.tune(plan, silent)
    assert found.after < 0.5 * found.before
    assert found.after == pytest.approx(held_out_loss(job, found.plan), rel=1e-4)


def test_feeds_of_different_lengths() -> None:
    feeds = [{"x": normal(2, length, 6, seed=length)} for length in (3, 7, 4, 5, 9, 4, 6, 5, 8, 3)]
    job = job_on(any_length(), feeds, "w4a8", pipeline=Pipeline.ADVANCED)
    found = tuned(job, shifted(plan_of(job), 1.0))
    assert found.after < 0.5 * found.before


@pytest.mark.parametrize("samples", [1, 7, 9])
def test_few_samples_will_do(samples: int) -> None:
    job = job_for(conv1d(), samples=samples)
    found = tuned(job, shifted(plan_of(job)))
    assert found.after < found.before


# What has no gradient.


def with_stranger() -> onnx.ModelProto:
    """An op that neither engine differentiates, between two layers."""
    text = """<ir_version: 8, opset_import: ["" : 17, "com.microsoft" : 1]>
    net (float[N,6] x) => (float[N,3] y) {
        [one] a = Gemm (x, w1, b1)
        [odd] h = com.microsoft.QuickGelu (a)
        [two] y = Gemm (h, w2, b2)
    }"""
    model = parser.parse_model(text)
    stored = {"w1": normal(6, 8), "b1": normal(8), "w2": normal(8, 3), "b2": normal(3)}
    model.graph.initializer.extend(onnx.numpy_helper.from_array(value, name) for name, value in stored.items())
    return model


def test_an_op_without_gradient_is_named() -> None:
    job = job_for(with_stranger())
    plan = plan_of(job)
    found = tuned(job, plan)
    assert found.plan is plan
    assert found.before == found.after > 0
    assert "QuickGelu node 'odd'" in str(found.skip_reason)
    with refused(NoGradientError, "QuickGelu node 'odd'") as caught:
        tuner_of(job, strict=True).tune(plan, silent)
    assert isinstance(caught.value, ModelError)


def test_a_stranger_before_the_first_layer_is_no_obstacle() -> None:
    model = with_stranger()
    first, odd = model.graph.node[:2]
    odd.input[0], first.input[0] = "x", "h"
    model.graph.node[2].input[0] = "a"
    ordered = [odd, first, model.graph.node[2]]
    nodes = [onnx.NodeProto.FromString(node.SerializeToString()) for node in ordered]
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    job = job_for(model)
    found = tuned(job, shifted(plan_of(job), 1.0))
    assert found.skip_reason is None
    assert found.after < 0.5 * found.before
