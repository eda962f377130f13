"""Values of stages as a JSON tree and plain arrays, and back; exact to the bit."""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import cache
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import numpy as np

from onnxcalib.data.arrays import give_back
from onnxcalib.errors import OnnxcalibError
from onnxcalib.numerics.quant_params import Array


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


class UnpackError(Exception):
    """A tree that no value was packed into."""


def unpack(tree: Any, arrays: Sequence[Array], classes: Mapping[str, type]) -> Any:
    """The value that was packed; its dataclasses are among the given ones, and their fields hold what they declare."""

    def value(tree: Any) -> Any:
        if isinstance(tree, list):
            return [value(item) for item in tree]
        if not isinstance(tree, dict):
            return tree
        ((kind, content),) = tree.items()
        if kind in ("array", "scalar"):
            return arrays[content] if kind == "array" else arrays[content][()]
        if kind == "map":
            return {value(key): value(item) for key, item in content}
        if kind == "tuple":
            return tuple(value(item) for item in content)
        return _built(classes[kind], {name: value(item) for name, item in content.items()})

    try:
        return value(tree)
    except (LookupError, TypeError, ValueError, AttributeError, OnnxcalibError) as error:
        raise UnpackError(f"{type(error).__name__}: {error}") from error


def _built(kind: type, given: dict[str, Any]) -> Any:
    hints = _hints(kind)
    for name, item in given.items():
        if not holds(item, hints[name]):
            raise TypeError(f"{kind.__name__}.{name} cannot be a {type(item).__name__}")
    return kind(**given)


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


# What stands for a number, besides the type that is declared.
NUMBERS: Mapping[type, Any] = {float: float | int | np.number, int: int | np.integer, bool: bool | np.bool_}


def holds(value: Any, hint: Any) -> bool:
    """Whether a value may be what a field declares; enums come as their values, and of other kinds all is believed."""
    if hint is Any:  # which is a class since Python 3.11
        return True
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return any(holds(value, each) for each in args)
    if origin is tuple:
        each = args[:1] * len(value) if args[1:] == (...,) and isinstance(value, tuple) else args
        return isinstance(value, tuple) and len(value) == len(each) and all(map(holds, value, each))
    if origin is np.ndarray:
        return isinstance(value, np.ndarray | np.generic)  # arithmetic makes scalars of arrays without axes
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return isinstance(value, dict) and all(holds(key, args[0]) and holds(value[key], args[1]) for key in value)
    if isinstance(origin, type) and issubclass(origin, Sequence):
        return isinstance(value, list | tuple) and all(holds(item, args[0]) for item in value)
    if not isinstance(hint, type) or issubclass(hint, enum.Enum):
        return True
    return isinstance(value, NUMBERS.get(hint, hint))


def classes_in(*hints: Any) -> dict[str, type]:
    """Every dataclass that values of the given types can hold, by name."""
    found: dict[str, type] = {}
    todo = list(hints)
    while todo:
        hint = todo.pop()
        todo += get_args(hint)
        if isinstance(hint, type) and dataclasses.is_dataclass(hint) and hint.__name__ not in found:
            found[hint.__name__] = hint
            todo += get_type_hints(hint).values()
    return found


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
        give_back(array)
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
    return tuple(field.name for field in dataclasses.fields(value))
