"""Grids with a scale a block, trained: by layers and end to end, by either engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from end_to_end_training import QUICK_END_TO_END, held_out_loss, tuned
from jobs import correlated_data, job_on, plan_of
from single_layers import Single, activations, single, start_of

from models import mlp, transformer_block
from onnxcalib.algorithms.reconstruction.adaquant import STANDARD, LayerProblem, Optimised, _loss, optimise, parts
from onnxcalib.autodiff.gradients import Gradients
from onnxcalib.model.layer_loss import ROUNDING, TARGET, WEIGHT, WEIGHT_RANGE, layer_loss, starts
from onnxcalib.numerics.quant_params import dequantize, of_each, quantize
from onnxcalib.numerics.range_estimators import blockwise_qparams
from onnxcalib.plan import LayerParams
from onnxcalib.recipe import Engine, LayerOptimizer, Pipeline, RangeMethod
from onnxcalib.runtime.installed import find_runtime
from onnxcalib.targets import find_target

KINDS = ["gemm_relu", "gemm_turned", "matmul_clip", "matmul_bare"]
ENGINES = [Engine.STANDARD, *([Engine.TRAINING] if find_runtime().gradients else [])]
TARGETS = {"ort": find_target("ort").weight_only, "paper": find_target("paper")}
SAMPLES = 256
GENTLE = replace(STANDARD, steps=80, rates={**STANDARD.rates, ROUNDING: 0.1})
TOGETHER = replace(QUICK_END_TO_END, bias=1e-3, weight=1e-2, scale=1e-3)


def problem_of(case: Single, target: str, block: int, optimizer: LayerOptimizer) -> LayerProblem:
    """A layer that reads floats, at two bits in blocks."""
    chosen = TARGETS[target]
    axis = 1 - case.layer.channel_axis
    qparams = blockwise_qparams(case.weight, chosen.weight_scheme(2), axis, block, RangeMethod.MSE)
    start = LayerParams(quantize(case.weight, qparams), qparams, case.bias, case.weight)
    return LayerProblem(case.model, case.layer, chosen, start, 2, None, None, False, optimizer)


def error_of(case: Single, params: LayerParams) -> float:
    """The relative error on held-out samples with every block multiplied out by hand."""
    axis, block = params.qparams.axis, params.qparams.block
    assert axis is not None
    assert block is not None
    size = params.quantized.shape[axis]
    scale, zero = (np.repeat(each, block, axis) for each in (params.qparams.scale, params.qparams.zero_point))
    scale, zero = (np.take(each, range(size), axis) for each in (scale, zero))
    real = ((params.quantized.astype(np.int32) - zero) * scale).astype(np.float32)
    chosen = parts(len(case.inputs))[1]
    gap = case.output(real, params.bias, case.inputs[chosen]).astype(np.float64) - case.targets[chosen]
    return float(np.mean(gap**2)) / case.energy


def trained(folder: Path, case: Single, problem: LayerProblem, engine: Engine) -> Optimised:
    folder.mkdir(exist_ok=True)
    inputs, targets = activations(folder / "inputs", case.inputs), activations(folder / "targets", case.targets)
    return optimise(problem, inputs, targets, GENTLE, engine, 0, 1)


@pytest.mark.parametrize("optimizer", LayerOptimizer)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", KINDS)
def test_blocks_train_and_the_error_is_that_of_the_codes(
    name: str, target: str, optimizer: LayerOptimizer, tmp_path: Path
) -> None:
    case = single(name, SAMPLES)
    problem = problem_of(case, target, 4, optimizer)  # ten and twelve values leave a last block that is not full
    found = trained(tmp_path, case, problem, Engine.AUTO)
    assert found.after < found.before
    assert error_of(case, problem.start) == pytest.approx(found.before, rel=1e-3)
    assert error_of(case, found.params) == pytest.approx(found.after, rel=1e-3)
    qparams, start = found.params.qparams, problem.start.qparams
    assert (qparams.axis, qparams.block, qparams.scale.shape) == (start.axis, start.block, start.scale.shape)
    assert (qparams.scale != start.scale).any() == (optimizer is LayerOptimizer.ADAQUANT)
    np.testing.assert_array_equal(found.params.quantized, quantize(found.params.weight, qparams))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", ["gemm_turned", "matmul_bare"])
def test_gradients_of_a_layer_in_blocks(name: str, engine: Engine) -> None:
    """By hand: straight through for weights, and for a block's range what its values lie off the grid, in steps."""
    case = single(name, SAMPLES)
    problem = problem_of(case, "ort", 4, LayerOptimizer.ADAQUANT)
    loss = _loss(problem, replace(GENTLE, relative=False), case.energy)
    proto = layer_loss(case.model, case.layer, loss, case.shapes)
    gradients = Gradients(proto, starts(loss), engine, 1)
    gradients.run({case.layer.input: case.inputs, TARGET: case.targets})
    qparams = problem.start.qparams
    real = dequantize(problem.start.quantized, qparams).astype(np.float64)
    wide = np.float64(case.inputs).reshape(-1, case.inputs.shape[-1])
    matrix = real.T if case.layer.transposed else real
    bias = 0.0 if case.bias is None else case.bias
    off = wide @ matrix + bias - case.targets.reshape(-1, case.targets.shape[-1])
    dy = 2 * off / off.size / case.energy
    by_weight = wide.T @ dy
    by_weight = by_weight.T if case.layer.transposed else by_weight
    scale, zero = (each.astype(np.float64) for each in of_each(qparams, case.weight.shape))
    steps, codes = case.weight / scale, problem.start.quantized - zero
    inside = (qparams.low - 0.5 < steps) & (steps < qparams.high + 0.5)
    np.testing.assert_allclose(gradients.gradients[WEIGHT], by_weight * inside, rtol=1e-3, atol=1e-5)
    by_scale = by_weight * (codes - np.where(inside, steps, 0.0))
    assert qparams.axis is not None
    starts_at = np.arange(0, case.weight.shape[qparams.axis], 4)
    wanted = np.add.reduceat(by_scale, starts_at, qparams.axis) / qparams.high
    np.testing.assert_allclose(gradients.gradients[WEIGHT_RANGE], wanted, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_network_in_blocks_trains_end_to_end(engine: Engine) -> None:
    model = transformer_block()
    job = job_on(model, correlated_data(model, 160), "w4", pipeline=Pipeline.ADVANCED, block_size=16)
    plan = plan_of(job)
    found = tuned(job, plan, engine, TOGETHER)
    assert found.skip_reason is None
    assert found.after < found.before
    # Older runtimes round what they multiply weights in blocks with.
    assert found.after == pytest.approx(held_out_loss(job, found.plan), rel=0.02)
    for name, params in found.plan.layers.items():
        assert params.qparams.block == 16
        assert (params.qparams.scale != plan.layers[name].qparams.scale).any()
        np.testing.assert_array_equal(params.quantized, quantize(params.weight, params.qparams))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("builder", "block"), [(transformer_block, None), (transformer_block, 16), (mlp, 32)])
def test_scales_train_alone_under_codes_that_stay(
    builder: Callable[[], onnx.ModelProto], block: int | None, engine: Engine
) -> None:
    model = builder()
    job = job_on(model, correlated_data(model, 160), "w3", pipeline=Pipeline.ADVANCED, block_size=block)
    plan = plan_of(job)
    found = tuned(job, plan, engine, replace(TOGETHER, weight=None, bias=0.0, scale=3e-3, last=False))
    assert found.skip_reason is None
    assert found.after < 0.9 * found.before
    assert found.after == pytest.approx(held_out_loss(job, found.plan), rel=0.02)
    for name, params in found.plan.layers.items():
        assert (params.qparams.scale != plan.layers[name].qparams.scale).any()
        np.testing.assert_array_equal(params.quantized, plan.layers[name].quantized)
        np.testing.assert_array_equal(params.quantized, quantize(params.weight, params.qparams))


def test_a_start_of_channels_stays_one_of_channels(tmp_path: Path) -> None:
    case = single("matmul_bare", SAMPLES)
    start = start_of(case, TARGETS["ort"], 3)
    problem = LayerProblem(case.model, case.layer, TARGETS["ort"], start, 3, None, None, False)
    found = trained(tmp_path, case, problem, Engine.AUTO)
    assert found.after < found.before
    assert found.params.qparams.block is None
