"""Which range estimator suits a model: each is tried, the one with the least distillation loss is taken."""

from __future__ import annotations

from collections.abc import Callable

from onnxcalib.plan import QuantPlan
from onnxcalib.recipe import RangeMethod

CANDIDATES = (RangeMethod.MSE, RangeMethod.AVERAGED, RangeMethod.PERCENTILE)
SAMPLES = 256


def best_plan(make: Callable[[RangeMethod], QuantPlan], loss: Callable[[QuantPlan], float]) -> QuantPlan:
    """The plan of the best estimator; the first of equals."""
    return min((make(method) for method in CANDIDATES), key=loss)
