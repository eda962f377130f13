"""The contest between the program's optimum and its rivals."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
from allocation_tables import BASE, W4A4, W4A8, realistic, small_table
from said import names

from models import build, conv_net, feed_for, normal
from onnxcalib.cli.tables import stage_summary
from onnxcalib.mixed_precision.allocate import (
    Limit,
    greedy_accuracy,
    greedy_compression,
    least_reachable,
    minimise_loss,
)
from onnxcalib.mixed_precision.assignment import Assigned, assign, reranked
from onnxcalib.mixed_precision.request import Request
from onnxcalib.mixed_precision.rerank import most_measurements, rerank
from onnxcalib.mixed_precision.table import SensitivityTable
from onnxcalib.numerics.output_kind import LossKind
from onnxcalib.pipeline.pipelines import quantize
from onnxcalib.recipe import Pipeline, Precision, RangeMethod, Recipe, parse_bits

Choices = Mapping[str, Precision]
MENU = (W4A4, W4A8, BASE)


def asking(*scores: Callable[[Choices], float]) -> tuple[Callable[[Any], list[float]], int]:
    """What answers by one function for each set of samples."""
    return lambda questions: [scores[part](choices) for part, choices in questions], len(scores)


def rough_truth(table: SensitivityTable, seed: int) -> Callable[[Choices], float]:
    """A model whose losses are other than the table's, and do not add up."""
    rng = random.Random(seed)
    own = {
        row.layer: {it: max(loss, 0.0) * rng.uniform(0.2, 3) for it, loss in row.losses.items()} for row in table.layers
    }
    return lambda choices: math.sqrt(sum(own[layer][it] ** 2 for layer, it in choices.items()))


def between(table: SensitivityTable, pins: Choices) -> Limit:
    """A size between the least and that of the base."""
    least = least_reachable(table, "size", (), pins)
    whole = table.fixed["size"] + sum(row.costs["size"][BASE] for row in table.layers)
    return Limit("size", 0.6 * least + 0.4 * whole)


@pytest.mark.parametrize("seed", range(6))
def test_limits_hold_and_nothing_known_is_better(seed: int) -> None:
    table = realistic(seed, 12, MENU, shared=seed % 2 == 0)
    pins = {table.layers[0].layer: BASE}
    limit = between(table, pins)
    optimum = minimise_loss(table, [limit], pins)
    seen: list[dict[str, Precision]] = []
    first, second = rough_truth(table, seed), rough_truth(table, seed + 100)

    def counted(choices: Choices) -> float:
        seen.append(dict(choices))
        return first(choices)

    taken, losses, least, models = rerank(table, [limit], pins, optimum, *asking(counted, second), lambda _: True)
    for choices in seen:
        sizes = [row.costs["size"][choices[row.layer]] for row in table.layers]
        assert math.fsum([table.fixed["size"], *sizes]) <= limit.value
        assert choices[table.layers[0].layer] == BASE
        for group in table.groups():
            assert len({choices[layer].activation for layer in group}) == 1
    assert len({tuple(it.items()) for it in seen}) == len(seen) == models <= most_measurements(1)
    for allocation in (optimum, greedy_accuracy(table, limit, pins), greedy_compression(table, limit, pins)):
        score = (first(allocation.choices) + second(allocation.choices)) / 2
        assert losses[allocation.method] == pytest.approx(score)
        assert least <= losses[allocation.method]
    assert least == pytest.approx((first(taken.choices) + second(taken.choices)) / 2)
    assert taken.costs["size"] <= limit.value
    again = rerank(table, [limit], pins, optimum, *asking(first, second), lambda _: True)
    assert again == (taken, losses, least, models)


def four_layers() -> SensitivityTable:
    """By estimate, `a` and `b` are to be lowered."""
    rows = {
        name: (name, {BASE: (0.0, 8000), W4A8: (loss, 4000)}) for name, loss in zip("abcd", (1, 2, 3, 9), strict=True)
    }
    return small_table(rows)


def test_a_rival_of_the_program_is_found() -> None:
    table, limit = four_layers(), Limit("size", 24000.0)
    optimum = minimise_loss(table, [limit])
    assert {layer for layer, it in optimum.choices.items() if it == W4A8} == {"a", "b"}

    def reference(choices: Choices) -> float:
        return sum({"a": 5.0, "b": 1.0, "c": 1.0, "d": 9.0}[layer] for layer, it in choices.items() if it == W4A8)

    taken, losses, least, models = rerank(table, [limit], {}, optimum, *asking(reference), lambda _: True)
    assert {layer for layer, it in taken.choices.items() if it == W4A8} == {"b", "c"}
    assert (least, losses[optimum.method]) == (2.0, 6.0)
    assert models > 3
    # It is not the program's optimum, and says how far its estimate is from that.
    assert not taken.optimal
    assert taken.gap == pytest.approx((5 - 3) / 5)
    names(taken.method, "integer program", "a at w4a8")


def test_the_optimum_stays_where_nothing_is_better() -> None:
    table, limit = four_layers(), Limit("size", 24000.0)
    optimum = minimise_loss(table, [limit])
    taken, losses, least, _ = rerank(table, [limit], {}, optimum, *asking(lambda _: 0.25), lambda _: True)
    assert taken is optimum
    assert least == losses["integer program"] == 0.25


def recipe(**options: object) -> Recipe:
    return Recipe(Pipeline.LIGHT, (W4A8, BASE), **options)  # type: ignore[arg-type]


def reranked_at(table: SensitivityTable, asked: Recipe, measure: Callable[[Choices], float]) -> Assigned:
    def mixup_scores(choices: Choices) -> float:
        return sum({"a": 5.0, "b": 1.0, "c": 1.0, "d": 9.0}[layer] for layer, it in choices.items() if it == W4A8)

    request = Request.of(table, asked)
    return reranked(table, request, assign(table, request, measure), measure, *asking(mixup_scores))


def test_a_loss_budget_is_kept_by_what_is_taken_and_the_size_too() -> None:
    table = four_layers()
    losses = {row.layer: row.losses for row in table.layers}

    def measure(choices: Choices) -> float:
        return table.base_loss + sum(losses[layer][it] for layer, it in choices.items())

    wide = reranked_at(table, recipe(max_loss=table.base_loss + 4.5, limits=("size=1",)), measure)
    # Without a, b and c lose 5: too much for the budget, so the optimum stays.
    assert {layer for layer, it in wide.allocation.choices.items() if it == W4A8} in ({"a", "b"}, {"a", "c"})
    assert wide.measured_loss <= table.base_loss + 4.5
    assert wide.reranking is not None
    assert wide.allocation.costs["size"] <= wide.reranking.optimum.costs["size"]
    wider = reranked_at(table, recipe(max_loss=table.base_loss + 5.5), measure)
    assert {layer for layer, it in wider.allocation.choices.items() if it == W4A8} == {"b", "c"}
    assert wider.measured_loss == pytest.approx(table.base_loss + 5) == pytest.approx(wider.estimated_loss)


def test_where_no_layer_is_lowered_nothing_is_measured() -> None:
    table = four_layers()
    asked = recipe(compression=1.0)
    request = Request.of(table, asked)
    assigned = assign(table, request, lambda _: 1.0)
    found = reranked(table, request, assigned, lambda _: 1.0, *asking(lambda _: pytest.fail("asked")))
    assert found.reranking is None
    assert set(found.allocation.choices.values()) == {BASE}


def test_the_pipeline_says_what_is_optimal_and_what_was_taken() -> None:
    model = conv_net()
    mix = Recipe(Pipeline.LIGHT, parse_bits("w4a4,w8a8"), ranges=RangeMethod.MINMAX, compression=0.53)
    result = quantize(model, feed_for(model, 40), mix)
    assert result.assigned is not None
    found = result.assigned.reranking
    assert found is not None
    assert found.optimum.optimal
    assert set(found.losses) == {"integer program", "greedy-accuracy", "greedy-compression"}
    program, taken = stage_summary(result)[1:3]
    names(program, "integer program", "optimal")
    names(taken, found.models, f"{found.least:.6g}")


@pytest.mark.parametrize("kind", [LossKind.DISTILLATION, LossKind.CROSS_ENTROPY])
def test_tokens_and_labels_are_measured_as_they_are(kind: LossKind) -> None:
    model = build(
        """net (int64[N, 4] ids) => (float[N, 5] y) {
            e = Gather <axis = 0> (table, ids)
            f = Flatten (e)
            h = Gemm (f, w1, b1)
            r = Relu (h)
            y = Gemm (r, w2, b2)
        }""",
        table=normal(10, 4),
        w1=normal(16, 12, seed=1),
        b1=normal(12, seed=2),
        w2=normal(12, 5, seed=3),
        b2=normal(5, seed=4),
    )
    rng = np.random.default_rng(0)
    data = {"ids": rng.integers(0, 10, (24, 4)), "labels": rng.integers(0, 5, 24)}
    mix = Recipe(Pipeline.LIGHT, parse_bits("w4a8,w8a8"), ranges=RangeMethod.MINMAX, compression=0.6, loss=kind)
    result = quantize(model, data, mix)
    assert result.assigned is not None
    found = result.assigned
    assert found.reranking is not None
    # All samples are those that the table was measured on: here the two losses are one.
    assert found.reranking.least == pytest.approx(found.measured_loss)
