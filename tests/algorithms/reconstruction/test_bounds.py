"""No grid leaves the range of the activation before it, whatever moves it: runtimes would keep the layer in float."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import end_to_end_training as end_to_end
import layerwise_training as layerwise
import onnx
import pytest
from jobs import plan_of

from models import clipped_net, op_types
from onnxcalib import RangeMethod, Recipe, quantize
from onnxcalib.checks.check import check_model
from onnxcalib.model import layer_loss as part
from onnxcalib.numerics.quant_params import QuantParams
from onnxcalib.pipeline.job import Job
from onnxcalib.pipeline.stages import final_scales
from onnxcalib.pipeline.sweep import candidates_of
from onnxcalib.plan import QuantPlan
from onnxcalib.recipe import Engine, LayerOptimizer, parse_bits
from onnxcalib.runtime.optimized import optimized
from onnxcalib.targets import find_target

CUTS = [(0.0, 1.0), (-1.0, 1.0)]
RATES = [1e-2, 0.5]


def assert_fused(model: onnx.ModelProto, path: Path) -> None:
    """Every op has an integer kernel on the installed version, and `check` finds nothing, for older ones either."""
    onnx.save(model, path)
    assert {"Conv", "FusedConv", "Add", "Relu"}.isdisjoint(op_types(optimized(path)))
    assert check_model(model, find_target("ort-compat")) == []


def assert_within(job: Job, plan: QuantPlan) -> None:
    for tensors in (plan.shared, plan.inputs):
        for name, qparams in tensors.items():
            low, high = job.points.tensors[name].bounds
            assert low <= qparams.range[0], name
            assert qparams.range[1] <= high, name


def assert_sound(job: Job, plan: QuantPlan, folder: Path) -> None:
    """The plan as it is, and as it is written."""
    for number, each in enumerate((plan, final_scales(job, plan))):
        assert_within(job, each)
        assert_fused(job.write(each), folder / f"{number}.onnx")


def moved(before: QuantParams | None, after: QuantParams | None) -> bool:
    return before is not None and after is not None and before.scale != after.scale


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("bits", ["w8a8", "w4a4"])
def test_ranges_of_extremes(cut: tuple[float, float], bits: str, tmp_path: Path) -> None:
    model = clipped_net(*cut)
    recipe = Recipe(bits=parse_bits(bits), ranges=RangeMethod.MINMAX)
    assert_fused(quantize(model, layerwise.job_for(model).data, recipe).model, tmp_path / "model.onnx")


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("bits", ["w2a8", "w3a4"])
def test_training_of_single_layers(cut: tuple[float, float], bits: str, rate: float, tmp_path: Path) -> None:
    job = layerwise.job_for(clipped_net(*cut), bits)
    plan = plan_of(job)
    rates = {**layerwise.QUICK.rates, part.INPUT_RANGE: rate, part.INPUT_LOW: rate}
    found, _ = layerwise.layerwise_of(job, schedule=replace(layerwise.QUICK, steps=40, rates=rates)).sequential(plan)
    assert_sound(job, found, tmp_path)
    assert any(moved(plan.inputs.get(name), qparams) for name, qparams in found.inputs.items())


@pytest.mark.parametrize("optimizer", LayerOptimizer)
def test_training_in_parallel(optimizer: LayerOptimizer, tmp_path: Path) -> None:
    job = layerwise.job_for(clipped_net(), "w3a4,w3a8")
    schedule = replace(layerwise.QUICK, steps=40, rates={**layerwise.QUICK.rates, part.INPUT_RANGE: 0.1})
    found = layerwise.layerwise_of(job, schedule=schedule, optimizer=optimizer).parallel(candidates_of(job))
    for precision in job.recipe.bits:
        assert_sound(job, found.stitch(dict.fromkeys(found.layers, precision)), tmp_path)


@pytest.mark.parametrize("engine", [Engine.AUTO, Engine.STANDARD])
@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("bits", ["w3a8", "w3a4"])
def test_training_through_the_network(bits: str, rate: float, engine: Engine, tmp_path: Path) -> None:
    job = end_to_end.job_for(clipped_net(), bits)
    plan = plan_of(job)
    found = end_to_end.tuned(job, plan, engine, replace(end_to_end.QUICK_END_TO_END, scale=rate))
    assert_sound(job, found.plan, tmp_path)
    assert any(moved(plan.inputs[name], qparams) for name, qparams in found.plan.inputs.items())
    # What is told of the plan is what it does: the parameters were held back, not the grids alone.
    assert found.after == pytest.approx(end_to_end.held_out_loss(job, found.plan), rel=1e-4)
