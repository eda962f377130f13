"""Which rounds of batch-norm tuning are kept, and who judges."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import onnx
import pytest
from by_hand import held_out_loss
from jobs import job_on, plan_of
from prepared import scaled_as
from tuning import Judge, job_for, tuner_of

from models import Arrays, conv_net, feed_for, run
from onnxcalib.algorithms.batchnorm import ROUNDS
from onnxcalib.algorithms.teacher import Teacher
from onnxcalib.data import first
from onnxcalib.numerics.losses import TEMPERATURE
from onnxcalib.numerics.quant_params import QuantParams
from onnxcalib.pipeline.job import Job
from onnxcalib.pipeline.pipelines import quantize as quantize_model
from onnxcalib.pipeline.stages import batch_norm_tuning
from onnxcalib.plan import QuantPlan
from onnxcalib.progress import silent
from onnxcalib.recipe import Pipeline, Precision, RangeMethod, Recipe, Rounding, parse_bits


def judged(job: Job, plan: QuantPlan, *losses: float):
    return replace(tuner_of(job), teacher=Judge(*losses)).tune(plan, silent)


def test_a_plan_that_would_not_gain_stays() -> None:
    job = job_for(conv_net(), "w4a8")
    plan = plan_of(job)
    tuned = judged(job, plan, 1.0)  # nothing is gained, nothing lost
    assert tuned.plan is plan
    assert (tuned.before, tuned.after, tuned.rounds) == (1.0, 1.0, 0)
    tuned = judged(job, plan, 1.0, 2.0, 1.5)
    assert tuned.plan is plan
    assert tuned.rounds == 0


def test_the_better_of_scaling_and_shifting_is_kept() -> None:
    job = job_for(conv_net(), "w4a8")
    plan = plan_of(job)
    # Before; then scaled and shifted worse, shifted alone better; then both worse.
    tuned = judged(job, plan, 1.0, 1.2, 0.5, 0.7, 0.6)
    assert (tuned.before, tuned.after, tuned.rounds) == (1.0, 0.5, 1)
    for name, params in tuned.plan.layers.items():
        np.testing.assert_array_equal(params.qparams.scale, plan.layers[name].qparams.scale)
    assert any(not np.array_equal(it.bias, plan.layers[name].bias) for name, it in tuned.plan.layers.items())
    tuned = judged(job, plan, 1.0, 0.4, 0.5, 0.7, 0.6)
    assert (tuned.after, tuned.rounds) == (0.4, 1)
    scales = {name: params.qparams.scale for name, params in tuned.plan.layers.items()}
    assert not any(np.array_equal(scales[name], plan.layers[name].qparams.scale) for name in ("stem", "depth", "fc"))


def test_rounds_end() -> None:
    job = job_for(conv_net(), "w4a8")
    falling = [1.0 - 0.01 * step for step in range(40)]
    assert judged(job, plan_of(job), *falling).rounds == ROUNDS


@pytest.mark.parametrize("target", ["ort", "paper"])
def test_tuning_lowers_the_held_out_loss(target: str) -> None:
    model = conv_net()
    recipe = Recipe(bits=parse_bits("w3a8"), target=target, ranges=RangeMethod.MINMAX)
    data = feed_for(model, 128)
    result = quantize_model(model, data, replace(recipe, pipeline=Pipeline.LIGHT, rounding=Rounding.NEAREST))
    assert result.tuned is not None
    assert result.tuned.rounds > 0
    assert result.tuned.after < 0.7 * result.tuned.before
    plain = quantize_model(model, data, recipe)
    fresh = feed_for(model, 100, seed=7)
    reference = run(model, fresh)["y"]
    errors = [np.square(run(it.model, fresh)["y"] - reference).mean() for it in (plain, result)]
    assert errors[1] < 0.8 * errors[0]


def test_a_quarter_judges() -> None:
    """The loss before tuning is that of the rounded model on the samples held out."""
    model = conv_net()
    data = feed_for(model, 40)
    job = job_on(model, data, "w3a8")
    plan = plan_of(job)
    tuned = batch_norm_tuning(job, plan)
    assert tuned.rounds > 0
    for told, each in ((tuned.before, plan), (tuned.after, tuned.plan)):
        assert told == pytest.approx(held_out_loss(model, job.write(each), data, ["y"]), rel=1e-5)


def one_feed(model: onnx.ModelProto) -> tuple[onnx.ModelProto, list[Arrays]]:
    return model, [feed_for(model, 24)]


def fixed_batch(model: onnx.ModelProto) -> tuple[onnx.ModelProto, Arrays]:
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 16
    model.graph.output[0].type.tensor_type.shape.dim[0].dim_value = 16
    return model, feed_for(model)


def few(model: onnx.ModelProto) -> tuple[onnx.ModelProto, Arrays]:
    return model, feed_for(model, 2)


@pytest.mark.parametrize("kind", [one_feed, fixed_batch, few])
def test_data_that_cannot_be_parted_is_both(kind: Callable) -> None:
    model, data = kind(conv_net())
    job = job_on(model, data, "w3a8")
    tuned = batch_norm_tuning(job, plan_of(job))
    teacher = Teacher(job.model, first(job.data, len(job.data)), temperature=TEMPERATURE)
    assert tuned.after == pytest.approx(teacher.loss_of(job.write(tuned.plan)), rel=1e-6)


def test_grids_of_activations_stay() -> None:
    model = conv_net()
    shared = {"bits": (Precision(3, 4),), "ranges": RangeMethod.MINMAX}
    data = feed_for(model, 32)
    tuned = quantize_model(model, data, Recipe(Pipeline.LIGHT, **shared))
    plain = quantize_model(scaled_as(model, tuned.model), data, Recipe(**shared))

    def all_qparams(plan: QuantPlan) -> dict[str, QuantParams]:
        return {**plan.shared, **plan.inputs}

    assert all_qparams(tuned.plan).keys() == all_qparams(plain.plan).keys()
    for name, qparams in all_qparams(plain.plan).items():
        assert all_qparams(tuned.plan)[name] == qparams
