"""Products of attention: which are quantized, how they are named, and what leaves them float."""

import numpy as np
import pytest

from models import UNOPTIMIZED, feed_for, run, transformer_block
from onnxcalib import Recipe, quantize
from onnxcalib.errors import RecipeError
from onnxcalib.model.quantized import read_quantized
from onnxcalib.pipeline.job import start


def products(**options: object) -> tuple[list[str], list[str]]:
    """The names of the quantized products, and of those that stay float."""
    model = transformer_block()
    started = start(model, feed_for(model), Recipe(ranges="minmax", **options))
    floats = [node.name for node in started.listed.float_nodes]
    return [it.name for it in started.jobs[0].products], floats


def test_both_products_are_quantized_for_ort() -> None:
    assert products() == (["scores", "mix"], [])


@pytest.mark.parametrize("options", [{"exclude": ["scores"]}, {"overrides": {"sc*": "float"}}])
def test_a_product_can_be_left_float(options: dict[str, object]) -> None:
    assert products(**options) == (["mix"], ["scores"])


@pytest.mark.parametrize("options", [{"bits": "w8"}, {"target": "paper"}])
def test_they_stay_float_where_the_target_has_no_kernel_or_activations_do(options: dict[str, object]) -> None:
    assert products(**options) == ([], ["scores", "mix"])


def test_bits_of_a_product_cannot_be_chosen() -> None:
    with pytest.raises(RecipeError, match="scores"):
        products(overrides={"scores": "w4a4"})


def test_an_override_of_layers_and_products_holds_for_both() -> None:
    model = transformer_block()
    started = start(model, feed_for(model), Recipe(overrides={"*": "w8a8"}))
    assert len(started.jobs[0].products) == 2
    assert all(each.precision is not None for each in started.jobs[0].overrides.values())


def test_each_operand_has_its_own_grid_and_scores_have_none() -> None:
    model = transformer_block()
    plan = quantize(model, feed_for(model), Recipe(ranges="minmax")).plan
    assert {"q", "kt", "a", "v"} <= set(plan.shared)
    assert "s" not in plan.shared
    assert plan.shared["a"].range[0] == 0
    assert float(plan.shared["a"].range[1]) <= 1.02


def test_the_file_computes_what_the_simulation_does() -> None:
    model = transformer_block()
    feed = feed_for(model)
    started = start(model, feed, Recipe(ranges="minmax"))
    result = quantize(model, feed, Recipe(ranges="minmax"))
    simulated = run(started.jobs[0].simulate(result.plan), feed, **UNOPTIMIZED)["y"]
    np.testing.assert_array_equal(run(result.model, feed, **UNOPTIMIZED)["y"], simulated)
    np.testing.assert_allclose(run(result.model, feed)["y"], simulated, atol=1e-5)


def test_readers_of_the_file_count_products_as_integer() -> None:
    model = transformer_block()
    made = quantize(model, feed_for(model), Recipe(ranges="minmax")).model
    assert read_quantized(made).floats == ()
    left = quantize(model, feed_for(model), Recipe(ranges="minmax", exclude=["mix"])).model
    assert [node.name for node in read_quantized(left).floats] == ["mix"]
