"""Second-order rounding in the pipelines: kept where the held-out loss falls, and written as it was judged."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import onnx
import pytest
from jobs import correlated_data
from said import refused

from models import UNOPTIMIZED, build, conv_net, feed_for, normal, run, two_gemms
from onnxcalib import Pipeline, RangeMethod, Recipe, Result, quantize
from onnxcalib.errors import RecipeError
from onnxcalib.model.quantized import read_quantized
from onnxcalib.numerics.quant_params import dequantize
from onnxcalib.pipeline import rounding
from onnxcalib.progress import Event
from onnxcalib.recipe import Rounding, parse_bits
from onnxcalib.reports.data import stage_rows

MODELS = Path(__file__).parents[2] / "models"
LIGHT = Recipe(Pipeline.LIGHT, parse_bits("w4a8"), ranges=RangeMethod.MSE)
SECOND = {"rounding": Rounding.SECOND_ORDER}


def light(bits: str, **options: object) -> Recipe:
    return Recipe(bits=parse_bits(bits), **{"pipeline": Pipeline.LIGHT, "ranges": RangeMethod.MSE, **options})


def assert_written(result: Result) -> None:
    """The quantized values of the file are those of the plan, and its bias is on the grid of the plan's scales."""
    read = {layer.name: layer for layer in read_quantized(result.model).layers}
    for name, params in result.plan.layers.items():
        np.testing.assert_array_equal(read[name].quantized.reshape(params.quantized.shape), params.quantized)
        np.testing.assert_array_equal(read[name].weight.scale, params.qparams.scale)


def test_the_demo_model_loses_less_than_by_rounding_to_nearest() -> None:
    data = {"image": np.load(MODELS / "fashion_calibration.npz")["image"][:48]}
    result = quantize(MODELS / "fashion_mobilenet.onnx", data, light("w4a8"))
    assert result.rounding is not None
    assert result.rounding.strength in rounding.STRENGTHS
    assert result.rounding.after < 0.9 * result.rounding.before
    assert result.tuned is not None
    assert result.tuned.after <= result.rounding.before
    assert_written(result)
    (row,) = [row for row in stage_rows(result) if row["stage"] == "second-order rounding"]
    assert row["kept"]


def test_it_is_not_kept_where_it_does_not_help(monkeypatch: pytest.MonkeyPatch) -> None:
    data = correlated_data(conv_net(), 64)
    plain = quantize(conv_net(), data, light("w4a8", rounding=Rounding.NEAREST))
    assert plain.rounding is None
    worse = rounding.second_order_rounding

    def spoilt(job: object, plan: object, strength: float) -> object:
        found = worse(job, plan, strength)
        broken = {
            name: dataclasses.replace(params, quantized=np.zeros_like(params.quantized))
            for name, params in found.plan.layers.items()
        }
        return dataclasses.replace(found, plan=dataclasses.replace(found.plan, layers=broken))

    monkeypatch.setattr(rounding, "second_order_rounding", spoilt)
    kept = quantize(conv_net(), data, light("w4a8"))
    assert kept.rounding is not None
    assert kept.rounding.strength is None
    assert kept.rounding.before == kept.rounding.after
    assert kept.model.SerializeToString(deterministic=True) == plain.model.SerializeToString(deterministic=True)
    trained = quantize(conv_net(), data, light("w4a8", pipeline=Pipeline.ADVANCED, steps=1))
    assert trained.rounding == kept.rounding
    assert trained.trained is None, "layers have been solved for already, if in vain"
    assert trained.end_to_end is not None
    assert trained.end_to_end.before == pytest.approx(kept.rounding.after, rel=0.2)


@pytest.mark.parametrize("spread", [0.3, 30.0])
def test_roundings_that_a_quick_tuning_does_not_tell_apart_get_the_whole_one(
    monkeypatch: pytest.MonkeyPatch, spread: float
) -> None:
    """Whichever the quick look likes by a hair, what is taken has the least loss after all of the tuning."""
    quick, looks = rounding.quick_tuning, iter(np.linspace(1, 1.1, 3).tolist() * 3)
    monkeypatch.setattr(
        rounding, "quick_tuning", lambda job, plan: dataclasses.replace(quick(job, plan), after=next(looks))
    )
    whole, tuned = rounding.batch_norm_tuning, []

    def tuning(job: object, plan: object) -> object:
        tuned.append(whole(job, plan))
        return tuned[-1]

    monkeypatch.setattr(rounding, "batch_norm_tuning", tuning)
    data = {"x": spread * correlated_data(conv_net(), 48)["x"]}
    losses = {}
    for way in (Rounding.AUTO, Rounding.SECOND_ORDER, Rounding.NEAREST):
        result = quantize(conv_net(), data, light("w4a8", rounding=way))
        assert result.tuned is not None
        losses[way] = result.tuned.after
    assert losses[Rounding.SECOND_ORDER] != losses[Rounding.NEAREST]
    assert losses[Rounding.AUTO] == min(losses.values())
    found = [each.after for each in tuned]
    assert len(found) == 3 + 2 + 1, "both strengths, and to nearest where that is open"
    assert [losses[Rounding.AUTO], losses[Rounding.SECOND_ORDER]] == [min(found[:3]), min(found[3:5])]


def stages_of(model: onnx.ModelProto, recipe: Recipe, samples: int) -> list[str]:
    stages: list[str] = []

    class Heard:
        def __call__(self, *_told: object) -> None: ...

        def event(self, event: Event) -> None:
            if event.name == "stage_end":
                stages.append(event.values["stage"])

    quantize(model, feed_for(model, samples), recipe, progress=Heard(), workers=1)
    return stages


def tried(recipe: Recipe, samples: int = 24) -> bool:
    return "second-order" in stages_of(two_gemms(), recipe, samples)


def test_when_it_is_tried() -> None:
    assert tried(light("w4a8"))
    assert tried(light("8", **SECOND))
    assert tried(light("w4a8"), samples=8)
    assert not tried(light("w4a8", rounding=Rounding.NEAREST))
    assert not tried(light("8"))  # nothing to gain
    assert not tried(light("w4a8"), samples=4)  # nothing to judge by
    assert not tried(Recipe(bits=parse_bits("w4a8")))


@pytest.mark.parametrize(
    ("pipeline", "bits", "options", "samples", "stage"),
    [
        ("light", "w4a4,w8a8", {}, 24, None),
        ("light", "w2a4,w8a8", {}, 24, "second-order candidates"),
        ("light", "w4,w8", {}, 24, "second-order candidates"),
        ("light", "w2a4,w8a8", {"rounding": "nearest"}, 24, None),
        ("light", "w2a4,w8a8", {}, 1, None),  # nothing is held out, so that weights stay rounded to nearest
        ("advanced", "w4a4,w8a8", {}, 24, None),
        ("advanced", "w3a4,w8a8", {}, 24, "second-order candidates"),
        ("advanced", "w4a4,w8a8", {"rounding": "nearest"}, 24, "parallel"),
        ("advanced", "w4a4,w8a8", {"training": "paper"}, 24, "parallel"),
        ("advanced", "w4a4,w8a8", {"layer_optimizer": "adaround"}, 24, "parallel"),
        ("advanced", "w4a4,w8a8", {}, 1, "parallel"),
    ],
)
def test_what_bits_are_assigned_by(
    pipeline: str, bits: str, options: dict[str, str], samples: int, stage: str | None
) -> None:
    """Layers as they will be rounded in the end, where that tells more than rounding them to nearest does."""
    steps = {"steps": 1} if pipeline == "advanced" else {}
    recipe = Recipe(pipeline, bits=bits, compression=0.9, ranges=RangeMethod.MINMAX, **steps, **options)
    told = stages_of(conv_net(), recipe, samples)
    assert [name for name in told if name in ("parallel", "second-order candidates")] == ([stage] if stage else [])


def test_plain_has_no_choice_of_rounding() -> None:
    with refused(RecipeError, "--rounding", "plain"):
        Recipe(rounding=Rounding.NEAREST)


def wide() -> onnx.ModelProto:
    """Sums of 80 and of 64 terms, one weight transposed, the last layer without a bias."""
    text = """
    net (float[N,5,80] x) => (float[N,5,12] y) {
        [up] m = MatMul (x, w1)
        [bias] a = Add (m, b1)
        [act] r = Tanh (a)
        [down] y = MatMul (r, w2)
    }"""
    return build(text, w1=normal(80, 64, scale=0.2), b1=normal(64), w2=normal(64, 12, scale=0.3))


@pytest.mark.parametrize("block", [None, 16, 32])
def test_weights_alone_in_blocks(block: int | None) -> None:
    noise = normal(64, 5, 4, seed=1) @ normal(4, 80, seed=2) + 0.3 * normal(64, 5, 80, seed=3)
    result = quantize(wide(), {"x": noise.astype(np.float32)}, light("w4", block_size=block))
    assert result.rounding is not None
    assert result.rounding.after < 0.8 * result.rounding.before
    float_model = wide()
    for layer, weight in {"up": "w1", "down": "w2"}.items():
        params = result.plan.layers[layer]
        assert params.qparams.block == block
        tensor = next(each for each in float_model.graph.initializer if each.name == weight)
        tensor.CopyFrom(onnx.numpy_helper.from_array(dequantize(params.quantized, params.qparams), weight))
    bias = next(each for each in float_model.graph.initializer if each.name == "b1")
    bias.CopyFrom(onnx.numpy_helper.from_array(result.plan.layers["up"].bias, "b1"))
    feed = {"x": noise[:4].astype(np.float32)}
    np.testing.assert_allclose(run(result.model, feed, **UNOPTIMIZED)["y"], run(float_model, feed)["y"], atol=1e-5)


@pytest.mark.parametrize("target", ["ort", "openvino", "vitis", "qnn", "paper", "ort-compat"])
def test_files_of_every_kind_of_target(target: str) -> None:
    bits = "w4a8" if target in ("ort", "paper") else "8"
    data = correlated_data(conv_net(), 24)
    result = quantize(conv_net(), data, light(bits, target=target, **SECOND))
    onnx.checker.check_model(result.model)
    assert_written(result)
    output = run(result.model, {"x": data["x"][:1]})["y"]
    wanted = run(conv_net(), {"x": data["x"][:1]})["y"]
    assert np.square(output - wanted).sum() < 0.1 * np.square(wanted).sum()


def test_mixed_bits_stay_as_assigned() -> None:
    data = correlated_data(conv_net(), 24)
    result = quantize(conv_net(), data, light("w4a4,w8a8", compression=0.6, **SECOND))
    assert result.assigned is not None
    assert result.plan.precisions == result.assigned.allocation.choices
    for name, precision in result.plan.precisions.items():
        assert result.plan.layers[name].qparams.bits == precision.weight
    assert_written(result)
