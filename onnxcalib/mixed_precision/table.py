"""What each layer loses and costs at each precision: the table that the integer program reads."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from onnxcalib.errors import RecipeError
from onnxcalib.recipe import Precision


@dataclass(frozen=True)
class LayerChoices:
    """One layer: the tensor that it reads, and the loss increase and the costs of each precision that it may take."""

    layer: str
    tensor: str
    losses: Mapping[Precision, float]
    costs: Mapping[str, Mapping[Precision, float]]


@dataclass(frozen=True)
class SensitivityTable:
    """The measured choices of every layer; a loss is the increase over the model with every layer at the base."""

    base: Precision
    loss: str
    base_loss: float
    samples: int
    fixed: Mapping[str, float]
    float_costs: Mapping[str, float]
    layers: tuple[LayerChoices, ...]

    def cost_names(self) -> tuple[str, ...]:
        """The names of the costs that every layer carries."""
        return tuple(self.layers[0].costs) if self.layers else ()

    def groups(self) -> tuple[tuple[str, ...], ...]:
        """The layers that read one tensor, and so share its activation bits, group by group in model order."""
        readers: dict[str, list[str]] = {}
        for row in self.layers:
            readers.setdefault(row.tensor, []).append(row.layer)
        return tuple(tuple(names) for names in readers.values())


def check(table: SensitivityTable) -> None:
    """Raise a RecipeError unless every layer has the base and one finite loss and cost for each of its choices."""
    if not table.layers:
        raise RecipeError("the sensitivity table has no layers.")
    seen: set[str] = set()
    for row in table.layers:
        if row.layer in seen:
            raise RecipeError(f"layer {row.layer!r} is twice in the sensitivity table.")
        seen.add(row.layer)
        _check_layer(row, table)
    scalars = {"the base loss": table.base_loss}
    scalars |= {f"the fixed {name}": value for name, value in table.fixed.items()}
    scalars |= {f"the float {name}": value for name, value in table.float_costs.items()}
    for what, value in scalars.items():
        if not math.isfinite(value):
            raise RecipeError(f"{what} is {value}, not a finite number.")
    # Names become columns and comment lines of the CSV file.
    for name in (table.loss, *table.fixed, *table.float_costs, *table.cost_names()):
        if not name.strip() or not name.isprintable() or (name == table.loss and ":" in name):
            raise RecipeError(f"{name!r} cannot be the name of a loss or a cost in a file.")


def _check_layer(row: LayerChoices, table: SensitivityTable) -> None:
    if not row.losses:
        raise RecipeError(f"layer {row.layer!r} has no choices.")
    if table.base not in row.losses:
        raise RecipeError(f"layer {row.layer!r} lacks the base precision {table.base} among its choices.")
    for precision, loss in row.losses.items():
        if not math.isfinite(loss):
            raise RecipeError(f"layer {row.layer!r} at {precision} has the loss {loss}, not a finite number.")
    if set(row.costs) != set(table.cost_names()):
        raise RecipeError(f"layer {row.layer!r} has the costs {sorted(row.costs)}, not {sorted(table.cost_names())}.")
    for name, costs in row.costs.items():
        for precision in {*row.losses, *costs}:
            if precision not in costs or precision not in row.losses:
                raise RecipeError(f"layer {row.layer!r} at {precision} has a loss or a {name} cost, but not both.")
            if not (math.isfinite(costs[precision]) and costs[precision] >= 0):
                raise RecipeError(f"layer {row.layer!r} at {precision} has the {name} cost {costs[precision]}.")
