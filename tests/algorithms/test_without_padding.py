"""What stands at padding changes nothing that is learned or judged."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import pytest
from jobs import job_on, plan_of
from text_models import embedding_model, padded_feed, token_model

from models import Arrays, normal
from onnxcalib.algorithms.batchnorm import FloatStatistics, Tuner
from onnxcalib.algorithms.broken import output_noise
from onnxcalib.algorithms.second_order import Rounder
from onnxcalib.algorithms.teacher import Teacher
from onnxcalib.pipeline.job import Job
from onnxcalib.progress import silent
from onnxcalib.recipe import BatchNormReference, RangeMethod

MODELS = {"tokens": token_model, "embedding": embedding_model}


def with_other_padding(feed: Arrays) -> Arrays:
    return {**feed, "ids": np.where(feed["mask"] == 1, feed["ids"], 7)}


def with_other_words(feed: Arrays) -> Arrays:
    return {**feed, "ids": np.where(feed["mask"] == 1, 1 + feed["ids"] % 10, feed["ids"])}


def both(model: onnx.ModelProto) -> tuple[Job, Job, Job]:
    """Jobs whose data differ at padding alone, or in all words."""
    feed = padded_feed(24)
    jobs = [job_on(model, each, "w4a8") for each in (feed, with_other_padding(feed), with_other_words(feed))]
    return jobs[0], *(replace(jobs[0], data=job.data) for job in jobs[1:])  # type: ignore[return-value]


def rounded(job: Job, plan: Any) -> dict[str, np.ndarray]:
    rounder = Rounder(job.model, job.layers, job.target, job.data, RangeMethod.MSE, silent)
    layers = rounder.round(plan, 0.5).plan.layers
    return {
        name: np.append(params.weight.reshape(-1), () if params.bias is None else params.bias)
        for name, params in layers.items()
    }


@pytest.mark.parametrize("build", MODELS.values(), ids=MODELS)
def test_nothing_is_learned_from_padding(build: Any) -> None:
    job, padded, other = both(build())
    plan = plan_of(job)
    weights = [rounded(each, plan) for each in (job, padded, other)]
    for name, weight in weights[0].items():
        np.testing.assert_allclose(weights[1][name], weight, atol=1e-5)
    assert any(not np.allclose(weights[2][name], weight, atol=1e-4) for name, weight in weights[0].items())


@pytest.mark.parametrize("most", [64, 1])
def test_batch_norm_tuning_leaves_padding_out(most: int) -> None:
    biased = token_model("[two] h = MatMul (r, w2) [bias2] y = Add (h, b2)", b2=normal(7))
    job, padded, other = both(biased)
    plan = plan_of(job)
    found = []
    for each in (job, padded, other):
        teacher = Teacher(each.model, each.data)
        floats = FloatStatistics(each.model, each.layers, each.data, most=most)
        assert floats.padded
        assert (len(floats.stretches) > 1) == (most == 1)
        how = (each.target, each.data, teacher, BatchNormReference.FLOAT)
        tuner = Tuner(each.model, each.layers, *how, batch=10, floats=floats)
        found.append([stats for part in tuner.statistics(plan, silent) for stats in part.values()])
    for own, same, changed in zip(*found, strict=True):
        np.testing.assert_allclose(same.mean, own.mean, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(same.variance, own.variance, rtol=1e-4, atol=1e-5)
        assert not np.allclose(changed.mean, own.mean, rtol=1e-3)


@pytest.mark.parametrize("build", MODELS.values(), ids=MODELS)
def test_nothing_is_judged_by_padding(build: Any) -> None:
    job, padded, other = both(build())
    model = job.simulate(plan_of(job))
    losses = [Teacher(each.model, each.data).distance_of(model) for each in (job, padded, other)]
    assert losses[0].loss == pytest.approx(losses[1].loss, rel=1e-6)
    assert losses[0].loss != pytest.approx(losses[2].loss, rel=1e-3)
    assert losses[0].sqnr_db == pytest.approx(losses[1].sqnr_db, rel=1e-6)
    noise = [output_noise(each.model, each.data, model).sqnr_db for each in (job, padded)]
    assert noise[0] == pytest.approx(noise[1], rel=1e-6)
