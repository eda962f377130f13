"""An accuracy budget: the smallest file that keeps it on samples that nothing else saw."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from said import refused

from models import Arrays, conv_net, feed_for, run
from onnxcalib.data import open_data, shuffled, split
from onnxcalib.errors import RecipeError
from onnxcalib.mixed_precision.allocate import Allocation
from onnxcalib.model.io import constant_bytes
from onnxcalib.model.shapes import input_specs
from onnxcalib.numerics.output_kind import LossKind
from onnxcalib.pipeline.budget import Finished, finalist
from onnxcalib.pipeline.pipelines import quantize
from onnxcalib.pipeline.result import Outcome, Result
from onnxcalib.plan import QuantPlan
from onnxcalib.recipe import Pipeline, RangeMethod, Recipe, parse_bits

SAMPLES = 240


def labelled(samples: int = SAMPLES) -> Arrays:
    """Samples with the float model's own outputs, from which it never errs."""
    model = conv_net()
    feed = feed_for(model, samples)
    return feed | {"labels": run(model, feed)["y"]}


def asked(**options: Any) -> Recipe:
    settings = {"bits": parse_bits("w2a8,w4a8,w8a8"), "pipeline": Pipeline.LIGHT, "ranges": RangeMethod.MINMAX}
    if "max_drop" in options:
        settings["metric"] = "mse"
    return Recipe(**(settings | options))


def error_of(result: Result, data: Arrays, seed: int = 0) -> float:
    """The mean squared error of the written file on the proving half, by running it."""
    held = split(shuffled(open_data(data, input_specs(conv_net())), seed), SAMPLES // 2)[1]
    outputs = np.concatenate([run(result.model, feed)["y"] for feed in held.batches(1)])
    return float(((outputs - held.labels) ** 2).mean())


def assert_fewest_bits(result: Result) -> None:
    """All layers but small ones, of which planes and what takes zero points off are as large as eight bits."""
    for params in result.plan.layers.values():
        assert params.qparams.bits == 2 or params.quantized.size < 150


def test_the_promise_is_kept_on_samples_that_nothing_else_saw() -> None:
    data = labelled()
    spread = float(data["labels"].var())
    loose, tight = (quantize(conv_net(), data, asked(max_drop=share * spread)) for share in (10.0, 0.001))
    for result, most in ((loose, 10 * spread), (tight, 0.001 * spread)):
        assert result.budget is not None
        assert result.budget.proof.samples == SAMPLES // 2
        assert result.budget.proof.before == pytest.approx(0, abs=1e-9)
        assert result.budget.proof.value <= most
        assert error_of(result, data) == pytest.approx(-result.budget.proof.after, rel=1e-4)
    assert constant_bytes(loose.model) < constant_bytes(tight.model)
    assert_fewest_bits(loose)
    assert {precision.weight for precision in tight.plan.precisions.values()} != {8}


class TenBySize:
    """Assignments that lose ten by their size before they are finished."""

    def smallest(self, aim: float) -> Allocation:
        return Allocation({}, 0.0, {"size": 10 / aim}, optimal=True, gap=0.0, method="none")

    def drop(self, allocation: Allocation) -> float:
        return 10 / allocation.costs["size"]


@pytest.mark.parametrize(
    ("gained", "least", "finished", "taken"),
    [
        (0.0, 0.0, [10.0], 10.0),
        (1.0, 0.0, [10.0, 5.0], 5.0),
        (1.0, 6.0, [10.0, 5.0], 10.0),  # the smaller one did not gain as much
        (-0.5, 0.0, [10.0], 10.0),  # it lost on the way: the proof is to say how much
    ],
)
def test_what_finishing_gains_goes_into_a_smaller_file(
    gained: float, least: float, finished: list[float], taken: float
) -> None:
    sizes, asked = TenBySize(), []

    def finish(allocation: Allocation) -> Finished:
        size = allocation.costs["size"]
        asked.append(size)
        outcome = Outcome(QuantPlan("ort", "mse", {}, {}, {}, {}))
        return Finished(allocation, outcome, sizes.drop(allocation) - (gained if size > least else 0.0))

    assert finalist(sizes, finish, 1.0).allocation.costs["size"] == taken
    assert asked == finished


def test_a_drop_out_of_reach_names_the_least_and_its_size() -> None:
    with refused(RecipeError, "1e-06", "mse", SAMPLES // 2):
        quantize(conv_net(), labelled(), asked(bits=parse_bits("w2a2,w3a3"), max_drop=1e-6))


def test_a_metric_of_the_users_own_decides() -> None:
    """One that nothing changes is kept by the fewest bits."""

    def finite(output: np.ndarray, labels: np.ndarray) -> float:
        return float(np.isfinite(output).all() and len(output) == len(labels))

    easy = quantize(conv_net(), labelled(), asked(max_drop=0.5, metric=None), metric=finite)
    assert easy.budget is not None
    assert easy.budget.proof.value == 0
    assert_fewest_bits(easy)


def test_values_are_not_shared_with_a_run_that_saw_all_samples(tmp_path: Path) -> None:
    data, folder = labelled(), tmp_path / "run"
    quantize(conv_net(), data, asked(compression=0.55), run_dir=folder)
    again = quantize(conv_net(), data, asked(max_drop=0.5), run_dir=folder)
    fresh = quantize(conv_net(), data, asked(max_drop=0.5))
    assert again.model.SerializeToString(deterministic=True) == fresh.model.SerializeToString(deterministic=True)


def test_the_metric_as_sensitivity() -> None:
    data = labelled(64)
    data["labels"] = data["labels"].argmax(axis=1)
    result = quantize(conv_net(), data, asked(compression=0.55, loss=LossKind.METRIC, metric="top1"))
    assert result.table is not None
    assert result.table.loss == "top1"
    # A share of 64 samples in percent.
    steps = [loss * 64 / 100 for row in result.table.layers for loss in row.losses.values()]
    np.testing.assert_allclose(steps, np.rint(steps), atol=1e-6)


@pytest.mark.parametrize(
    ("options", "fact"),
    [
        ({"max_drop": 1.0, "max_loss": 0.1}, "--max-loss"),
        ({"max_drop": -1.0}, "--max-drop"),
        ({"compression": 0.55, "metric": "top1"}, "--metric"),
        ({"bits": parse_bits("8"), "max_drop": 1.0}, "--max-drop"),
        ({"bits": parse_bits("8"), "pipeline": Pipeline.PLAIN, "metric": "top1"}, "--metric"),
    ],
)
def test_what_has_no_effect_is_refused(options: dict[str, Any], fact: str) -> None:
    with refused(RecipeError, fact):
        asked(**options)


def test_labels_are_needed() -> None:
    with refused(RecipeError, "mse", "labels"):
        quantize(conv_net(), feed_for(conv_net(), 8), asked(max_drop=1.0))
    with refused(RecipeError, "metric"):
        quantize(conv_net(), labelled(8), asked(compression=0.55), metric=lambda *_: 1.0)
