"""Which range estimator suits a model: each is tried, the one with the least distillation loss is taken."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from onnxcalib.plan import QuantPlan
from onnxcalib.recipe import RangeMethod

CANDIDATES = (RangeMethod.MSE, RangeMethod.AVERAGED, RangeMethod.PERCENTILE)
SAMPLES = 256


def best_ranges(
    widths: Iterable[int],
    plan_at: Callable[[int, RangeMethod], QuantPlan],
    loss_of: Callable[[QuantPlan], float],
) -> dict[int, RangeMethod]:
    """The best estimator for each activation width; the first of equals."""
    best = {}
    for bits in widths:
        losses = {method: loss_of(plan_at(bits, method)) for method in CANDIDATES}
        best[bits] = min(losses, key=losses.__getitem__)
    return best
