"""Layers of one structure train in the same sessions, and come out as if each had its own."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import onnx
import pytest
from layerwise_training import job_for, layerwise_of

from models import build, normal
from onnxcalib.algorithms.reconstruction import adaquant
from onnxcalib.autodiff import gradients
from onnxcalib.autodiff.opened import OpenedSessions
from onnxcalib.pipeline.sweep import candidates_of
from onnxcalib.plan import Candidates
from onnxcalib.recipe import Engine, LayerOptimizer
from onnxcalib.runtime.bound import BoundSession
from onnxcalib.runtime.installed import find_runtime

ENGINES = [Engine.STANDARD, *([Engine.TRAINING] if find_runtime().gradients else [])]


def chain(*channels: int, plain: int | None = None) -> onnx.ModelProto:
    """Convolutions one after another, with an activation after each but one."""
    nodes, stored, tensor = [], {}, "x"
    for place, (before, after) in enumerate(pairwise(channels)):
        end = "y" if place == len(channels) - 2 else f"r{place}"
        stored[f"w{place}"] = normal(after, before, 3, 3, seed=place, scale=0.3)
        stored[f"b{place}"] = normal(after, seed=place, scale=0.2)
        made = f"c{place}"
        nodes.append(f"[conv{place}] {made} = Conv <pads=[1,1,1,1]> ({tensor}, w{place}, b{place})")
        nodes.append(f"[act{place}] {end} = {'LeakyRelu' if place == plain else 'Relu'} ({made})")
        tensor = end
    given, made = (f"float[N,{count},6,6]" for count in (channels[0], channels[-1]))
    return build(f"net ({given} x) => ({made} y) {{ {' '.join(nodes)} }}", **stored)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[BoundSession]:
    """Every session of training that is opened."""
    sessions: list[BoundSession] = []

    def counted(model: onnx.ModelProto, threads: int) -> BoundSession:
        sessions.append(BoundSession(model, threads))
        return sessions[-1]

    monkeypatch.setattr(gradients, "BoundSession", counted)
    return sessions


def bytes_of(found: Candidates) -> list[bytes]:
    layers = [params for choices in found.layers.values() for params in choices.values()]
    arrays = [(each.quantized, each.qparams.scale, each.qparams.zero_point, each.weight, each.bias) for each in layers]
    inputs = [(each.input.scale, each.input.zero_point) for each in layers if each.input is not None]
    return [np.asarray(array).tobytes() for each in (*arrays, *inputs) for array in each if array is not None]


def test_layers_of_one_structure_share_their_sessions(opened: list[BoundSession]) -> None:
    counts = []
    for channels, plain in (((4, 4), None), ((4, 4, 4, 4), None), ((4, 4, 4, 4), 1), ((4, 4, 6), None)):
        job = job_for(chain(*channels, plain=plain), "w3a4", "paper")
        opened.clear()
        layerwise_of(job).parallel(candidates_of(job))
        counts.append(len(opened))
    alone, shared, other_activation, other_shape = counts
    assert alone == shared > 0
    assert other_activation == other_shape == 2 * alone


@pytest.mark.parametrize("optimizer", LayerOptimizer)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("target", ["ort", "paper"])
def test_what_shares_comes_out_as_if_alone(
    target: str, engine: Engine, optimizer: LayerOptimizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = job_for(chain(4, 4, 4, 4), "w3a4,w8a8", target)
    candidates, how = candidates_of(job), {"engine": engine, "optimizer": optimizer}
    shared, threads = (bytes_of(layerwise_of(job, workers, **how).parallel(candidates)) for workers in (1, 2))
    monkeypatch.setattr(adaquant, "SHARED_BYTES", 0)
    alone = bytes_of(layerwise_of(job, **how).parallel(candidates))
    assert shared == alone == threads
    assert alone != bytes_of(candidates)


def test_those_that_were_asked_for_last_stay() -> None:
    made: list[str] = []

    def make() -> str:
        made.append(asked)
        return asked

    sessions = OpenedSessions(2)
    for asked in ("a", "b", "a", "c", "a", "b"):
        assert sessions.get(asked, make) == asked
    assert made == ["a", "b", "c", "b"]
    sessions.close()
    assert sessions.get("b", make) == "b"
    assert made[-2:] == ["b", "b"]
