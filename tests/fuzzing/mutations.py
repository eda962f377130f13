"""Damages bytes, text, and the fields of protobuf messages."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx
from numpy.random import Generator

INTEGERS = (0, 1, -1, 2, 3, 7, 8, 16, 127, 255, 2**16, 2**31 - 1, 2**31, 2**32, 2**40, 2**62, 2**63 - 1, -(2**63))
FLOATS = (0.0, -0.0, 1.0, -1.0, 1e-40, 1e38, -1e38, float("inf"), float("-inf"), float("nan"))
TEXTS = (
    "",
    "x",
    "..",
    "../../x",
    "/etc/hostname",
    "a" * 5000,
    "[bold]x[/bold]",
    "\x1b[2J",
    "\u202e",
    "{}",
    "%s",
    "\n",
    "\0",
    "=1+1",
)
WORDS = (
    "Conv", "Gemm", "MatMul", "Relu", "Reshape", "Transpose", "Constant", "Identity", "If", "Loop", "Cast", "Concat",
    "BatchNormalization", "QuantizeLinear", "Nothing", "Add", "Clip", "Squeeze", "Expand", "ConstantOfShape", "Gather",
    "Slice", "LSTM", "Shape", "Range", "Tile", "Softmax", "ConvTranspose", "Scan", "SequenceEmpty", "Optional",
    "com.microsoft", "ai.onnx",
)  # fmt: skip
MARK = "\u2603mark\u2603"


def damaged_bytes(data: bytes, other: bytes, rng: Generator) -> bytes:
    """One to three flips, cuts, insertions, repetitions or splices."""
    for _ in range(int(rng.integers(1, 4))):
        if not data:
            return bytes(rng.integers(0, 256, 8, np.uint8))
        at = int(rng.integers(len(data)))
        end = min(len(data), at + int(rng.choice([1, 1, 2, 4, 8, 64, 1024])))
        kind = int(rng.integers(8))
        some = bytes(rng.integers(0, 256, end - at, np.uint8))
        if kind <= 1:
            data = data[:at] + bytes([data[at] ^ (1 << int(rng.integers(8)))]) + data[at + 1 :]
        elif kind == 2:
            data = data[:at]
        else:
            start = int(rng.integers(len(other) or 1))
            piece = {3: b"", 4: some + data[at:end], 5: some, 6: data[at:end] * 2, 7: other[start : start + end - at]}[
                kind
            ]
            data = data[:at] + piece + data[end:]
    return data


def damaged_text(text: str, rng: Generator) -> str:
    """One to three words or numbers replaced, or lines dropped, repeated, nested or moved."""
    for _ in range(int(rng.integers(1, 4))):
        places = [match.span() for match in re.finditer(r'"[^"]*"|[\w.+-]+|[=,\[\]#]', text)]
        if not places:
            return text
        first, last = places[int(rng.integers(len(places)))]
        kind = int(rng.integers(7))
        if kind <= 2:
            values = [
                str(_choice(INTEGERS, rng)),
                str(_choice(FLOATS, rng)),
                repr(_choice(TEXTS, rng)),
                "true",
                "[]",
                "{}",
                "w4a4",
                "'x'",
            ]
            text = text[:first] + _choice(values, rng) + text[last:]
        elif kind == 3:
            other = places[int(rng.integers(len(places)))]
            text = text[:first] + text[slice(*other)] + text[last:]
        elif kind == 4:
            text = text[:first] + text[last:]
        elif kind == 5:
            depth = int(rng.choice([1, 3, 200, 5000]))
            text = text[:first] + "[" * depth + text[first:last] + "]" * depth + text[last:]
        else:
            lines = text.splitlines(keepends=True)
            line = lines[int(rng.integers(len(lines)))]
            lines.insert(int(rng.integers(len(lines) + 1)), line)
            text = "".join(lines)
    return text


def damaged_model(model: onnx.ModelProto, rng: Generator) -> bytes:
    """One to three fields changed; perhaps a text that is no UTF-8, or weights in a file that is not there."""
    strings = sorted({value for _, _, value in _fields(model) if isinstance(value, str)} | set(WORDS))
    for _ in range(int(rng.integers(1, 4))):
        _damage_field(model, strings, rng)
    if rng.random() < 0.03 and model.graph.initializer:
        tensor = _choice(model.graph.initializer, rng)
        tensor.data_location = onnx.TensorProto.EXTERNAL
        onnx.external_data_helper.set_external_data(
            tensor, _choice(TEXTS, rng) or "w", _choice(INTEGERS, rng), _choice(INTEGERS, rng)
        )
        tensor.ClearField("raw_data")
    data = bytes(model.SerializeToString())
    mark = MARK.encode()
    if rng.random() < 0.03:
        texts = [field for field in _fields(model) if isinstance(field[2], str)]
        place = _choice(texts or [(model, "producer_name", "")], rng)
        if not place[1].endswith("]"):
            setattr(place[0], place[1], MARK)
            data = bytes(model.SerializeToString())
    return data.replace(mark, b"\xff\xfe" + b"\x80" * (len(mark) - 2))


def _damage_field(model: onnx.ModelProto, strings: list[str], rng: Generator) -> None:
    """Changes one field of one message; kinds of messages are drawn first, for there are many tensors in a model."""
    messages = list(_messages(model))
    kinds = sorted({type(message).__name__ for message in messages})
    kind = _choice(kinds, rng)
    message = _choice([each for each in messages if type(each).__name__ == kind], rng)
    set_fields = [field for field, _ in message.ListFields()]
    others = [field for field in message.DESCRIPTOR.fields if field.type != field.TYPE_MESSAGE]
    if not set_fields and not others:
        return
    field = _choice(set_fields if set_fields and rng.random() < 0.85 else (others or set_fields), rng)
    value = getattr(message, field.name)
    if not hasattr(value, "extend"):
        if field.type == field.TYPE_MESSAGE:
            message.ClearField(field.name)
        else:
            _put(message, field.name, _other(value, strings, rng))
        return
    _damage_items(value, strings, rng, messages=field.type == field.TYPE_MESSAGE)


def _damage_items(value: Any, strings: list[str], rng: Generator, *, messages: bool) -> None:
    """Drops, repeats, shuffles or changes items of a repeated field."""
    what = int(rng.integers(5))
    if what == 0 and len(value):
        del value[int(rng.integers(len(value)))]
    elif what == 1 and len(value):
        value.extend([value[int(rng.integers(len(value)))]])
    elif what == 2 and len(value) > 1:
        kept = [_copy(each) for each in value]
        del value[:]
        value.extend([kept[place] for place in rng.permutation(len(kept))])
    elif what == 3 and len(value) and messages:
        del value[:]
    elif not messages and len(value):
        place = int(rng.integers(len(value)))
        try:
            value[place] = _other(value[place], strings, rng)
        except ValueError:
            del value[place]
    elif not messages:
        _extend(value, rng)


def _extend(value: Any, rng: Generator) -> None:
    for item in (_choice(INTEGERS, rng), 1.5, "x", b"x"):
        try:
            value.extend([item])
        except (TypeError, ValueError):
            continue
        return


def _other(value: Any, strings: list[str], rng: Generator) -> Any:
    if isinstance(value, bool | int):
        near = (value + 1, value - 1, value * 2, value // 2, -value)
        return int(_choice(near if rng.random() < 0.4 else INTEGERS, rng))
    if isinstance(value, float):
        return _choice(FLOATS, rng)
    if isinstance(value, bytes):
        return damaged_bytes(value, b"\0" * 16, rng)
    return _choice(strings if rng.random() < 0.7 else TEXTS, rng)


def _put(message: Any, name: str, value: Any) -> None:
    """Sets a field, if its type takes the value at all."""
    try:
        setattr(message, name, value)
    except (TypeError, ValueError):
        message.ClearField(name)


def _messages(message: Any) -> Iterator[Any]:
    yield message
    for field, value in message.ListFields():
        if field.type == field.TYPE_MESSAGE:
            for each in value if hasattr(value, "extend") else [value]:
                yield from _messages(each)


def _fields(message: Any) -> Iterator[tuple[Any, str, Any]]:
    for each in _messages(message):
        for field, value in each.ListFields():
            if field.type != field.TYPE_MESSAGE:
                if hasattr(value, "extend"):
                    yield from ((each, f"{field.name}[]", item) for item in value)
                else:
                    yield each, field.name, value


def _copy(value: Any) -> Any:
    if not hasattr(value, "CopyFrom"):
        return value
    copy = type(value)()
    copy.CopyFrom(value)
    return copy


def _choice(items: Any, rng: Generator) -> Any:
    return items[int(rng.integers(len(items)))]
