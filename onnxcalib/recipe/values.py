"""The values of a file's keys by kind: each reader gives None for what it does not take."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from onnxcalib.recipe.keys import Kind


def _of(*types: type[Any]) -> Callable[[Any], Any]:
    """The value if it is of these types; true and false are no numbers."""
    return lambda value: value if type(value) in types else None


def _list_of(item: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def read(value: Any) -> Any:
        items = [item(each) for each in value] if isinstance(value, list) else [None]
        return None if None in items else tuple(items)

    return read


def _overrides(value: Any) -> Any:
    if isinstance(value, dict) and all(type(item) is str for item in value.values()):
        return tuple(f"{pattern}={item}" for pattern, item in value.items())
    return _list_of(_of(str))(value)


def _number(value: Any) -> float | None:
    try:
        return None if _of(int, float)(value) is None else float(value)
    except OverflowError:
        return None


def _numbers(value: Any) -> Any:
    one = _number(value)
    return _list_of(_number)(value) if one is None else (one,)


def _size(value: Any) -> Any:
    pair = _list_of(_of(int))(value)
    return pair if pair is not None and len(pair) == 2 else _of(int)(value)


def _bits(value: Any) -> str | None:
    if _of(int, str)(value) is not None:
        return str(value)
    words = _list_of(_of(str))(value)
    return ",".join(words) if words else None


READERS: Mapping[Kind, Callable[[Any], Any]] = {
    Kind.WORD: _of(str),
    Kind.PATH: lambda value: Path(value) if type(value) is str else None,
    Kind.WORDS: _list_of(_of(str)),
    Kind.TABLE: _overrides,
    Kind.BITS: _bits,
    Kind.INTEGER: _of(int),
    Kind.NUMBER: _number,
    Kind.NUMBERS: _numbers,
    Kind.SIZE: _size,
    Kind.FLAG: _of(bool),
}
