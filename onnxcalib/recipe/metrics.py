"""A metric by its name, or a function of the user's own."""

from __future__ import annotations

import hashlib
import importlib
import inspect
import sys
from dataclasses import replace

from onnxcalib.errors import RecipeError, first_line, near
from onnxcalib.numerics.metric import Metric, MetricFunction, from_function
from onnxcalib.numerics.metrics import METRICS


def find_metric(wanted: str | MetricFunction) -> Metric:
    """A metric by its name, by MODULE:FUNCTION, or a function itself."""
    if callable(wanted):
        return _own(wanted, getattr(wanted, "__qualname__", "metric"))
    if wanted in METRICS:
        return METRICS[wanted]
    module, colon, name = wanted.partition(":")
    if not colon:
        raise RecipeError(f"`metric={wanted!r}` is unknown.", f"{near(wanted, METRICS)} Or name MODULE:FUNCTION.")
    sys.path.insert(0, "")  # a file beside the user's data, as `python -m` would find it
    try:
        function = getattr(importlib.import_module(module), name, None)
    except Exception as error:
        raise RecipeError(
            f"`metric={wanted!r}`: {module} cannot be imported: {first_line(error)}.", "Mend it."
        ) from error
    finally:
        sys.path.remove("")
    if not callable(function):
        raise RecipeError(f"`metric={wanted!r}`: {module} has no function {name}.", "Mend the name.")
    return _own(function, wanted)


def _own(function: MetricFunction, name: str) -> Metric:
    return replace(from_function(function, name), source=_source(function))


def _source(function: MetricFunction) -> str:
    try:
        text = inspect.getsource(function)
    except (OSError, TypeError):
        text = repr(getattr(function, "__code__", function))
    return hashlib.sha256(text.encode()).hexdigest()
