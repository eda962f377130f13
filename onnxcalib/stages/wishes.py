"""What a recipe wishes for its layers: the menu of each, and whether pins, limits and cost tables make sense."""

from __future__ import annotations

from collections.abc import Sequence

from onnxcalib.errors import RecipeError
from onnxcalib.model.layers import Layer
from onnxcalib.recipe import FLOAT_BITS, Precision, Recipe
from onnxcalib.stages.allocate import check_request
from onnxcalib.stages.mixed import add_cost_tables, limits_of, pins_of
from onnxcalib.stages.rounding import Menu
from onnxcalib.stages.sensitivity_table import LayerChoices, SensitivityTable
from onnxcalib.targets import Target
from onnxcalib.targets.target import BLOCK_OPSET, Blocks, widths


def menus_of(layers: Sequence[Layer], recipe: Recipe) -> Menu:
    """What each layer may get; the edges may also get the edge bits, and who shares their input may follow."""
    menus = {layer.name: set(recipe.bits) for layer in layers}
    if recipe.edge_bits is not None:
        edges = {layer.name: layer.input for layer in (layers[0], layers[-1])}
        for layer in layers:
            if layer.name in edges:
                menus[layer.name].add(recipe.base.edge(recipe.edge_bits))
            elif layer.input in edges.values() and not recipe.weight_only:
                menus[layer.name] |= {Precision(it.weight, recipe.edge_bits) for it in recipe.bits}
    return {name: tuple(sorted(menu)) for name, menu in menus.items()}


def check_bits(recipe: Recipe, target: Target) -> tuple[Precision, ...]:
    """All precisions that are asked for, each of which the target must allow."""
    if recipe.weight_only:
        _check_weight_only(recipe, target)
    edges = () if recipe.edge_bits is None else (recipe.base.edge(recipe.edge_bits),)
    asked = (*recipe.bits, *edges)
    for precision in asked:
        for what, bits, allowed in (
            ("weight", precision.weight, target.weight_bits),
            ("activation", precision.activation, (*target.activation_bits, FLOAT_BITS)),
        ):
            if bits not in allowed:
                option = "--edge-bits" if precision in edges and precision not in recipe.bits else "--bits"
                raise RecipeError(
                    f"target {target.name} does not allow {bits} {what} bits ({option} {precision}).",
                    f"It allows {widths(target.weight_bits)} bits for weights and {widths(target.activation_bits)} "
                    "for activations.",
                )
    return asked


def _check_weight_only(recipe: Recipe, target: Target) -> None:
    if not target.weight_only_bits:
        raise RecipeError(
            f"target {target.name} has no use for quantized weights under float activations.", "Give --bits 8 or w4a8."
        )
    asked = {precision.weight for precision in recipe.bits} | {recipe.edge_bits}
    if target.weight_only_blocks is Blocks.NEEDED and recipe.block_size is None and 4 in asked:
        raise RecipeError(
            f"target {target.name} takes four-bit weights alone in blocks only.", "Give --block-size, such as 128."
        )
    if recipe.block_size is not None and target.opset_limit < BLOCK_OPSET:
        raise RecipeError(
            f"--block-size needs opset {BLOCK_OPSET}, and target {target.name} reads {target.opset_limit} at most.",
            "Leave it out.",
        )
    if recipe.block_size is not None and target.weight_only_blocks is Blocks.NONE:
        raise RecipeError(f"target {target.name} does not take --block-size.", "Leave it out.")


def check_wishes(recipe: Recipe, layers: Sequence[Layer], menus: Menu) -> None:
    """Raise a RecipeError now for what no measurement could make right."""
    table = add_cost_tables(_unmeasured(recipe, layers, menus), recipe)
    limits = limits_of(table, recipe)
    for limit in limits:
        if limit.value < 0:
            raise RecipeError(f"the limit of {limit.cost} is negative, and no cost is.", "Give a positive one.")
    check_request(table, limits, pins_of(table, recipe), recipe.minimise or "size")


def _unmeasured(recipe: Recipe, layers: Sequence[Layer], menus: Menu) -> SensitivityTable:
    """The sensitivity table to come, with every number still unknown."""
    names = ["size", "activation", *(["bops"] if all(layer.macs is not None for layer in layers) else [])]
    rows = []
    for layer in layers:
        nothing = dict.fromkeys(menus[layer.name], 0.0)
        rows.append(LayerChoices(layer.name, layer.input, nothing, dict.fromkeys(names, nothing)))
    ones = dict.fromkeys(names, 1.0)
    return SensitivityTable(recipe.base, "unmeasured", 0.0, 0, {}, ones, tuple(rows))
