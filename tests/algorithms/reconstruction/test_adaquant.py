"""AdaQuant on single layers: what was simulated is what the integers give, and what may move and what may not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from single_layers import Single, activations, channels, problem_of, single

from models import HAS_TRAINING, run
from onnxcalib.algorithms.reconstruction.adaquant import (
    FEWEST,
    HELD_OUT_MOST,
    PAPER,
    STANDARD,
    LayerProblem,
    LayerTraining,
    Optimised,
    Schedule,
    optimise,
    parts,
)
from onnxcalib.algorithms.rounding import BIAS_STEPS
from onnxcalib.model import layer_loss as part
from onnxcalib.numerics.quant_params import quantize
from onnxcalib.plan import LayerParams
from onnxcalib.recipe import Engine, LayerOptimizer
from onnxcalib.targets import Target, find_target

SAMPLES = 128
QUICK = replace(
    STANDARD,
    steps=40,
    batch=32,
    rows=None,
    rates=dict.fromkeys((part.WEIGHT_RANGE, part.WEIGHT_LOW, part.INPUT_RANGE, part.INPUT_LOW, part.BIAS), 5e-3)
    | {part.WEIGHT: 5e-2, part.ROUNDING: 5e-2},
)
KINDS = [
    "conv_relu",
    "conv_bare",
    "depthwise_clip",
    "up_relu",
    "up_groups",
    "gemm_turned",
    "matmul_clip",
    "matmul_bare",
]
TARGETS = {name: find_target(name) for name in ("ort", "paper")}


def trained(
    folder: Path,
    case: Single,
    problem: LayerProblem,
    schedule: Schedule = QUICK,
    engine: Engine = Engine.AUTO,
    seed: int = 0,
) -> Optimised:
    inputs, targets = activations(folder / "inputs", case.inputs), activations(folder / "targets", case.targets)
    try:
        return optimise(problem, inputs, targets, schedule, engine, seed, 1)
    finally:
        inputs.close()
        targets.close()


def assert_deployed(case: Single, problem: LayerProblem, found: Optimised) -> None:
    """The integers, grids and bias give the error that training saw; the integers are those of the weight."""
    params, held_out = found.params, parts(len(case.inputs))[1]
    assert case.error(problem.start, problem.qparams, held_out) == pytest.approx(found.before, rel=1e-3)
    assert case.error(params, params.input or problem.qparams, held_out) == pytest.approx(found.after, rel=1e-3)
    np.testing.assert_array_equal(params.quantized, quantize(params.weight, params.qparams))
    assert params.quantized.dtype == problem.start.quantized.dtype
    assert params.quantized.shape == case.weight.shape
    assert params.qparams.low <= params.quantized.min()
    assert params.quantized.max() <= params.qparams.high
    assert_same_form(params, problem)


def assert_same_form(params: LayerParams, problem: LayerProblem) -> None:
    for qparams, start in ((params.qparams, problem.start.qparams), (params.input or problem.qparams, problem.qparams)):
        assert (qparams.bits, qparams.signed, qparams.low, qparams.high, qparams.axis) == (
            start.bits, start.signed, start.low, start.high, start.axis,
        )  # fmt: skip
        assert qparams.scale.shape == start.scale.shape
        assert qparams.zero_point.shape == start.zero_point.shape
        assert (qparams.scale > 0).all()
        assert ((qparams.low <= qparams.zero_point) & (qparams.zero_point <= qparams.high)).all()


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", KINDS)
def test_the_held_out_error_falls_and_is_that_of_the_codes(name: str, target: str, tmp_path: Path) -> None:
    case = single(name, SAMPLES)
    problem = problem_of(case, TARGETS[target])
    found = trained(tmp_path, case, problem)
    assert found.after < 0.97 * found.before
    assert found.skip_reason is None
    assert_deployed(case, problem, found)
    assert found.params.input is not None
    assert found.params.qparams.zero_point.any() or target == "ort"
    assert (found.params.bias is None) == (name == "matmul_bare")


@pytest.mark.parametrize("target", TARGETS)
def test_inputs_without_negative_values(target: str, tmp_path: Path) -> None:
    case = single("conv_relu", SAMPLES)
    inputs = np.maximum(case.inputs, 0)
    case = replace(case, inputs=inputs, targets=run(case.model.proto, {"x": inputs})["y"])
    problem = problem_of(case, TARGETS[target])
    for rate in (0.05, 0.2):
        schedule = replace(QUICK, rates={**QUICK.rates, part.INPUT_LOW: rate})
        assert_deployed(case, problem, trained(tmp_path, case, problem, schedule))


@pytest.mark.parametrize("optimizer", LayerOptimizer)
def test_a_grid_that_is_shared_stays(optimizer: LayerOptimizer, tmp_path: Path) -> None:
    case = single("conv_relu", SAMPLES)
    problem = problem_of(case, TARGETS["ort"], optimizer=optimizer, trains_input=False)
    found = trained(tmp_path, case, problem)
    assert found.after < found.before
    assert found.params.input is None
    assert_deployed(case, problem, found)


def test_inputs_that_come_quantized_get_no_grid(tmp_path: Path) -> None:
    case = single("conv_relu", SAMPLES)
    problem = replace(problem_of(case, TARGETS["ort"]), input_scheme=None)
    found = trained(tmp_path, case, problem)
    assert found.after < found.before
    assert found.params.input is None
    assert case.error(found.params, None, parts(SAMPLES)[1]) == pytest.approx(found.after, rel=1e-3)


def test_a_layer_without_bias_gets_one(tmp_path: Path) -> None:
    for name in ("conv_bare", "gemm_bare", "up_groups"):
        case = single(name, SAMPLES)
        assert case.bias is None
        found = trained(tmp_path, case, problem_of(case, TARGETS["ort"])).params
        assert found.bias is not None
        assert found.bias.shape == (case.layer.channels,)
        assert found.bias.dtype == np.float32
        assert found.bias.any()


@pytest.mark.parametrize("target", TARGETS)
def test_codes_can_move_more_than_a_step(target: str, tmp_path: Path) -> None:
    case = single("gemm_turned", SAMPLES)
    # Twins: only the sum of their weights matters, so quantized values drift together.
    inputs = np.concatenate([case.inputs[:, :8], case.inputs[:, :8]], axis=1)
    case = replace(case, inputs=inputs, targets=run(case.model.proto, {"x": inputs})["y"])
    schedule = replace(QUICK, rates={**QUICK.rates, part.WEIGHT: 1.0}, steps=100)
    problem = problem_of(case, TARGETS[target], (5, 8))
    found = trained(tmp_path, case, problem, schedule)
    assert found.after < found.before
    assert np.abs(found.params.quantized.astype(int) - problem.start.quantized).max() > 1
    assert_deployed(case, problem, found)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", ["conv_relu", "depthwise_clip", "up_relu", "up_groups", "gemm_turned", "matmul_bare"])
def test_adaround_takes_a_neighbour(name: str, target: str, tmp_path: Path) -> None:
    case = single(name, SAMPLES)
    problem = problem_of(case, TARGETS[target], optimizer=LayerOptimizer.ADAROUND)
    schedule = replace(QUICK, rates={**QUICK.rates, part.ROUNDING: 0.3})
    found = trained(tmp_path, case, problem, schedule)
    assert found.after < found.before
    assert_deployed(case, problem, found)
    params, qparams = found.params, problem.start.qparams
    np.testing.assert_array_equal(params.qparams.scale, qparams.scale)
    np.testing.assert_array_equal(params.qparams.zero_point, qparams.zero_point)
    assert (params.quantized != problem.start.quantized).any()
    steps = case.weight / channels(qparams.scale, params) + channels(qparams.zero_point, params)
    lower, upper = (np.clip(side(steps), qparams.low, qparams.high) for side in (np.floor, np.ceil))
    assert ((params.quantized == lower) | (params.quantized == upper)).all()


def test_a_layer_that_does_not_improve_keeps_its_start(tmp_path: Path) -> None:
    case = single("conv_relu", SAMPLES)
    problem = problem_of(case, TARGETS["ort"], (8, 8))
    wild = replace(QUICK, rates=dict.fromkeys(QUICK.rates, 50.0), decay=False, floor=0.0)
    for schedule in (wild, replace(wild, rates=dict.fromkeys(QUICK.rates, 0.0))):
        found = trained(tmp_path, case, problem, schedule)
        assert found.params is problem.start
        assert found.before == found.after > 0


def steps_taken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of all steps from now on."""
    numbers: list[int] = []
    step = LayerTraining.step

    def counted(self: LayerTraining, rng: np.random.Generator, done: int) -> None:
        numbers.append(done)
        step(self, rng, done)

    monkeypatch.setattr(LayerTraining, "step", counted)
    return numbers


def test_a_start_below_the_floor_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case, taken = single("conv_relu", SAMPLES), steps_taken(monkeypatch)
    problem = problem_of(case, TARGETS["ort"], (8, 8))
    found = trained(tmp_path, case, problem)
    assert found.params is problem.start
    assert 0 < found.before == found.after < QUICK.floor
    assert not taken
    trained(tmp_path, case, problem, replace(QUICK, floor=0.0))
    assert taken


def power_of_two(values: np.ndarray) -> bool:
    return bool((np.log2(values.astype(np.float64)) % 1 == 0).all())


@pytest.mark.parametrize("optimizer", LayerOptimizer)
@pytest.mark.parametrize("target", TARGETS)
def test_powers_of_two_stay(target: str, optimizer: LayerOptimizer, tmp_path: Path) -> None:
    case = single("conv_relu", SAMPLES)
    problem = problem_of(case, replace(TARGETS[target], power_of_two=True), optimizer=optimizer)
    assert power_of_two(problem.start.qparams.scale)
    schedule = replace(QUICK, rates={**QUICK.rates, part.ROUNDING: 0.3})
    found = trained(tmp_path, case, problem, schedule)
    assert found.after < found.before
    assert power_of_two(found.params.qparams.scale)
    assert found.params.input is None or power_of_two(found.params.input.scale)
    assert_deployed(case, problem, found)


def bytes_of(params: LayerParams) -> tuple[bytes, ...]:
    assert params.input is not None
    assert params.bias is not None
    return tuple(
        value.tobytes()
        for value in (params.quantized, params.qparams.scale, params.bias, params.weight, params.input.scale)
    )


@pytest.mark.parametrize("optimizer", LayerOptimizer)
def test_the_seed_decides(optimizer: LayerOptimizer, tmp_path: Path) -> None:
    case = single("conv_relu", 100)  # more than a batch: which samples a step sees depends on the seed
    problem = problem_of(case, TARGETS["ort"], optimizer=optimizer)
    once, again, other = (bytes_of(trained(tmp_path, case, problem, seed=seed).params) for seed in (3, 3, 4))
    assert once == again
    assert once != other


def test_other_jobs_do_not_matter(tmp_path: Path) -> None:
    case, other = single("conv_relu", 100), single("gemm_relu", 100)
    problem = problem_of(case, TARGETS["ort"])
    alone = bytes_of(trained(tmp_path, case, problem).params)
    trained(tmp_path, other, problem_of(other, TARGETS["ort"]))
    trained(tmp_path, case, problem_of(case, TARGETS["ort"], (5, 4)))
    np.random.default_rng(0).normal(size=5)
    assert bytes_of(trained(tmp_path, case, problem).params) == alone


def test_the_given_arrays_are_not_changed(tmp_path: Path) -> None:
    case = single("conv_relu", SAMPLES)
    problem = problem_of(case, TARGETS["paper"])
    start = problem.start
    before = [
        value.copy()
        for value in (start.weight, start.bias, start.quantized, start.qparams.scale, problem.qparams.scale)
    ]
    trained(tmp_path, case, problem)
    after = (start.weight, start.bias, start.quantized, start.qparams.scale, problem.qparams.scale)
    assert all(np.array_equal(left, right) for left, right in zip(before, after, strict=True))


@pytest.mark.parametrize("samples", [1, 2, 7, 8, 9])
def test_few_samples_will_do(samples: int, tmp_path: Path) -> None:
    case = single("conv_relu", samples)
    problem = problem_of(case, TARGETS["ort"])
    assert_deployed(case, problem, trained(tmp_path, case, problem))


def test_samples_are_parted() -> None:
    assert parts(1) == ([0], [0])
    assert parts(7) == (list(range(7)), list(range(7)))
    train, judge = parts(64)
    assert (len(train), len(judge)) == (56, 8)
    assert sorted(train + judge) == list(range(64))
    assert len(parts(100_000)[1]) == HELD_OUT_MOST


@pytest.mark.parametrize(("rows", "batch"), [(None, 32), (36 * 20, 20), (36 * 20 - 1, 20), (1, FEWEST), (10**6, 32)])
def test_layers_of_many_positions_take_fewer_samples(rows: int | None, batch: int, tmp_path: Path) -> None:
    case = single("conv_relu", 40)  # 36 positions a sample
    inputs, targets = activations(tmp_path / "inputs", case.inputs), activations(tmp_path / "targets", case.targets)
    problem, schedule = problem_of(case, TARGETS["ort"]), replace(QUICK, rows=rows)
    assert LayerTraining(problem, inputs, targets, schedule, Engine.STANDARD, 1).batch == batch


def test_only_the_held_out_samples_judge(tmp_path: Path) -> None:
    case = single("conv_relu", SAMPLES)
    held_out = parts(SAMPLES)[1]
    other = replace(case, targets=np.where(np.isin(np.arange(SAMPLES), held_out)[:, None, None, None], case.targets, 0))
    problem = problem_of(case, TARGETS["ort"])
    still = replace(QUICK, steps=1, rates=dict.fromkeys(QUICK.rates, 0.0))
    # Only the energy, of all targets, knows of the others.
    ratio = trained(tmp_path, other, problem, still).before / trained(tmp_path, case, problem, still).before
    assert ratio == pytest.approx(case.energy / other.energy, rel=1e-4)


@pytest.mark.parametrize("optimizer", LayerOptimizer)
def test_the_papers_schedule_runs(optimizer: LayerOptimizer, tmp_path: Path) -> None:
    case = single("conv_relu", SAMPLES)
    problem = problem_of(case, TARGETS["paper"], optimizer=optimizer)
    found = trained(tmp_path, case, problem, replace(PAPER, steps=20))
    assert found.after < found.before
    assert_deployed(case, problem, found)


@pytest.mark.skipif(not HAS_TRAINING, reason="needs onnxruntime-training-cpu")
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", [name for name in KINDS if not name.startswith("up")])  # which only one engine has
def test_both_engines_end_close(name: str, target: str, tmp_path: Path) -> None:
    case = single(name, SAMPLES)
    problem = problem_of(case, TARGETS[target])
    ends = [trained(tmp_path, case, problem, engine=engine) for engine in (Engine.TRAINING, Engine.STANDARD)]
    assert ends[0].before == pytest.approx(ends[1].before, rel=1e-4)
    assert ends[0].after == pytest.approx(ends[1].after, rel=0.1)
    quantized = [found.params.quantized.astype(int) for found in ends]
    assert np.mean(quantized[0] != quantized[1]) < 0.05


def test_a_target_without_channels(tmp_path: Path) -> None:
    whole: Target = replace(TARGETS["ort"], per_channel=False)
    case = single("conv_relu", SAMPLES)
    problem = problem_of(case, whole)
    found = trained(tmp_path, case, problem)
    assert found.after < found.before
    assert found.params.qparams.scale.ndim == 0
    assert_deployed(case, problem, found)


def test_an_int32_bias_keeps_within_its_bounds(tmp_path: Path) -> None:
    case = single("conv_relu", SAMPLES)
    weight, bias = case.weight.copy(), case.bias + np.float32(3)
    weight[1] *= 1e-9  # a grid this fine would need a bias of many bits
    case = replace(case, weight=weight, bias=bias, targets=case.output(weight, bias, case.inputs))
    problem = problem_of(case, TARGETS["ort"], (3, 8))
    found = trained(tmp_path, case, problem)
    assert found.after < found.before
    params, read = found.params, found.params.input or problem.qparams
    assert params.bias is not None
    assert np.abs(params.bias / (params.qparams.scale.astype(np.float64) * read.scale)).max() <= BIAS_STEPS * (1 + 1e-6)
    assert case.error(params, read, parts(SAMPLES)[1]) == pytest.approx(found.after, rel=1e-3)
