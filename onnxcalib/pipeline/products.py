"""Which products of attention are quantized: where the target has integer kernels for them and nobody left them out."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from onnxcalib.errors import RecipeError
from onnxcalib.model.float_nodes import FloatNode
from onnxcalib.model.layers import LayerList, Product
from onnxcalib.recipe import Activations, Recipe
from onnxcalib.recipe.overrides import parse_override
from onnxcalib.targets import Target


def without_products(recipe: Recipe, listed: LayerList) -> tuple[Recipe, frozenset[str]]:
    """The recipe without overrides that name products alone, and the products that overrides leave float.

    Products have no weight and eight bits: float is all that can be said of one.
    """
    names = [product.name for product in listed.products]
    floats: set[str] = set()
    kept = []
    for text in recipe.overrides:
        pattern, override = parse_override(text)
        found = fnmatch.filter(names, pattern)
        others = any(fnmatch.fnmatchcase(layer.name, pattern) for layer in listed.layers)
        if found and not others and not override.is_float:
            raise RecipeError(
                f"`overrides={text!r}` names '{found[0]}', a product of attention, which has no weight and eight bits.",
                f"{pattern}=float leaves it float.",
            )
        floats |= set(found) if override.is_float else set()
        kept += [text] if others or not found else []
    return replace(recipe, overrides=tuple(kept)), frozenset(floats)


def chosen_products(
    products: Sequence[Product],
    target: Target,
    wanted: Callable[[str], bool],
    floats: Collection[str],
    activations: Activations,
) -> tuple[Product, ...]:
    """Those that are quantized, which takes static ranges."""
    if not target.integer_products or target.float_activations or activations is Activations.DYNAMIC:
        return ()
    return tuple(product for product in products if wanted(product.name) and product.name not in floats)


def told_float(listed: LayerList, chosen: Collection[str], target: Target, activations: Activations) -> LayerList:
    """The list with the products that stay float among what does, and why."""
    reason = "it is a product of attention, which was left out"
    if target.float_activations:
        reason = "both operands are computed, and only weights are quantized"
    elif not target.integer_products:
        reason = f"both operands are computed, and target {target.name} keeps products of attention float"
    elif activations is Activations.DYNAMIC:
        reason = "both operands are computed, and only layers have ranges that are found at run time"
    left = [product for product in listed.products if product.name not in chosen]
    floats = (FloatNode(product.name, product.op, reason) for product in left)
    kept = tuple(product for product in listed.products if product.name in chosen)
    return replace(listed, float_nodes=(*listed.float_nodes, *floats), products=kept)
