"""All layers trained together: the last state is taken, on falling rates, and targets' constraints are kept."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import onnx
import pytest
from end_to_end_training import QUICK_END_TO_END, TARGETS, held_out_loss, job_for, tuned, tuner_of
from jobs import plan_of

from models import branches, conv_net, run, transformer_block
from onnxcalib.algorithms.reconstruction.end_to_end import END_TO_END, NetworkTraining, Schedule, schedules_for
from onnxcalib.algorithms.reconstruction.weight_quantizers import weight_name
from onnxcalib.model.model_loss import bias_name
from onnxcalib.model.subgraph import with_outputs
from onnxcalib.numerics.quant_params import quantize
from onnxcalib.progress import silent
from onnxcalib.recipe import Engine


@pytest.mark.parametrize("engine", [Engine.AUTO, Engine.STANDARD])
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("builder", [conv_net, transformer_block, branches])
def test_all_layers_train_together(builder: Callable[[], onnx.ModelProto], target: str, engine: Engine) -> None:
    job = job_for(builder(), "w3a4", target)
    plan = plan_of(job)
    found = tuned(job, plan, engine, replace(QUICK_END_TO_END, weight=2e-2))
    assert found.skip_reason is None
    assert found.after < found.before
    assert found.after == pytest.approx(held_out_loss(job, found.plan), rel=1e-4)
    for layer in job.layers:
        old, new = plan.layers[layer.name], found.plan.layers[layer.name]
        assert new.quantized.dtype == old.quantized.dtype
        assert new.qparams.low <= new.quantized.min()
        assert new.quantized.max() <= new.qparams.high
        assert (new.qparams.zero_point == old.qparams.zero_point).all()
        np.testing.assert_array_equal(new.quantized, quantize(new.weight, new.qparams))
    assert any((found.plan.layers[name].quantized != params.quantized).any() for name, params in plan.layers.items())
    assert any(found.plan.inputs[name].scale != qparams.scale for name, qparams in plan.inputs.items())
    assert found.plan.shared is plan.shared


@pytest.mark.parametrize("steps", [7, 23, 40])
def test_the_last_state_is_taken_whatever_its_loss_and_told_as_it_is(steps: int) -> None:
    job = job_for(conv_net())
    plan = plan_of(job)
    schedule = replace(QUICK_END_TO_END, steps=steps, bias=1e3)
    found = tuned(job, plan, schedule=schedule)
    assert found.after > found.before
    assert found.after == pytest.approx(held_out_loss(job, found.plan), rel=1e-4)
    training = NetworkTraining(tuner_of(job, schedule=schedule), plan)
    for step in range(1, steps + 1):
        training.step(step)
    for name, params in training.plan().layers.items():
        np.testing.assert_array_equal(found.plan.layers[name].quantized, params.quantized)


def test_rates_fall_on_where_the_steps_before_left_them() -> None:
    job = job_for(conv_net(), "w3a4")
    plan = plan_of(job)

    def moved(schedule: Schedule) -> float:
        """How far one step of Adam goes: exactly its rate, whatever the gradient."""
        training = NetworkTraining(tuner_of(job, schedule=schedule), plan)
        name = bias_name(job.layers[0])
        start = training.parameters[name].copy()
        training.step(1)
        return float(np.abs(training.parameters[name] - start).max())

    first, last = replace(END_TO_END, steps=6, after=2), replace(END_TO_END, steps=2, before=6, after=0)
    assert moved(first) == pytest.approx(END_TO_END.bias, rel=1e-2)
    assert moved(last) == pytest.approx(END_TO_END.bias * (1 - np.sqrt(0.5)) / 2, rel=1e-2)
    assert moved(replace(last, before=0)) == pytest.approx(END_TO_END.bias, rel=1e-2)


@pytest.mark.parametrize(("bits", "faster"), [("w2a4", 3), ("w3a4", 3), ("w4a4", 1)])
def test_weights_of_few_bits_move_faster(bits: str, faster: float) -> None:
    job = job_for(conv_net(), bits)
    training = NetworkTraining(tuner_of(job, schedule=replace(END_TO_END, steps=1000)), plan_of(job))
    name = weight_name(job.layers[0])
    start = training.parameters[name].copy()
    training.step(1)
    moved = np.abs(training.parameters[name] - start).max()  # in steps of the grid, as the rate is
    assert moved == pytest.approx(faster * END_TO_END.weight, rel=1e-2)


def test_the_workers_are_not_to_be_seen_in_the_result() -> None:
    job = job_for(conv_net(), "w3a4")
    plan = plan_of(job)
    schedule = replace(QUICK_END_TO_END, steps=5)
    found = [replace(tuner_of(job, schedule=schedule), workers=workers).tune(plan, silent).plan for workers in (1, 3)]
    for name, params in found[0].layers.items():
        np.testing.assert_array_equal(params.weight, found[1].layers[name].weight)


def test_hints_are_the_smallest_inputs_of_layers_at_borders_of_blocks() -> None:
    job = job_for(conv_net(), "w3a4")
    whole = NetworkTraining(tuner_of(job, schedule=QUICK_END_TO_END), plan_of(job)).hints
    assert whole
    assert set(whole) <= {layer.input for layer in job.layers[1:]}
    one = NetworkTraining(tuner_of(job, schedule=replace(QUICK_END_TO_END, hints=1)), plan_of(job)).hints
    sizes = {
        name: value.size
        for name, value in run(with_outputs(job.model.proto, whole), next(iter(job.data.batches(1)))).items()
    }
    assert [sizes[name] for name in one] == [min(sizes.values())]


def test_scales_that_are_powers_of_two_stay() -> None:
    job = job_for(conv_net(), "w3a4")
    job = replace(job, target=replace(job.target, power_of_two=True))
    plan = plan_of(job)
    found = tuned(job, plan, schedule=QUICK_END_TO_END)
    assert found.after < found.before
    assert found.plan.inputs is plan.inputs
    for name, params in plan.layers.items():
        np.testing.assert_array_equal(found.plan.layers[name].qparams.scale, params.qparams.scale)


@pytest.mark.parametrize(
    ("steps", "samples", "wanted"),
    [(None, 8, 1600), (None, 384, 1600), (None, 600, 2400), (None, 872, 3200), (None, 10**5, 3200), (50, 872, 800)],
)
def test_more_samples_are_trained_on_for_longer_unless_steps_are_asked_for(
    steps: int | None, samples: int, wanted: int
) -> None:
    early, late = schedules_for(steps, samples, solved=False)
    assert (early.steps, late.steps) == (wanted * 3 // 4, wanted // 4)
    assert (early.after, late.before) == (late.steps, early.steps)
