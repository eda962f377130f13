"""Mixed precision: what was asked for, in the table's units, and the loop that measures until a loss budget is kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from by_hand import divergence
from said import names, refused

from models import build, conv_net, feed_for, normal, run, transformer_block
from onnxcalib.cli.tables import stage_summary
from onnxcalib.errors import RecipeError
from onnxcalib.mixed_precision import assignment
from onnxcalib.mixed_precision.allocate import Allocation
from onnxcalib.mixed_precision.assignment import METHODS, TRIES, Assigned
from onnxcalib.mixed_precision.request import Request, add_cost_tables
from onnxcalib.mixed_precision.table import LayerChoices, SensitivityTable
from onnxcalib.model.io import constant_bytes
from onnxcalib.numerics.output_kind import LossKind
from onnxcalib.pipeline.pipelines import quantize
from onnxcalib.recipe import Pipeline, Precision, RangeMethod, Recipe, parse_bits
from onnxcalib.recipe.overrides import expanded

BASE, W4A8, W4A4 = Precision(8, 8), Precision(4, 8), Precision(4, 4)
MENU = (W4A4, W4A8, BASE)
BASE_LOSS = 0.5
NAMES = ("stem", "block.1", "block.2", "fc")
Choices = Mapping[str, Precision]


def assign(table: SensitivityTable, asked: Recipe, measure: Callable[[Mapping[str, Precision]], float]) -> Assigned:
    return assignment.assign(table, Request.of(table, asked), measure)


def solve(table: SensitivityTable, asked: Recipe, method: str) -> Allocation:
    table = add_cost_tables(table, asked)
    return assignment.solve(table, Request.of(table, asked), method)


def example() -> SensitivityTable:
    """Four layers of 800 to 6,400 parameters; the first and the last lose most."""
    rows = []
    for index, (name, loss) in enumerate(zip(NAMES, (0.08, 0.01, 0.02, 0.04), strict=True)):
        parameters = 800 * 2**index
        rows.append(
            LayerChoices(
                name,
                f"t{index}",
                {W4A4: 1.4 * loss, W4A8: loss, BASE: 0.0},
                {
                    "size": {it: parameters * it.weight / 8 for it in MENU},
                    "bops": {it: 10.0 * parameters * it.weight * it.activation for it in MENU},
                },
            )
        )
    whole = {"size": 4 * 12000.0, "bops": 10.0 * 12000 * 1024}
    return SensitivityTable(BASE, "distillation", BASE_LOSS, 64, {"size": 0.0, "bops": 0.0}, whole, tuple(rows))


def recipe(**options: object) -> Recipe:
    return Recipe(Pipeline.LIGHT, MENU, **options)  # type: ignore[arg-type]


def additive(table: SensitivityTable, factor: float = 1.0) -> Callable[[Choices], float]:
    """A model whose loss increases are the table's, times a factor."""
    losses = {row.layer: row.losses for row in table.layers}
    return lambda choices: table.base_loss + factor * sum(losses[name][it] for name, it in choices.items())


def size_of(table: SensitivityTable, choices: Choices) -> float:
    return sum(row.costs["size"][choices[row.layer]] for row in table.layers)


def test_a_size_is_kept_and_measured_once() -> None:
    table, asked = example(), []

    def measure(choices: Choices) -> float:
        asked.append(choices)
        return 0.9

    found = assign(table, recipe(compression=0.2), measure)
    assert asked == [found.allocation.choices]
    assert found.allocation.costs["size"] <= 0.2 * table.float_costs["size"]
    # Half of 4,800 bytes at the least loss: the two middle layers, and not the costly first or last.
    assert found.allocation.choices == {"stem": BASE, "block.1": W4A8, "block.2": W4A8, "fc": BASE}
    assert found.estimated_loss == pytest.approx(BASE_LOSS + 0.03)
    assert (found.measured_loss, found.tries) == (0.9, 1)
    assert found.allocation.optimal


def test_an_honest_estimate_needs_one_try() -> None:
    table = example()
    found = assign(table, recipe(max_loss=BASE_LOSS + 0.071), additive(table))
    assert found.tries == 1
    assert found.measured_loss == pytest.approx(found.estimated_loss)
    assert found.measured_loss <= BASE_LOSS + 0.071
    # The smallest file within the budget: the two largest layers, and the smallest increase of the rest.
    assert found.allocation.choices == {"stem": BASE, "block.1": W4A8, "block.2": W4A8, "fc": W4A8}


@pytest.mark.parametrize("factor", [1.2, 2.0, 5.0, 30.0])
def test_the_measured_loss_keeps_the_budget(factor: float) -> None:
    table, most, seen = example(), BASE_LOSS + 0.071, []

    def measure(choices: Choices) -> float:
        seen.append((additive(table, factor)(choices), size_of(table, choices)))
        return seen[-1][0]

    found = assign(table, recipe(max_loss=most), measure)
    assert found.measured_loss <= most
    assert found.measured_loss == seen[-1][0]
    assert found.tries == len(seen) > 1
    assert all(loss > most for loss, _ in seen[:-1])
    # Each try gives up some gain.
    sizes = [size for _, size in seen]
    assert sizes == sorted(sizes)
    assert found.estimated_loss < found.measured_loss or found.allocation.estimated_loss == 0
    assert found.estimated_loss == pytest.approx(BASE_LOSS + found.allocation.estimated_loss)


def test_a_budget_that_is_never_kept_is_an_error() -> None:
    table, calls = example(), []

    def measure(choices: Choices) -> float:
        calls.append(choices)
        return 9.75

    with refused(RecipeError, "--max-loss 0.7", 9.75):
        assign(table, recipe(max_loss=0.7), measure)
    assert 1 < len(calls) <= TRIES
    assert set(calls[-1].values()) == {Precision(8, 8)}  # even the base precision was tried


def test_a_budget_below_the_base_loss_is_an_error() -> None:
    with refused(RecipeError, "--max-loss 0.4", "w8a8", 0.5):
        assign(example(), recipe(max_loss=0.4), lambda _: pytest.fail("nothing is to be measured"))


def test_the_base_loss_itself_can_be_kept() -> None:
    table = example()
    found = assign(table, recipe(max_loss=BASE_LOSS), additive(table))
    assert set(found.allocation.choices.values()) == {BASE}


def test_another_cost_may_be_made_small() -> None:
    table = example()
    by_size = assign(table, recipe(max_loss=BASE_LOSS + 0.057), additive(table)).allocation
    by_bops = assign(table, recipe(max_loss=BASE_LOSS + 0.057, minimise="bops"), additive(table)).allocation
    assert by_bops.costs["bops"] < by_size.costs["bops"]
    assert by_bops.costs["size"] > by_size.costs["size"]
    assert by_bops.choices["fc"] == W4A4
    with refused(RecipeError, "'bobs'", "bops"):
        assign(table, recipe(max_loss=0.6, minimise="bobs"), additive(table))


def test_a_loss_budget_and_a_limit_hold_together() -> None:
    table = example()
    asked = recipe(max_loss=BASE_LOSS + 0.2, compression=0.15, limits=("bops=0.035",))
    found = assign(table, asked, additive(table)).allocation
    assert found.costs["size"] <= 0.15 * table.float_costs["size"]
    assert found.costs["bops"] <= 0.035 * table.float_costs["bops"]


def test_limits_are_relative_to_float_and_a_users_own_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "latency.csv"
    path.write_text("layer,precision,cost\n" + "".join(f"{name},{it},{it.weight}\n" for name in NAMES for it in MENU))
    asked = recipe(compression=0.2, limits=("bops=0.05", "latency=24"), costs=(f"latency={path}",))
    table = add_cost_tables(example(), asked)
    assert [(limit.cost, limit.value) for limit in Request.of(table, asked).limits] == [
        ("size", 0.2 * 48000.0), ("bops", 0.05 * 10 * 12000 * 1024), ("latency", 24.0),
    ]  # fmt: skip
    assert add_cost_tables(example(), recipe(compression=0.2)) == example()


@pytest.mark.parametrize(
    ("limit", "fact"),
    [
        ("bop=0.05", "bops"),
        ("latency=3", "bops"),  # one of the costs that there are
        ("bops=few", "number"),
        ("bops", "NAME=VALUE"),
        ("bops=", "NAME=VALUE"),
        ("=3", "NAME=VALUE"),
    ],
)
def test_a_limit_that_says_nothing_is_refused(limit: str, fact: str) -> None:
    with refused(RecipeError, f"--limit '{limit}'", fact):
        Request.of(example(), recipe(limits=(limit,)))


def test_a_limit_that_is_no_number_is_refused() -> None:
    with refused(RecipeError, "nan", "bops"):
        solve(example(), recipe(limits=("bops=nan",)), METHODS[0])


def test_compression_needs_the_float_size() -> None:
    table = replace(example(), float_costs={})
    with refused(RecipeError, "--compression", "size"):
        solve(table, recipe(compression=0.2), METHODS[0])


def test_pins_are_patterns_and_edges() -> None:
    table = example()
    assert Request.of(table, recipe(compression=0.2)).overrides == {}
    assert Request.of(table, recipe(compression=0.2, edge_bits=8)).overrides == {"stem": BASE, "fc": BASE}
    assert Request.of(table, recipe(compression=0.2, overrides=("block.*=w4a4",))).overrides == {
        "block.1": W4A4,
        "block.2": W4A4,
    }
    # Later patterns, and patterns after the edges, go on top.
    asked = recipe(compression=0.2, edge_bits=8, overrides=("*=w4a8", "block.2=w4a4", "f?=8"))
    assert Request.of(table, asked).overrides == {"stem": W4A8, "block.1": W4A8, "block.2": W4A4, "fc": BASE}


@pytest.mark.parametrize(
    ("pin", "facts"),
    [
        ("blok.1=w4a4", ("--override 'blok.1=w4a4'", "block.1")),
        ("zzz*=w4a4", ("--override 'zzz*=w4a4'", "stem")),
        ("fc=w4x", ("'w4x'",)),
        ("fc=w9a9", ("'w9a9'",)),
        ("fc", ("--override 'fc'", "NAME=VALUE")),
    ],
)
def test_a_pin_that_fits_nothing_is_refused(pin: str, facts: tuple[object, ...]) -> None:
    with refused(RecipeError, *facts):
        expanded(recipe(compression=0.2, overrides=(pin,)).overrides, dict.fromkeys(NAMES, "Conv"))


def test_a_pin_holds_whatever_it_costs() -> None:
    table = example()
    found = assign(table, recipe(compression=0.2, overrides=("block.*=w8a8",)), additive(table)).allocation
    assert found.choices["block.1"] == found.choices["block.2"] == BASE
    assert found.costs["size"] <= 9600
    with refused(RecipeError, "'fc'", "w3a3"):
        assign(table, recipe(compression=0.2, overrides=("fc=w3a3",)), additive(table))
    with refused(RecipeError, "10,000", "compression 0.209"):
        assign(table, recipe(compression=0.15, overrides=("fc=w8a8", "block.1=8")), additive(table))


@pytest.mark.parametrize("method", METHODS[1:])
def test_a_greedy_rule_takes_one_limit(method: str) -> None:
    table = example()
    found = solve(table, recipe(compression=0.2), method)
    assert found.method == method
    assert found.costs["size"] <= 9600
    assert found.estimated_loss >= solve(table, recipe(compression=0.2), METHODS[0]).estimated_loss
    by_bops = solve(table, recipe(limits=("bops=0.04",)), method)
    assert by_bops.costs["bops"] <= 0.04 * table.float_costs["bops"]
    for asked in (recipe(max_loss=0.6), recipe(compression=0.2, limits=("bops=0.04",))):
        with refused(RecipeError, f"--method {method}", "--max-loss"):
            solve(table, asked, method)


def test_a_saved_table_is_solved_for_a_loss() -> None:
    table = example()
    found = solve(table, recipe(max_loss=BASE_LOSS + 0.071), METHODS[0])
    assert found == assign(table, recipe(max_loss=BASE_LOSS + 0.071), additive(table)).allocation
    with refused(RecipeError, "loss", 0):
        solve(table, recipe(max_loss=BASE_LOSS - 0.1), METHODS[0])


# On a model.


def light(bits: str = "w4a4,w4a8,w8a8", **options: object) -> Recipe:
    return Recipe(Pipeline.LIGHT, parse_bits(bits), ranges=RangeMethod.MINMAX, **options)  # type: ignore[arg-type]


def test_a_compression_is_kept_by_the_file() -> None:
    model = conv_net()
    data = feed_for(model, 40)
    result = quantize(model, data, light("w4a4,w8a8", compression=0.53))
    assert result.assigned is not None
    assert result.table is not None
    found = result.assigned
    assert result.plan.precisions == found.allocation.choices
    assert found.allocation.optimal
    assert constant_bytes(result.model) <= found.allocation.costs["size"] <= 0.53 * result.table.float_costs["size"]
    assert len(set(found.allocation.choices.values())) > 1
    assert found.measured_loss > 0
    (told,) = (line for line in stage_summary(result) if "integer program" in line)
    names(told, "optimal", f"{found.estimated_loss:.6g}", f"{found.measured_loss:.6g}")


@pytest.mark.parametrize("kind", [LossKind.DISTILLATION, LossKind.CROSS_ENTROPY])
def test_bits_of_a_model_of_tokens_are_assigned_by_either_loss(kind: LossKind) -> None:
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
    result = quantize(model, data, light("w4a8,w8a8", compression=0.6, loss=kind))
    assert result.assigned is not None
    assert result.table is not None
    found = result.assigned.allocation
    assert len(set(found.choices.values())) == 2
    assert found.costs["size"] <= 0.6 * result.table.float_costs["size"]
    assert (result.table.loss, result.table.samples) == (kind.value, 24)


def test_a_loss_budget_is_kept_by_the_model() -> None:
    model, most = conv_net(), 1e-3
    data = feed_for(model, 40)
    result = quantize(model, data, light("w4a4,w8a8", max_loss=most))
    assert result.assigned is not None
    assert result.table is not None
    assert result.table.base_loss < result.assigned.measured_loss <= most
    assert set(result.plan.precisions.values()) == {W4A4, BASE}
    # Tuning only ever lowers the loss of what it judges by, so the written model is about as good as was measured.
    assert divergence(run(model, data)["y"], run(result.model, data)["y"]) <= 1.5 * most


def test_layers_that_read_one_tensor_agree() -> None:
    model = transformer_block()
    result = quantize(model, feed_for(model, 24), light("w4a4,w8a8", compression=0.78, overrides=("key=w8a8",)))
    bits = {result.plan.precisions[name].activation for name in ("query", "key", "value")}
    assert bits == {8}
    assert result.plan.precisions["key"] == BASE


def test_a_users_cost_table_decides(tmp_path: Path) -> None:
    """A latency that is high at w4a8 keeps that precision away."""
    model = conv_net()
    path = tmp_path / "latency.csv"
    names = ("stem", "depth", "project", "head", "fc")
    rows = [(name, it, {W4A4: 1, W4A8: 9, BASE: 3}[it]) for name in names for it in MENU]
    path.write_text("layer,precision,cost\n" + "".join(f"{name},{it},{cost}\n" for name, it, cost in rows))
    result = quantize(model, feed_for(model, 24), light(limits=("latency=11",), costs=(f"latency={path}",)))
    assert result.assigned is not None
    chosen = result.assigned.allocation.choices
    assert W4A8 not in chosen.values()
    assert sum(cost for name, it, cost in rows if chosen[name] == it) <= 11
    assert result.assigned.allocation.costs["latency"] <= 11
    assert list(chosen.values()).count(BASE) == 3
    made_small = quantize(
        model, feed_for(model, 24), light(max_loss=10.0, minimise="latency", costs=(f"latency={path}",))
    )
    assert set(made_small.plan.precisions.values()) == {W4A4}
    assert result.table is not None
    assert "latency" in result.table.cost_names()


def test_an_unknown_layer_in_a_cost_table_is_named(tmp_path: Path) -> None:
    path = tmp_path / "latency.csv"
    path.write_text("layer,precision,cost\nstemm,w8a8,1\n")
    with refused(RecipeError, path, "line 2", "'stemm'", "stem"):
        quantize(conv_net(), feed_for(conv_net(), 8), light("w4a4,w8a8", compression=0.5, costs=(f"latency={path}",)))
