"""Layers whose tensors do not fit on disk together: chunk by chunk, the next captured while one trains."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from jobs import plan_of
from layerwise_training import SAMPLES, Seen, job_for, layerwise_of

from models import conv_net
from onnxcalib.algorithms.reconstruction import layerwise as stage
from onnxcalib.algorithms.reconstruction.adaquant import LayerProblem, Optimised
from onnxcalib.pipeline.sweep import candidates_of


@pytest.mark.parametrize("way", ["parallel", "sequential"])
def test_small_chunks_give_the_same(way: str, monkeypatch: pytest.MonkeyPatch, scratch: Path) -> None:
    job = job_for(conv_net(), "w3a4,w8a8")
    given = candidates_of(job) if way == "parallel" else plan_of(job)
    seen = [Seen(monkeypatch), Seen(monkeypatch)]
    held, captured = [], stage.capture

    def watched(model: onnx.ModelProto, names: Any, *rest: Any) -> Any:
        held.append(len(set(names)))
        return captured(model, names, *rest)

    monkeypatch.setattr(stage, "capture", watched)
    for each, most in zip(seen, (stage.DISK_BYTES, 1), strict=True):
        held.clear()
        monkeypatch.setattr(stage, "optimise", each)
        getattr(layerwise_of(job, disk_bytes=most), way)(given)
        assert (max(held) > 2) == (most > 1)  # or one layer's input and output
        assert not list(scratch.iterdir())
    assert seen[0].problems.keys() == seen[1].problems.keys()
    for key in seen[0].problems:
        for left, right in ((each.inputs[key], each.targets[key]) for each in seen):
            assert len(left) == len(right) == SAMPLES
        np.testing.assert_allclose(seen[1].targets[key], seen[0].targets[key], rtol=1e-4, atol=1e-4)
        assert np.mean(np.abs(seen[1].inputs[key] - seen[0].inputs[key]) > 1e-4) < 1e-2  # a code may flip


@pytest.mark.parametrize("bits", ["w3a4", "w3a4,w8a8"])
def test_the_next_chunk_is_captured_while_one_trains(bits: str, monkeypatch: pytest.MonkeyPatch, scratch: Path) -> None:
    job = job_for(conv_net(), bits)
    names, candidates, captured = [layer.name for layer in job.layers], candidates_of(job), stage.capture
    begun = [threading.Event() for _ in names]  # the capture of each layer's tensors
    chunks_on_disk: list[int] = []
    in_time: list[bool] = []

    def watched(*given: Any) -> Any:
        begun[len(chunks_on_disk)].set()
        chunks_on_disk.append(len(list(scratch.iterdir())))
        return captured(*given)

    def trained(problem: LayerProblem) -> Optimised:
        following = begun[names.index(problem.layer.name) + 1 :]
        in_time.append(not following or following[0].wait(timeout=20))
        return Optimised(problem.start, 1.0, 1.0)

    Seen(monkeypatch, trained)
    monkeypatch.setattr(stage, "capture", watched)
    layerwise_of(job, disk_bytes=1).parallel(candidates)
    assert in_time == [True] * len(names) * len(job.recipe.bits)
    assert chunks_on_disk == [1, *[2] * (len(names) - 1)]
