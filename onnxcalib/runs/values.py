"""Values of stages as a JSON tree and plain arrays, and back; exact to the bit."""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np

from onnxcalib.engine.gradients import NoGradientError
from onnxcalib.numerics.grid import Array, Grid
from onnxcalib.numerics.statistics import TensorStatistics
from onnxcalib.plan import Candidates, LayerParams, QuantPlan
from onnxcalib.recipe import Precision
from onnxcalib.stages.adaquant import Optimised
from onnxcalib.stages.allocate import Allocation
from onnxcalib.stages.batchnorm import Tuned
from onnxcalib.stages.calibrate import Statistics
from onnxcalib.stages.equalize import Equalization
from onnxcalib.stages.mixed import Assigned
from onnxcalib.stages.network import NetworkTuned
from onnxcalib.stages.rivals import Contest
from onnxcalib.stages.sensitivity import Measured
from onnxcalib.stages.sensitivity_table import LayerChoices, SensitivityTable


def pack(value: Any, arrays: list[Array]) -> Any:
    """The value as JSON takes it; every object has one key, which says what it is, and arrays go to the list."""
    if isinstance(value, np.ndarray | np.generic):
        if value.dtype.hasobject:
            raise TypeError("an array of Python objects cannot be kept")
        arrays.append(np.asarray(value, order="C"))
        return {"array" if isinstance(value, np.ndarray) else "scalar": len(arrays) - 1}
    if isinstance(value, enum.Enum):
        return pack(value.value, arrays)
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, Mapping):
        return {"map": [[pack(key, arrays), pack(item, arrays)] for key, item in value.items()]}
    if isinstance(value, tuple | list):
        packed = [pack(item, arrays) for item in value]
        return {"tuple": packed} if isinstance(value, tuple) else packed
    return {type(value).__name__: {name: pack(getattr(value, name), arrays) for name in _fields(value)}}


def unpack(tree: Any, arrays: Sequence[Array]) -> Any:
    """The value that was packed."""
    if isinstance(tree, list):
        return [unpack(item, arrays) for item in tree]
    if not isinstance(tree, dict):
        return tree
    ((kind, content),) = tree.items()
    if kind in ("array", "scalar"):
        return arrays[content] if kind == "array" else arrays[content][()]
    if kind == "map":
        return {unpack(key, arrays): unpack(item, arrays) for key, item in content}
    if kind == "tuple":
        return tuple(unpack(item, arrays) for item in content)
    return _classes()[kind](**{name: unpack(item, arrays) for name, item in content.items()})


def digest(*values: Any) -> str:
    """Names the content of values: equal content has equal names."""
    arrays: list[Array] = []
    tree = pack(values, arrays)
    return checksum(json.dumps(tree), arrays)[:32]


def checksum(text: str, arrays: Sequence[Array]) -> str:
    """SHA-256 over a text and arrays."""
    total = hashlib.sha256(text.encode())
    for array in arrays:
        total.update(f"{array.dtype.str}{array.shape}".encode())
        total.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return total.hexdigest()


def figures(value: Any) -> dict[str, Any]:
    """The numbers of a value, and how many things its mappings hold: what a log tells of it."""
    told: dict[str, Any] = {}
    for name in _fields(value):
        item = getattr(value, name)
        if isinstance(item, str | int | float):
            told[name] = item
        elif isinstance(item, Mapping):
            told[name] = len(item)
    return told


def _fields(value: Any) -> tuple[str, ...]:
    if isinstance(value, NoGradientError):
        return ("op", "node", "reason")
    return tuple(field.name for field in dataclasses.fields(value))


@cache
def _classes() -> dict[str, Any]:
    # The steps know the run directory, not the other way round.
    from onnxcalib.steps import Trained

    known = (
        Allocation, Assigned, Candidates, Contest, Equalization, Grid, LayerChoices, LayerParams, Measured,
        NetworkTuned, NoGradientError, Optimised, Precision, QuantPlan, SensitivityTable, Statistics, TensorStatistics,
        Trained, Tuned,
    )  # fmt: skip
    return {kind.__name__: kind for kind in known}
