"""The compression-loss curve: many sizes solved from one sensitivity table, beside both greedy baselines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from onnxcalib.errors import RecipeError
from onnxcalib.mixed_precision.allocate import GREEDY, Allocation, Limit, least_reachable, minimise_loss
from onnxcalib.mixed_precision.table import SensitivityTable
from onnxcalib.recipe import Precision

Overrides = Mapping[str, Precision]


@dataclass(frozen=True)
class Point:
    """One assignment on the curve."""

    ratio: float  # the size asked for, relative to float
    method: str
    size: float  # the size that the assignment takes, relative to float
    estimated_loss: float
    measured_loss: float | None
    allocation: Allocation


def ratios_between(table: SensitivityTable, count: int, overrides: Overrides) -> list[float]:
    """Evenly spaced ratios from the least reachable size to every layer at its pin or the base precision."""
    whole = table.float_costs["size"]
    least = least_reachable(table, "size", (), overrides) / whole
    highest = sum(row.costs["size"][overrides.get(row.layer, table.base)] for row in table.layers)
    most = (table.fixed["size"] + highest) / whole
    return [float(ratio) for ratio in np.linspace(least, max(most, least), count)]


def curve(table: SensitivityTable, ratios: list[float], overrides: Overrides) -> Iterator[Point]:
    """Each ratio solved exactly and by both greedy rules, not measured yet."""
    whole = table.float_costs["size"]
    for ratio in ratios:
        limit = Limit("size", ratio * whole * (1 + 1e-12))
        for solve in (_exact, *GREEDY.values()):
            try:
                found = solve(table, limit, overrides)
            except RecipeError:
                if solve is _exact:
                    raise
                continue  # a greedy rule may miss sizes that an exact one reaches
            estimate = table.base_loss + found.estimated_loss
            yield Point(ratio, found.method, found.costs["size"] / whole, estimate, None, found)


def _exact(table: SensitivityTable, limit: Limit, overrides: Overrides) -> Allocation:
    return minimise_loss(table, [limit], overrides)
