"""Batch-norm tuning in stretches of a few layers, held to that of the whole network in one graph."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import pytest
from jobs import plan_of
from tuning import job_for, tuner_of

from models import BUILDERS, conv_net
from onnxcalib.algorithms import batchnorm
from onnxcalib.algorithms.batchnorm import FloatStatistics
from onnxcalib.model.subgraph import with_outputs
from onnxcalib.pipeline.job import Job
from onnxcalib.progress import silent
from onnxcalib.recipe import BatchNormReference
from onnxcalib.runtime.session import Session


@pytest.mark.parametrize("reference", BatchNormReference)
@pytest.mark.parametrize("builder", BUILDERS.values(), ids=BUILDERS)
def test_stretches_have_the_statistics_of_the_whole(
    builder: Callable[[], onnx.ModelProto], reference: BatchNormReference
) -> None:
    job = job_for(builder(), samples=24)
    plan, expected = plan_of(job), None
    for most in (64, 2, 1):
        floats = FloatStatistics(job.model, job.layers, job.data, most=most)
        for _ in range(2):  # the second time the float model's are known
            found = tuner_of(job, reference, batch=10).statistics(plan, silent, floats=floats)
            expected = expected or found
            for mine, whole in zip(found, expected, strict=True):
                assert mine.keys() == whole.keys()
                for name, each in mine.items():
                    np.testing.assert_allclose(each.mean, whole[name].mean, rtol=1e-4, atol=1e-5)
                    np.testing.assert_allclose(each.variance, whole[name].variance, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("target", ["ort", "paper"])
def test_stretches_are_tuned_as_the_whole_is(target: str) -> None:
    job = job_for(conv_net(), "w4a4", target, samples=40)
    plan = plan_of(job)
    told = list[tuple[int, int]]()
    whole = tuner_of(job, batch=16).tune(plan, silent)
    floats = FloatStatistics(job.model, job.layers, job.data, most=2)
    assert len(floats.stretches) > 1
    parted = tuner_of(job, batch=16, floats=floats).tune(plan, lambda _, done, most: told.append((done, most)))
    assert (parted.rounds, parted.after) == (whole.rounds, pytest.approx(whole.after, rel=1e-4))
    for name, params in parted.plan.layers.items():
        np.testing.assert_allclose(params.bias, whole.plan.layers[name].bias, rtol=1e-4, atol=1e-4)
        np.testing.assert_array_equal(params.quantized, whole.plan.layers[name].quantized)
    done = [each for each, _ in told]
    assert done == sorted(done)
    assert done[-1] <= told[-1][1]


def test_fewer_samples_are_measured_together_where_layers_make_much(monkeypatch: pytest.MonkeyPatch) -> None:
    job = job_for(conv_net(), samples=40)
    every = FloatStatistics(job.model, job.layers, job.data).batch
    made = _bytes_of_layers(job)
    monkeypatch.setattr(batchnorm, "BATCH_BYTES", 5 * made)
    assert (every, FloatStatistics(job.model, job.layers, job.data).batch) == (batchnorm.BATCH, 4)
    monkeypatch.setattr(batchnorm, "BATCH_BYTES", made // 2)
    floats = FloatStatistics(job.model, job.layers, job.data)
    assert floats.batch == 1
    assert (
        tuner_of(job, floats=floats).tune(plan_of(job), silent).after <= tuner_of(job).tune(plan_of(job), silent).before
    )


def test_what_is_kept_of_a_run_holds_none_of_its_tensors() -> None:
    job = job_for(conv_net(), samples=40)
    floats = FloatStatistics(job.model, job.layers, job.data)
    tuner_of(job, floats=floats).statistics(plan_of(job), silent, floats=floats)
    kept = [value for known in floats._known.values() for value in known.values()]
    assert kept
    assert all(value.flags.owndata for value in kept)


def _bytes_of_layers(job: Job) -> int:
    """What the layers make of a sample."""
    feed, names = next(iter(job.data.batches(1))), list(dict.fromkeys(layer.summed for layer in job.layers))
    return sum(value.nbytes for value in Session(with_outputs(job.model.proto, names)).run(feed).values())
