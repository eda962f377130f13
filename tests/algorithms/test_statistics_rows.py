"""Channel statistics of fewer rows, measured once for all plans that are tuned."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jobs import plan_of
from tuning import job_for, tuner_of

from models import conv_net, feed_for, run
from onnxcalib.algorithms import batchnorm
from onnxcalib.algorithms.batchnorm import POSITIONS, ROWS, FloatStatistics, row_step
from onnxcalib.model.channel_statistics import mean_name, variance_name, with_statistics
from onnxcalib.model.subgraph import with_outputs
from onnxcalib.progress import silent


@given(st.lists(st.integers(1, 600), min_size=1, max_size=3))
def test_enough_rows_are_left(sizes: list[int]) -> None:
    step = row_step(sizes)
    left = -(-sizes[0] // step)
    assert step % 2 == 1
    assert left >= min(ROWS, sizes[0])
    assert left * math.prod(sizes[1:]) >= min(POSITIONS, math.prod(sizes))


def test_small_maps_are_measured_whole_and_large_ones_are_not() -> None:
    assert row_step((28, 28)) == 1
    assert row_step((112, 112)) == 7
    assert row_step((16_000,)) == 31


def test_only_every_so_many_rows_count() -> None:
    job = job_for(conv_net())
    layer = next(layer for layer in job.layers if layer.op == "Conv")
    data = feed_for(job.model.proto, 12)
    found = run(with_statistics(job.model.proto, [layer], reach=1e9, row_steps={layer.name: 3}), data)
    rows = run(with_outputs(job.model.proto, [layer.summed]), data)[layer.summed][:, :, ::3].astype(np.float64)
    np.testing.assert_allclose(found[mean_name(layer)].ravel(), rows.mean((0, 2, 3)), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(found[variance_name(layer)].ravel(), rows.var((0, 2, 3)), rtol=1e-4, atol=1e-5)


def test_plans_that_share_float_statistics_are_tuned_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    job = job_for(conv_net(), samples=40)
    plan, runs = plan_of(job), list[Any]()
    alone = tuner_of(job, batch=16).tune(plan, silent)
    floats = FloatStatistics(job.model, job.layers, job.data)
    shared = [tuner_of(job, batch=16, floats=floats).tune(plan, silent)]
    monkeypatch.setattr(
        batchnorm, "with_statistics", lambda *given, **more: runs.append(given) or with_statistics(*given, **more)
    )
    shared.append(tuner_of(job, batch=16, floats=floats).tune(plan, silent))
    for tuned in shared:
        assert tuned.after == alone.after
        for name, params in tuned.plan.layers.items():
            np.testing.assert_array_equal(params.bias, alone.plan.layers[name].bias)
    assert runs
    assert all(given[0] is not job.model.proto for given in runs)  # the float model is not measured again
