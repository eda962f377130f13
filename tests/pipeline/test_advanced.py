"""The advanced pipeline from model to file, and the recipe options that only it has."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from by_hand import held_out_loss
from hypothesis import given, settings
from hypothesis import strategies as st
from jobs import correlated_data
from onnx import numpy_helper, parser
from prepared import scaled_as
from recipe_files import assert_there_and_back, written
from said import names, refused

from models import HAS_TRAINING, Arrays, conv_net, conv_transpose, normal, run, transformer_block, two_gemms
from onnxcalib import Pipeline, Recipe, RecipeError, Result, RuntimeMissingError, quantize, read_recipe
from onnxcalib.autodiff.interface import NoGradientError
from onnxcalib.autodiff.standard.rules import RULES
from onnxcalib.model.subgraph import with_outputs
from onnxcalib.numerics.quant_params import dequantize
from onnxcalib.recipe import Engine, LayerOptimizer, RangeMethod, Rounding, Training, parse_bits, read_options
from onnxcalib.targets import find_target

SAMPLES = 24
RECIPES: dict[str, dict[str, Any]] = {
    "fixed": {"bits": parse_bits("w4a4"), "edge_bits": 8, "ranges": RangeMethod.MINMAX},
    "mixed": {"bits": parse_bits("w4a4,w8a8"), "max_loss": 0.05, "minimise": "size", "ranges": RangeMethod.MINMAX},
}
RECIPES["nearest"] = {**RECIPES["fixed"], "rounding": Rounding.NEAREST}


def advanced(**options: Any) -> Recipe:
    return Recipe(Pipeline.ADVANCED, **{"steps": 5, **options})


def data_for(model: onnx.ModelProto, samples: int = SAMPLES) -> Arrays:
    return correlated_data(model, samples)


def assert_file_is_the_plan(result: Result, data: Arrays) -> None:
    """The weights that a runtime unpacks from the file are the plan's quantized values; the file runs."""
    names = {f"{layer}_weight": layer for layer in result.plan.layers}
    shown = run(with_outputs(result.model, list(names)), data)
    for name, layer in names.items():
        params = result.plan.layers[layer]
        assert params.qparams.low <= params.quantized.min()
        assert params.quantized.max() <= params.qparams.high
        np.testing.assert_allclose(shown[name], dequantize(params.quantized, params.qparams), rtol=1e-6, err_msg=name)


def assert_told_as_it_is(
    result: Result, model: onnx.ModelProto, data: Arrays, logits: Collection[str] = ("y",)
) -> None:
    """Every stage begins where the one before it ended, and the last ends with the loss of the written file."""
    alone = (
        result.recipe.training.schedule is Training.PAPER or result.recipe.layer_optimizer is LayerOptimizer.ADAROUND
    )
    # Where second-order rounding was tried, taken or not, layers are not trained one by one as well.
    solved = result.rounding is not None and not alone
    steps = (result.tuned, result.trained, result.end_to_end, result.biases)
    assert [step is None for step in steps[:3]] == [False, solved, alone]
    # Biases that end-to-end training trained are not tuned again.
    together = result.end_to_end
    kept = together is not None and together.after < together.before
    assert (result.biases is None) == kept
    found = [step for step in steps if step is not None]
    # Scales move a little when ties are taken away, and the loss with them.
    move = 0.2 if find_target(result.recipe.target).rounding_safe else 1e-6
    for earlier, later in itertools.pairwise(found):
        allowed = 1e-6 if later is result.trained else move
        assert later.before == pytest.approx(earlier.after, rel=allowed, abs=1e-3 * allowed)
    assert found[-1].after == pytest.approx(held_out_loss(model, result.model, data, logits), rel=1e-3)


@pytest.mark.parametrize(
    ("builder", "logits", "kind", "target"),
    [
        (conv_net, ("y",), "fixed", "ort"),
        (conv_net, ("y",), "nearest", "ort"),
        (conv_net, ("y",), "mixed", "paper"),
        (transformer_block, (), "mixed", "ort"),
        (transformer_block, (), "fixed", "paper"),
        (conv_transpose, (), "fixed", "ort"),
    ],
)
def test_from_model_to_file(
    builder: Callable[[], onnx.ModelProto], logits: tuple[str, ...], kind: str, target: str, tmp_path: Path
) -> None:
    model = builder()
    data, path = data_for(model), tmp_path / "quantized.onnx"
    before = model.SerializeToString(deterministic=True)
    result = quantize(model, data, advanced(target=target, **RECIPES[kind]), output=path)
    assert model.SerializeToString(deterministic=True) == before
    assert onnx.load(path) == result.model
    onnx.checker.check_model(result.model)
    assert_file_is_the_plan(result, data)
    assert_told_as_it_is(result, model, data, logits)
    assert result.trained is not None or kind != "nearest"
    assert result.trained is None or result.trained.skip_reasons == ()
    if kind == "mixed":
        assert result.assigned is not None
        assert set(result.plan.precisions.values()) <= {*RECIPES["mixed"]["bits"]}
        assert dict(result.plan.precisions) == dict(result.assigned.allocation.choices)
    else:
        assert result.table is result.assigned is None


def test_training_pays() -> None:
    model = conv_net()
    data = data_for(model, 160)
    options = {"bits": parse_bits("w3a8"), "ranges": RangeMethod.MINMAX, "target": "paper"}
    # Of second-order rounding there is little left to learn.
    light = quantize(model, data, Recipe(Pipeline.LIGHT, rounding=Rounding.NEAREST, **options))
    plain = quantize(scaled_as(model, light.model, "paper"), data, Recipe(Pipeline.PLAIN, **options))
    options["rounding"] = Rounding.NEAREST
    trained = quantize(model, data, advanced(**{**options, "steps": 40}))
    losses = [held_out_loss(model, result.model, data, ["y"]) for result in (plain, light, trained)]
    for tuned in (light.tuned, trained.tuned):
        assert tuned is not None
        assert (tuned.before, tuned.after) == pytest.approx(losses[:2], rel=1e-3)
    assert losses[1] < 0.9 * losses[0]
    assert losses[2] < 0.9 * losses[1]


@pytest.mark.parametrize(
    ("kind", "optimizer"), [("mixed", LayerOptimizer.ADAQUANT), ("fixed", LayerOptimizer.ADAROUND)]
)
def test_workers_do_not_change_a_byte(kind: str, optimizer: LayerOptimizer) -> None:
    model = conv_net()
    recipe = advanced(layer_optimizer=optimizer, seed=3, **RECIPES[kind])
    results = [quantize(model, data_for(model), recipe, workers=workers) for workers in (1, 2)]
    files = {result.model.SerializeToString(deterministic=True) for result in results}
    assert len(files) == 1


@pytest.mark.parametrize(("kind", "training"), [("mixed", Training.STANDARD), ("fixed", Training.PAPER)])
def test_adaround_in_every_schedule(kind: str, training: Training) -> None:
    model = conv_net()
    data = data_for(model)
    recipe = advanced(layer_optimizer=LayerOptimizer.ADAROUND, training=training, **RECIPES[kind])
    result = quantize(model, data, recipe)
    assert result.recipe is recipe
    assert_told_as_it_is(result, model, data)
    assert_file_is_the_plan(result, data)


def test_the_papers_schedule() -> None:
    model = conv_net()
    data = data_for(model)
    result = quantize(model, data, advanced(training=Training.PAPER, target="paper", **RECIPES["fixed"]))
    assert_told_as_it_is(result, model, data)


def test_stages_tell_how_far_they_are() -> None:
    model, told = conv_net(), {}

    def progress(stage: str, done: int, total: int) -> None:
        assert 0 < done <= total
        told[stage] = (done, total)

    recipe = advanced(**RECIPES["mixed"], rounding=Rounding.NEAREST)
    quantize(model, data_for(model), recipe, progress=progress)
    assert all(done == total for stage, (done, total) in told.items() if stage != "batch norm")
    assert {"calibrate", "parallel adaquant", "sequential adaquant", "end-to-end AdaQuant"} <= set(told)


def test_one_sample_will_do() -> None:
    model = conv_net()
    data = data_for(model, 1)
    assert_told_as_it_is(quantize(model, data, advanced(**RECIPES["fixed"])), model, data)


def test_a_missing_training_runtime_is_said_first() -> None:
    model = conv_net()
    data, recipe = data_for(model), advanced(engine=Engine.TRAINING, **RECIPES["fixed"])
    if HAS_TRAINING:
        assert_told_as_it_is(quantize(model, data, recipe), model, data)
    else:
        with refused(RuntimeMissingError, "onnxruntime-training-cpu", "pip install 'onnxcalib[training]'"):
            quantize(model, data, recipe, progress=lambda *told: pytest.fail(f"{told} before that"))


def test_strict_fails_where_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    model = two_gemms("Tanh")
    monkeypatch.delitem(RULES, "Tanh")
    for options in RECIPES.values():
        result = quantize(model, data_for(model), advanced(engine=Engine.STANDARD, **options))
        assert result.trained is not None
        assert result.biases is not None
        assert len(result.trained.skip_reasons) == 1
        assert "Tanh node 'act'" in result.trained.skip_reasons[0]
        assert "Tanh node 'act'" in str(result.biases.skip_reason)
        with pytest.raises(NoGradientError, match="Tanh node 'act'"):
            quantize(model, data_for(model), advanced(engine=Engine.STANDARD, strict=True, **options))


IF = """<ir_version: 8, opset_import: ["" : 17]>
main (float[N,6] x, int64 mode) => (float[N,4] y)
{
    c = Equal (mode, one)
    h0 = Gemm (x, w, b)
    h = Relu (h0)
    y0 = If (c) <
        then_branch = then_body () => (float[N,8] t) { t0 = MatMul (h, v)  t = Relu (t0) },
        else_branch = else_body () => (float[N,8] e) { e0 = Gemm (h, v, k)  e = Tanh (e0) }
    >
    y = Gemm (y0, u, d)
}
"""


@pytest.mark.parametrize("target", ["ort", "paper"])
@pytest.mark.parametrize("kind", RECIPES)
def test_branches_of_an_if(kind: str, target: str) -> None:
    model = parser.parse_model(IF)
    stored = {"one": np.int64(1), "w": normal(6, 8), "b": normal(8), "v": normal(8, 8), "k": normal(8)}
    stored |= {"u": normal(8, 4), "d": normal(4)}
    model.graph.initializer.extend(numpy_helper.from_array(np.asarray(value), name) for name, value in stored.items())
    onnx.checker.check_model(model)
    feeds = [{"x": normal(4, 6, seed=seed), "mode": np.array(seed % 2)} for seed in range(12)]
    result = quantize(model, feeds, advanced(target=target, **RECIPES[kind]))
    assert len(result.plan.layers) == 4
    for feed in feeds[:2]:
        reference, found = run(model, feed)["y"], run(result.model, feed)["y"]
        assert np.mean((found - reference) ** 2) < 0.3 * np.mean(reference**2)
        assert not np.array_equal(found, reference)


# Recipes.

OPTIONS: dict[str, tuple[Any, str]] = {
    "engine": (Engine.STANDARD, "--engine"),
    "layer_optimizer": (LayerOptimizer.ADAROUND, "--layer-optimizer"),
    "training": (Training.PAPER, "--training"),
    "steps": (20, "--steps"),
    "strict": (True, "--strict"),
}


@pytest.mark.parametrize("pipeline", [Pipeline.PLAIN, Pipeline.LIGHT])
@pytest.mark.parametrize("option", OPTIONS)
def test_options_of_training_are_refused_where_nothing_is_trained(option: str, pipeline: Pipeline) -> None:
    value, flag = OPTIONS[option]
    with refused(RecipeError, flag, pipeline, "--pipeline advanced"):
        Recipe(pipeline, **{option: value})
    assert Recipe(Pipeline.ADVANCED, **{option: value}).options()[option] == value


@pytest.mark.parametrize("pipeline", [Pipeline.PLAIN, Pipeline.LIGHT])
@pytest.mark.parametrize("option", ["strict", "steps"])
def test_a_value_of_nothing_is_refused_too(option: str, pipeline: Pipeline) -> None:
    with refused(RecipeError, f"--{option}", pipeline):
        Recipe(pipeline, **{option: False if option == "strict" else 0})


@pytest.mark.parametrize("steps", [0, -3])
def test_steps_are_counted_from_one(steps: int) -> None:
    with refused(RecipeError, f"--steps {steps}", 1):
        Recipe(Pipeline.ADVANCED, steps=steps)
    assert Recipe(Pipeline.ADVANCED, steps=1).steps == 1


def test_a_list_of_bits_needs_an_aim_here_too() -> None:
    with refused(RecipeError, "--compression", "--max-loss", "--limit"):
        Recipe(Pipeline.ADVANCED, parse_bits("w4a4,w8a8"))
    with refused(RecipeError, "--compression", "--bits"):
        Recipe(Pipeline.ADVANCED, compression=0.2)


recipes = st.builds(
    Recipe,
    pipeline=st.just(Pipeline.ADVANCED),
    bits=st.sampled_from([parse_bits("w3a5"), parse_bits("8")]),
    engine=st.none() | st.sampled_from(Engine),
    layer_optimizer=st.none() | st.sampled_from(LayerOptimizer),
    training=st.none() | st.sampled_from(Training),
    steps=st.none() | st.integers(1, 10**6),
    strict=st.none() | st.booleans(),
)


@settings(max_examples=60)
@given(recipes)
def test_toml_there_and_back(tmp_path_factory: pytest.TempPathFactory, recipe: Recipe) -> None:
    assert_there_and_back(tmp_path_factory.getbasetemp(), recipe)


def test_a_recipe_by_hand(tmp_path: Path) -> None:
    text = """
    pipeline = "advanced"
    bits = "w4a4"
    engine = "standard"
    layer_optimizer = "adaround"
    training = "paper"
    steps = 30
    strict = true
    """
    assert read_recipe(written(tmp_path, text)) == Recipe(
        Pipeline.ADVANCED,
        parse_bits("w4a4"),
        engine=Engine.STANDARD,
        layer_optimizer=LayerOptimizer.ADAROUND,
        training=Training.PAPER,
        steps=30,
        strict=True,
    )


@pytest.mark.parametrize(
    "line",
    [
        "strict = 1", 'strict = "true"', "strict = [true]", "strict = 0.0", "steps = true", "steps = 1.5",
        'steps = "10"', "engine = 1", "engine = false", "training = true", 'layer_optimizer = ["adaround"]',
    ],
)  # fmt: skip
def test_wrong_types_are_refused(line: str, tmp_path: Path) -> None:
    path = written(tmp_path, line)
    with refused(RecipeError, path, line.split(maxsplit=1)[0]):
        read_options(path)


@pytest.mark.parametrize(
    ("key", "known"), [("engine", Engine), ("layer_optimizer", LayerOptimizer), ("training", Training)]
)
def test_an_unknown_choice_lists_the_known_ones(key: str, known: type[StrEnum], tmp_path: Path) -> None:
    with refused(RecipeError, "xyz", f"--{key.replace('_', '-')}", *known):
        read_options(written(tmp_path, f'{key} = "xyz"'))


@pytest.mark.parametrize(
    "options", [{"steps": 2}, {"engine": Engine.STANDARD, "steps": 1}, {"bits": "w8a4", "steps": 1}]
)
def test_at_eight_bits_nothing_is_trained_but_biases_unless_it_is_asked_for(options: dict[str, Any]) -> None:
    model = two_gemms()
    data = data_for(model)
    left = quantize(model, data, Recipe(Pipeline.ADVANCED))
    assert left.trained is None
    assert left.end_to_end is not None
    names(left.end_to_end.skip_reason or "", "eight bits", "steps")
    assert left.biases is not None
    assert left.biases.after <= left.biases.before
    trained = quantize(model, data, Recipe(Pipeline.ADVANCED, **options))
    assert trained.end_to_end is not None
    assert trained.end_to_end.skip_reason is None
