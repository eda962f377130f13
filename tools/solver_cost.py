"""What HiGHS takes for the integer program of a large model: the benchmark's part `solver`."""

from __future__ import annotations

import math
import random
import time
from pathlib import Path

from onnxcalib.mixed_precision.allocate import Limit, minimise_loss
from onnxcalib.mixed_precision.solver import SolveOptions
from onnxcalib.mixed_precision.table import LayerChoices, SensitivityTable
from onnxcalib.recipe import Precision

LAYERS = 500
OFFERED = [Precision(weight, activation) for weight in range(2, 9) for activation in range(2, 9)]
BASE = Precision(8, 8)


def solver(_cases: object, _folder: Path) -> None:
    """One limit and two, at the gap that quantize asks for and at a hundredth of it."""
    table = _table(random.Random(7))
    for asked in ({"size": 0.15}, {"size": 0.2, "bops": 0.02}):
        limits = [Limit(name, share * table.float_costs[name]) for name, share in asked.items()]
        for gap in (1e-4, 1e-6):
            began = time.perf_counter()
            found = minimise_loss(table, limits, options=SolveOptions(gap=gap, time_limit=300))
            print(
                f"{LAYERS} layers x {len(OFFERED)} precisions, limits {', '.join(asked)}, gap {gap:g} asked: "
                f"{time.perf_counter() - began:.1f} s, gap {found.gap:.2g}, loss {found.estimated_loss:.8g}",
                flush=True,
            )


def _table(rng: random.Random) -> SensitivityTable:
    """Layers whose losses fall by four a bit, give or take; every third tensor has two readers."""
    rows = []
    for index in range(LAYERS):
        size, loss = rng.lognormvariate(10, 1.5), rng.lognormvariate(0, 2)
        losses = {
            it: max(loss * (4.0**-it.weight + 4.0**-it.activation / 2) * math.exp(rng.gauss(0, 0.3)), 0.0)
            for it in OFFERED
        }
        costs = {
            "size": {it: float(math.ceil(size * it.weight / 8)) for it in OFFERED},
            "bops": {it: size * 196 * it.weight * it.activation for it in OFFERED},
        }
        tensor = f"tensor{index - 1 if index % 3 == 2 else index}"
        rows.append(LayerChoices(f"layer{index}", tensor, {**losses, BASE: 0.0}, costs))
    floats = {name: 16 * math.fsum(row.costs[name][BASE] for row in rows) for name in ("bops",)}
    floats["size"] = 4 * math.fsum(row.costs["size"][BASE] for row in rows)
    return SensitivityTable(BASE, "kl", 0.1, 256, {"size": 4321.0}, floats, tuple(rows))
