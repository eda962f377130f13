"""Layers trained by themselves: what each is given to learn from, what may change, and what stays."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from jobs import plan_of
from layerwise_training import QUICK, SAMPLES, Seen, job_for, layerwise_of
from said import refused

from models import branches, build, conv1d, conv_net, normal, run, transformer_block, two_gemms
from onnxcalib.algorithms.reconstruction.adaquant import LayerProblem, Optimised
from onnxcalib.algorithms.reconstruction.layerwise import with_layer
from onnxcalib.autodiff.interface import NoGradientError
from onnxcalib.autodiff.standard.rules import RULES
from onnxcalib.model.qdq import write_qdq
from onnxcalib.model.subgraph import with_outputs
from onnxcalib.numerics.quant_params import QuantParams, fake_quantize
from onnxcalib.pipeline.job import Job
from onnxcalib.pipeline.sweep import candidates_of
from onnxcalib.plan import Candidates, LayerParams
from onnxcalib.recipe import Engine, LayerOptimizer
from onnxcalib.runtime.threads import default_workers
from onnxcalib.targets import Placement

LONGER = replace(QUICK, steps=40)


def contents(params: LayerParams) -> list[bytes]:
    qparams = [params.qparams, *([params.input] if params.input is not None else [])]
    arrays = [
        params.quantized,
        params.weight,
        *(each for qparams in qparams for each in (qparams.scale, qparams.zero_point)),
    ]
    return [array.tobytes() for array in arrays] + [b"" if params.bias is None else params.bias.tobytes()]


def all_contents(candidates: Candidates) -> dict[str, dict[str, list[bytes]]]:
    return {
        name: {str(precision): contents(params) for precision, params in choices.items()}
        for name, choices in candidates.layers.items()
    }


def float_tensors(job: Job) -> dict[str, np.ndarray]:
    names = [name for node in job.model.proto.graph.node for name in node.output]
    feed = next(iter(job.data.batches(SAMPLES)))
    return {**feed, **run(with_outputs(job.model.proto, names), feed)}


# In parallel.


@pytest.mark.parametrize("target", ["ort", "paper"])
@pytest.mark.parametrize("builder", [conv_net, transformer_block])
def test_every_layer_at_every_precision_whatever_the_workers(
    builder: Callable[[], onnx.ModelProto], target: str, scratch: Path
) -> None:
    job = job_for(builder(), "w3a4,w8a8", target)
    candidates = candidates_of(job)
    one, two = (layerwise_of(job, workers=workers).parallel(candidates) for workers in (1, 2))
    assert all_contents(one) == all_contents(two)
    assert one.layers.keys() == {layer.name for layer in job.layers}
    assert all(set(choices) == set(job.recipe.bits) for choices in one.layers.values())
    assert all_contents(one) != all_contents(candidates)
    assert replace(one, layers={}) == replace(candidates, layers={})
    assert not list(scratch.iterdir())
    for precision in job.recipe.bits:
        plan = one.stitch(dict.fromkeys(one.layers, precision))
        run(job.write(plan), next(iter(job.data.batches(4))))


def test_progress_counts_layers_and_precisions() -> None:
    job = job_for(conv1d(), "w3a4,w8a8")
    told: list[tuple[int, int]] = []
    layerwise_of(job, progress=lambda _stage, done, total: told.append((done, total))).parallel(candidates_of(job))
    assert told == [(done, 4) for done in (1, 2, 3, 4)]


def test_a_shared_grid_stays_and_a_lone_readers_is_trained() -> None:
    job = job_for(transformer_block(), "w3a4,w8a8", "paper")
    found = layerwise_of(job).parallel(candidates_of(job))
    for precision in job.recipe.bits:
        assert all(found.layers[name][precision].input is None for name in ("query", "key", "value"))
    narrow = job.recipe.bits[0]
    assert found.layers["down"][narrow].input is not None
    plan = found.stitch(dict.fromkeys(found.layers, narrow))
    assert plan.layer_input("u") is found.layers["down"][narrow].input
    assert plan.layer_input("x") is found.inputs["x"][4]


def test_what_each_layer_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    job = job_for(conv_net(), "w3a4,w8a8", "ort")
    candidates, seen, tensors = candidates_of(job), Seen(monkeypatch), float_tensors(job)
    layerwise_of(job).parallel(candidates)
    assert len(seen.problems) == 2 * len(job.layers)
    assert {layer.input for layer in job.layers} & set(candidates.shared) == {"r1", "f"}
    for layer in job.layers:
        for precision in job.recipe.bits:
            key = (layer.name, precision.activation)
            np.testing.assert_allclose(seen.targets[key], tensors[layer.activated], rtol=1e-4, atol=1e-4)
            shared = candidates.shared.get(layer.input)
            read = tensors[layer.input]
            if shared is not None:
                # Values lie on the grid that all readers see; a code or two may round the other way.
                off = np.abs(seen.inputs[key] - fake_quantize(read, shared))
                assert np.mean(off > 1e-4) < 1e-3
            else:
                np.testing.assert_allclose(seen.inputs[key], read, rtol=1e-4, atol=1e-4)
            problem = seen.problems[key]
            own = candidates.inputs[layer.input].get(precision.activation)
            assert (problem.input_scheme is None) == (own is None) == (shared is not None and precision.activation == 8)
            assert problem.qparams is (own or shared)
            assert problem.start is candidates.layers[layer.name][precision]
            assert problem.bits == precision.weight
            assert problem.trains_input


def test_carried_inputs_at_eight_bits_keep_their_grid() -> None:
    job = job_for(conv_net(), "w3a4,w8a8", "ort")
    found = layerwise_of(job, schedule=LONGER).parallel(candidates_of(job))
    narrow, wide = job.recipe.bits
    assert all(found.layers[name][wide].input is None for name in ("depth", "fc"))
    trained = [name for name in found.layers if found.layers[name][narrow].input is not None]
    assert trained
    plan = found.stitch(dict.fromkeys(found.layers, narrow))
    assert plan.shared is found.shared
    assert all(plan.inputs[found.tensors[name]] is found.layers[name][narrow].input for name in trained)


# In turn.


def silenced(problem: LayerProblem) -> Optimised:
    """An answer that nobody mistakes for another: all weights zero."""
    qparams = problem.start.qparams
    quantized = np.zeros_like(problem.start.quantized)
    if qparams.zero_point.any():
        quantized += np.expand_dims(qparams.zero_point, list(range(1, quantized.ndim))).astype(quantized.dtype)
    return Optimised(replace(problem.start, quantized=quantized), 1.0, 0.5)


@pytest.mark.parametrize("target", ["ort", "paper"])
def test_inputs_come_from_the_layers_before_as_they_are_now(
    target: str, monkeypatch: pytest.MonkeyPatch, scratch: Path
) -> None:
    model = conv1d()
    job = job_for(model, "w3a4", target)
    plan, seen, tensors = plan_of(job), Seen(monkeypatch, silenced), float_tensors(job)
    transposed, skip_reasons = layerwise_of(job).sequential(plan)
    assert skip_reasons == ()
    assert np.array_equal(seen.inputs["first", 4], tensors["x"])
    bias = plan.layers["first"].bias
    if target == "ort":
        step = plan.layers["first"].qparams.scale * plan.layer_input("x").scale
        bias = np.rint(bias / step) * step
    bias = np.maximum(bias, 0).reshape(1, -1, 1)
    wanted = np.broadcast_to(bias, tensors["r"].shape)
    np.testing.assert_allclose(seen.inputs["second", 4], wanted, atol=1e-4)
    np.testing.assert_allclose(seen.targets["second", 4], tensors["y"], rtol=1e-4, atol=1e-4)
    assert all(
        np.array_equal(transposed.layers[name].quantized, silenced_codes(seen, name)) for name in ("first", "second")
    )
    assert not list(scratch.iterdir())


def silenced_codes(seen: Seen, name: str) -> np.ndarray:
    return silenced(seen.problems[name, 4]).params.quantized


def changed(problem: LayerProblem) -> Optimised:
    """An answer that is felt downstream: other quantized values, another bias, a wider grid where it may be."""
    qparams, params = problem.qparams, problem.start
    wider = replace(qparams, scale=(1.5 * qparams.scale).astype(np.float32)) if problem.trains_input else None
    quantized = np.where(
        np.arange(params.quantized.size).reshape(params.quantized.shape) % 5, params.quantized, params.qparams.high
    )
    bias = None if params.bias is None else params.bias + np.float32(0.2)
    return Optimised(
        replace(params, quantized=quantized.astype(params.quantized.dtype), bias=bias, input=wider), 1.0, 0.5
    )


@pytest.mark.parametrize("target", ["ort", "paper"])
@pytest.mark.parametrize("builder", [conv_net, transformer_block, branches])
def test_every_layer_reads_the_network_as_it_is_by_then(
    builder: Callable[[], onnx.ModelProto], target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = job_for(builder(), "w3a4", target)
    plan, seen = plan_of(job), Seen(monkeypatch, changed)
    transposed, _ = layerwise_of(job).sequential(plan)
    assert transposed.shared is plan.shared
    placed = replace(job.target, placement=Placement.LAYER_INPUTS)
    feed = next(iter(job.data.batches(SAMPLES)))
    inputs = {value.name for value in job.model.proto.graph.input}
    for layer in job.layers:
        read = feed.get(layer.input)
        if layer.input not in inputs:
            read = run(with_outputs(write_qdq(job.model, job.layers, plan, placed), [layer.input]), feed)[layer.input]
        if layer.input in plan.shared:
            read = fake_quantize(read, plan.shared[layer.input])
        off = np.abs(seen.inputs[layer.name, 4] - read)
        assert np.mean(off > 1e-3) < 1e-2, layer.name  # a code may flip
        assert seen.problems[layer.name, 4].qparams is plan.layer_input(layer.input)
        assert seen.problems[layer.name, 4].start is plan.layers[layer.name]
        plan = with_layer(plan, layer, transposed.layers[layer.name])
    assert plan == transposed


def test_only_improved_layers_change(monkeypatch: pytest.MonkeyPatch) -> None:
    job = job_for(conv1d())
    plan = plan_of(job)

    def answer(problem: LayerProblem) -> Optimised:
        better = problem.layer.name == "second"
        return Optimised(silenced(problem).params, 1.0, 0.9 if better else 1.0)

    Seen(monkeypatch, answer)
    transposed, _ = layerwise_of(job).sequential(plan)
    assert transposed.layers["first"] is plan.layers["first"]
    assert transposed.layers["second"] is not plan.layers["second"]
    Seen(monkeypatch)
    assert layerwise_of(job).sequential(plan)[0] is plan


@pytest.mark.parametrize("optimizer", LayerOptimizer)
@pytest.mark.parametrize("target", ["ort", "paper"])
def test_training_in_turn_ends_nearer_to_the_float_model(target: str, optimizer: LayerOptimizer, scratch: Path) -> None:
    job = job_for(conv_net(), "w3a4", target, 64)
    plan = plan_of(job)
    transposed, skip_reasons = layerwise_of(job, optimizer=optimizer, schedule=LONGER).sequential(plan)
    assert skip_reasons == ()
    assert plan.layers.keys() == transposed.layers.keys()
    feed = next(iter(job.data.batches(64)))
    reference = run(job.model.proto, feed)["y"]
    before, after = (np.mean((run(job.write(each), feed)["y"] - reference) ** 2) for each in (plan, transposed))
    assert after < before
    assert not list(scratch.iterdir())


def test_with_layer_takes_the_layers_own_grid() -> None:
    job = job_for(conv1d())
    plan = plan_of(job)
    layer, params = job.layers[1], plan.layers["second"]
    assert with_layer(plan, layer, params).inputs == plan.inputs
    own: QuantParams = replace(plan.layer_input("r"), scale=np.float32(7))
    moved = with_layer(plan, layer, replace(params, input=own))
    assert moved.layer_input("r") is own
    assert moved.layer_input("x") is plan.layer_input("x")
    assert plan.layer_input("r").scale != 7


# What cannot be trained.


def test_a_layer_without_gradient_keeps_its_start(monkeypatch: pytest.MonkeyPatch, scratch: Path) -> None:
    monkeypatch.delitem(RULES, "Tanh")
    job = job_for(two_gemms("Tanh"), samples=64)
    candidates, plan = candidates_of(job), plan_of(job)
    layers = layerwise_of(job, engine=Engine.STANDARD, schedule=LONGER)
    found = layers.parallel(candidates)
    precision = job.recipe.bits[0]
    assert found.layers["one"][precision] is candidates.layers["one"][precision]
    assert found.layers["two"][precision] is not candidates.layers["two"][precision]
    transposed, skip_reasons = layers.sequential(plan)
    assert transposed.layers["one"] is plan.layers["one"]
    assert transposed.layers["two"] is not plan.layers["two"]
    (skip_reason,) = skip_reasons
    assert "Tanh node 'act'" in skip_reason
    strict = replace(layers, trainer=replace(layers.trainer, strict=True))
    for train in (lambda: strict.parallel(candidates), lambda: strict.sequential(plan)):
        with refused(NoGradientError, "Tanh node 'act'") as caught:
            train()
        assert (caught.value.op, caught.value.node) == ("Tanh", "act")
        assert not list(scratch.iterdir())


def test_rows_that_are_no_samples_keep_their_start() -> None:
    text = """
    net (float[N,5,6] x) => (float[5,N,3] y) {
        [one] a = MatMul (x, w1)
        [turn] t = Transpose <perm=[1,0,2]> (a)
        [two] y = MatMul (t, w2)
    }"""
    job = job_for(build(text, w1=normal(6, 6), w2=normal(6, 3)), samples=64)
    candidates, plan = candidates_of(job), plan_of(job)
    found = layerwise_of(job, schedule=LONGER).parallel(candidates)
    precision = job.recipe.bits[0]
    assert found.layers["one"][precision] is not candidates.layers["one"][precision]
    assert found.layers["two"][precision] is candidates.layers["two"][precision]
    transposed, skip_reasons = layerwise_of(job, strict=True).sequential(plan)
    assert transposed.layers["two"] is plan.layers["two"]
    assert len(skip_reasons) == 1
    assert "'t'" in skip_reasons[0]


def test_there_is_a_worker_for_every_core_that_the_process_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1, 4, 6}, raising=False)
    assert default_workers() == 3
