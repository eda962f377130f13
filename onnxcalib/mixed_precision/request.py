"""What a recipe asks of its layers: candidate precisions, overrides and limits, and whether they make sense."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from onnxcalib.algorithms.rounding import CandidatePrecisions
from onnxcalib.errors import RecipeError, near
from onnxcalib.mixed_precision.allocate import Limit, check_request
from onnxcalib.mixed_precision.table import LayerChoices, SensitivityTable
from onnxcalib.mixed_precision.table_files import with_costs
from onnxcalib.model.layers import Layer
from onnxcalib.model.placement import InsertionPoints
from onnxcalib.recipe import FLOAT_BITS, MIN_BITS, Precision, Recipe, parse_pair
from onnxcalib.recipe.overrides import Override, by_layer, expanded, parse_override
from onnxcalib.targets import Target
from onnxcalib.targets.target import BLOCK_OPSET, Blocks, widths


@dataclass(frozen=True)
class Request:
    """What an assignment must keep, in the units of a sensitivity table, and what it should make small."""

    limits: tuple[Limit, ...]
    overrides: Mapping[str, Precision]  # by layer
    max_loss: float | None
    minimise: str

    @classmethod
    def of(cls, table: SensitivityTable, recipe: Recipe) -> Request:
        """The recipe's request of a table that has the user's own costs."""
        overrides = _overrides([row.layer for row in table.layers], recipe)
        return cls(tuple(_limits(table, recipe)), overrides, recipe.mixed_precision.max_loss, recipe.get("minimise"))


def naming_layers(recipe: Recipe, layers: Sequence[Layer]) -> Recipe:
    """The recipe with overrides that name these layers; one that matches none of them is an error."""
    return replace(recipe, overrides=expanded(recipe.overrides, {layer.name: layer.op for layer in layers}))


def naming_rows(recipe: Recipe, table: SensitivityTable) -> Recipe:
    """The same for a table, which knows names only."""
    return replace(recipe, overrides=expanded(recipe.overrides, {row.layer: "" for row in table.layers}))


def offered(table: SensitivityTable) -> tuple[Precision, ...]:
    """What every layer of a table may take, as the bits of a recipe: of those it needs one below the base."""
    common = {table.base} | set.intersection(*(set(row.losses) for row in table.layers))
    lowest = Precision(MIN_BITS, FLOAT_BITS if table.base.weight_only else MIN_BITS)
    return tuple(sorted(common if len(common) > 1 else {*common, lowest}))


def check_overrides(overrides: Mapping[str, Override], layers: Sequence[Layer], target: Target) -> None:
    """Raise a RecipeError for a form of weights that the target does not take."""
    for layer in layers:
        own = overrides.get(layer.name, Override())
        lacks = ""
        if own.per_channel and not (target.has_channels(layer.op) and layer.per_channel):
            lacks = f"one scale a channel in such a {layer.op}"
        if own.symmetric is False and target.symmetric_weights:
            lacks = "asymmetric weights"
        if lacks:
            raise RecipeError(f"`overrides` of '{layer.name}': target {target.name} has no {lacks}.", "Leave that out.")


def edge_precisions(names: Sequence[str], recipe: Recipe, precision: Precision) -> dict[str, Precision]:
    """What the first and the last layer get beside layers of a precision, where edge bits are given."""
    if recipe.edge_bits is None:
        return {}
    return dict.fromkeys((names[0], names[-1]), precision.edge(recipe.edge_bits))


def uniform_precisions(layers: Sequence[Layer], points: InsertionPoints, recipe: Recipe) -> dict[str, Precision]:
    """Every layer at the one precision, but for the edges; who reads one tensor gets the most bits of its readers."""
    names = [layer.name for layer in layers]
    chosen = dict.fromkeys(names, recipe.bits[0]) | edge_precisions(names, recipe, recipe.bits[0])
    chosen |= _precisions(names, recipe)
    shared = dict(chosen)
    for tensor in points.tensors.values():
        bits = max((chosen[name].activation for name in tensor.layers), default=0)
        shared |= {name: Precision(chosen[name].weight, bits) for name in tensor.layers}
    return shared


def candidate_precisions(layers: Sequence[Layer], recipe: Recipe) -> CandidatePrecisions:
    """What each layer may get; the edges and overrides may also get theirs, and who shares their input may follow."""
    candidates = {layer.name: set(recipe.bits) for layer in layers}
    names = list(candidates)
    fixed = edge_precisions(names, recipe, recipe.highest) | _precisions(names, recipe)
    activations: dict[str, set[int]] = {}  # by tensor: bits that a layer with a precision of its own reads it at
    for layer in layers:
        if layer.name in fixed:
            candidates[layer.name].add(fixed[layer.name])
            activations.setdefault(layer.input, set()).add(fixed[layer.name].activation)
    for layer in layers:
        others = activations.get(layer.input, set()) if layer.name not in fixed and not recipe.weight_only else set()
        candidates[layer.name] |= {Precision(it.weight, bits) for it in recipe.quantized for bits in others}
    return {name: tuple(sorted(each)) for name, each in candidates.items()}


def quantized_only(candidates: CandidatePrecisions) -> CandidatePrecisions:
    """The same without float, for which there is nothing to round."""
    return {name: tuple(it for it in each if not it.is_float) for name, each in candidates.items()}


def add_cost_tables(table: SensitivityTable, recipe: Recipe) -> SensitivityTable:
    """The table with the user's own costs."""
    for text in recipe.mixed_precision.costs:
        name, path = parse_pair("costs", text)
        table = with_costs(table, name, Path(path))
    return table


def check_bits(recipe: Recipe, target: Target) -> tuple[Precision, ...]:
    """All precisions that are asked for, each of which the target must allow."""
    if recipe.weight_only:
        _check_weight_only(recipe, target)
    edges = () if recipe.edge_bits is None else (recipe.highest.edge(recipe.edge_bits),)
    fixed = [override.precision for _, override in map(parse_override, recipe.overrides)]
    asked = (*recipe.quantized, *edges, *(precision for precision in fixed if precision is not None))
    for precision in asked:
        for what, bits, allowed in (
            ("weight", precision.weight, target.weight_bits),
            ("activation", precision.activation, (*target.activation_bits, FLOAT_BITS)),
        ):
            if bits not in allowed:
                option = "bits" if precision in recipe.bits else "edge_bits" if precision in edges else "overrides"
                raise RecipeError(
                    f"target {target.name} does not allow {bits} {what} bits (`{option}={str(precision)!r}`).",
                    f"It allows {widths(target.weight_bits)} bits for weights and {widths(target.activation_bits)} "
                    "for activations.",
                )
    return asked


def check_mixed(recipe: Recipe, layers: Sequence[Layer]) -> None:
    """Raise a RecipeError now for what no measurement could make right."""
    table = add_cost_tables(_unmeasured(recipe, layers), recipe)
    request = Request.of(table, recipe)
    for limit in request.limits:
        if limit.value < 0:
            raise RecipeError(f"the limit of {limit.cost} is negative, and no cost is.", "Give a positive one.")
    check_request(table, request.limits, request.overrides, request.minimise)


def _limits(table: SensitivityTable, recipe: Recipe) -> list[Limit]:
    """Built-in costs are asked for relative to float, a user's own as they are."""
    limits = []
    if recipe.mixed_precision.compression is not None:
        if "size" not in table.float_costs:
            raise RecipeError("`compression` needs the float size, which the table lacks.", "Measure the table again.")
        limits.append(Limit("size", recipe.mixed_precision.compression * table.float_costs["size"]))
    for text in recipe.mixed_precision.limits:
        name, value = parse_pair("limits", text)
        if name not in table.cost_names():
            raise RecipeError(f"`limits={text!r}` names no cost.", near(name, table.cost_names()))
        try:
            number = float(value)
        except ValueError as error:
            raise RecipeError(f"`limits={text!r}` has no number.", "Write bops=0.05.") from error
        limits.append(Limit(name, number * table.float_costs.get(name, 1.0)))
    return limits


def _overrides(names: Sequence[str], recipe: Recipe) -> dict[str, Precision]:
    """The precision of every layer that is fixed: the edges', then those that patterns name."""
    fixed = edge_precisions(names, recipe, recipe.highest)
    return fixed | _precisions(names, recipe)


def _precisions(names: Sequence[str], recipe: Recipe) -> dict[str, Precision]:
    """The precisions that overrides name."""
    found = by_layer(recipe.overrides, names)
    return {name: override.precision for name, override in found.items() if override.precision is not None}


def _check_weight_only(recipe: Recipe, target: Target) -> None:
    if not target.weight_only_bits:
        raise RecipeError(
            f"target {target.name} has no use for quantized weights under float activations.", "Give `bits` 8 or w4a8."
        )
    asked = {precision.weight for precision in recipe.quantized} | {recipe.edge_bits}
    if target.weight_only_blocks is Blocks.NEEDED and recipe.weights.block_size is None and 4 in asked:
        raise RecipeError(
            f"target {target.name} takes four-bit weights alone in blocks only.", "Give `block_size`, such as 128."
        )
    if recipe.weights.block_size is not None and target.opset_limit < BLOCK_OPSET:
        raise RecipeError(
            f"`block_size` needs opset {BLOCK_OPSET}, and target {target.name} reads {target.opset_limit} at most.",
            "Leave it out.",
        )
    if recipe.weights.block_size is not None and target.weight_only_blocks is Blocks.NONE:
        raise RecipeError(f"target {target.name} does not take `block_size`.", "Leave it out.")


def _unmeasured(recipe: Recipe, layers: Sequence[Layer]) -> SensitivityTable:
    """The sensitivity table to come, with every number still unknown."""
    names = ["size", "activation", *(["bops"] if all(layer.macs is not None for layer in layers) else [])]
    candidates = candidate_precisions(layers, recipe)
    rows = []
    for layer in layers:
        nothing = dict.fromkeys(candidates[layer.name], 0.0)
        rows.append(LayerChoices(layer.name, layer.input, nothing, dict.fromkeys(names, nothing)))
    ones = dict.fromkeys(names, 1.0)
    return SensitivityTable(recipe.base, "unmeasured", 0.0, 0, {}, ones, tuple(rows))
