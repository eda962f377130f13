"""Training that nobody waits for any more."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from models import conv_net, feed_for
from onnxcalib import Pipeline, Recipe
from onnxcalib.algorithms.reconstruction import layerwise as stage
from onnxcalib.algorithms.reconstruction.adaquant import AbandonedError, LayerProblem, Optimised
from onnxcalib.executors.workers import Workers
from onnxcalib.pipeline.job import start
from onnxcalib.pipeline.stages import layerwise
from onnxcalib.pipeline.sweep import candidates_of
from onnxcalib.progress import silent
from onnxcalib.recipe import parse_bits


def test_an_interrupt_ends_what_runs_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without that it would last for as long as the longest layer, which here is forever."""
    model, recipe = conv_net(), Recipe(Pipeline.ADVANCED, parse_bits("w3a4"), steps=10**9)
    job = start(model, feed_for(model, 24), recipe, None, silent, Workers(2)).jobs[0]
    whole, begun, abandoned = stage.optimise, threading.Event(), []

    def learn(problem: LayerProblem, *given: Any) -> Optimised:
        if problem.layer is job.layers[0]:
            begun.wait()
            raise KeyboardInterrupt
        begun.set()
        try:
            return whole(problem, *given)
        except AbandonedError:
            abandoned.append(problem.layer.name)
            raise

    monkeypatch.setattr(stage, "optimise", learn)
    with pytest.raises(KeyboardInterrupt):
        layerwise(job).parallel(candidates_of(job))
    assert 1 <= len(abandoned) <= 2
