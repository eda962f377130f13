"""Targets from TOML: every key is known, typed and bounded, and a target may be like another but for a few keys."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from reprlib import repr as brief
from typing import Any

from onnxcalib.errors import RecipeError, first_line, near
from onnxcalib.files import read_text
from onnxcalib.targets.target import (
    Bias,
    Blocks,
    Constants,
    Dynamic,
    Format,
    Narrow,
    Placement,
    Severity,
    Storage,
    Target,
    Verdict,
)

LAYER_OPS = ("Conv", "ConvTranspose", "Gemm", "MatMul")
ACTIVATION_TYPES = {
    "u8": {"signed_activations": False, "unsigned_if_positive": False},
    "s8": {"signed_activations": True, "unsigned_if_positive": False},
    "s8 or u8": {"signed_activations": True, "unsigned_if_positive": True},
}
Fields = dict[str, Any]


@dataclass(frozen=True)
class _Key:
    words: str  # what it takes
    takes: Callable[[Any], bool]
    fields: Callable[[Any], Fields]


def _one_of(choices: Mapping[str, Fields]) -> _Key:
    words = " or ".join(f'"{choice}"' for choice in choices)
    return _Key(words, lambda value: isinstance(value, str) and value in choices, choices.__getitem__)


def _enum(field: str, kind: type[Any]) -> _Key:
    return _one_of({member.value: {field: member} for member in kind})


def _flag(field: str) -> _Key:
    return _Key("true or false", lambda value: isinstance(value, bool), lambda value: {field: value})


def _number(field: str, low: int, high: int) -> _Key:
    words = f"a whole number from {low} to {high}"
    return _Key(words, lambda value: type(value) is int and low <= value <= high, lambda value: {field: value})


def _bits(field: str, choices: Collection[int] = range(2, 9), words: str = "2 to 8", *, empty: bool = False) -> _Key:
    def takes(value: Any) -> bool:
        whole = isinstance(value, list) and all(type(bits) is int and bits in choices for bits in value)
        return whole and bool(value or empty)

    return _Key(f"a list of widths from {words}", takes, lambda value: {field: tuple(sorted(set(value)))})


def _per_channel() -> _Key:
    def takes(value: Any) -> bool:
        return isinstance(value, bool) or (
            isinstance(value, list) and bool(value) and all(op in LAYER_OPS for op in value)
        )

    def fields(value: Any) -> Fields:
        return {"per_channel": bool(value), "per_channel_ops": tuple(value) if isinstance(value, list) else LAYER_OPS}

    return _Key(f"true, false or a list of ops among {', '.join(LAYER_OPS)}", takes, fields)


def _words(field: str, choices: tuple[str, ...] = ()) -> _Key:
    def takes(value: Any) -> bool:
        texts = isinstance(value, list) and all(isinstance(item, str) for item in value)
        return texts and (not choices or set(value) <= set(choices))

    words = f"a list of ops among {', '.join(choices)}" if choices else "a list of texts"
    return _Key(words, takes, lambda value: {field: tuple(value)})


def _text(field: str) -> _Key:
    return _Key("a text", lambda value: isinstance(value, str) and bool(value), lambda value: {field: value})


KEYS: Mapping[str, _Key] = {
    "name": _text("name"),
    "summary": _text("summary"),
    "activations.type": _one_of(ACTIVATION_TYPES),
    "activations.symmetric": _flag("symmetric_activations"),
    "activations.bits": _bits("activation_bits"),
    "activations.narrow": _enum("narrow", Narrow),
    "activations.dynamic": _enum("dynamic", Dynamic),
    "weights.type": _one_of({"s8": {"signed_weights": True}, "u8": {"signed_weights": False}}),
    "weights.symmetric": _flag("symmetric_weights"),
    "weights.per_channel": _per_channel(),
    "weights.shifted_bits": _bits("shifted_bits", range(2, 7), "2 to 6", empty=True),
    "weights.bits": _bits("weight_bits"),
    "weights.weight_only_bits": _bits("weight_only_bits", empty=True),
    "weights.weight_only_ops": _words("weight_only_ops", LAYER_OPS),
    "weights.weight_only_blocks": _enum("weight_only_blocks", Blocks),
    "weights.storage": _enum("storage", Storage),
    "weights.table_bits": _bits("table_bits", (4, 8), "4 and 8"),
    "weights.constants": _enum("constants", Constants),
    "bias.type": _enum("bias", Bias),
    "bias.ops": _words("bias_ops", LAYER_OPS),
    "scales.power_of_two": _flag("power_of_two"),
    "scales.rounding_safe": _flag("rounding_safe"),
    "graph.format": _enum("format", Format),
    "graph.placement": _enum("placement", Placement),
    "graph.float_compute": _flag("float_compute"),
    "graph.products": _one_of({"integer": {"integer_products": True}, "float": {"integer_products": False}}),
    "graph.fixed_shapes": _flag("fixed_shapes"),
    "graph.shared_constants": _flag("shared_constants"),
    "graph.oldest_opset": _number("oldest_opset", 13, 23),
    "graph.newest_opset": _number("newest_opset", 13, 23),
    "graph.opset_limit": _number("opset_limit", 13, 25),
    "graph.newest_ir": _number("newest_ir", 7, 13),
    "graph.domains": _words("domains"),
}
REQUIRED = (
    "name", "summary", "activations.type", "activations.symmetric", "activations.bits", "weights.type",
    "weights.symmetric", "weights.per_channel", "weights.bits", "weights.storage", "bias.type", "graph.placement",
)  # fmt: skip
TABLES = ("activations", "weights", "bias", "scales", "graph", "sources", "check")


def read_target(file: Traversable, source: str, known: Mapping[str, Target]) -> Target:
    """The target that a TOML file describes; known are those that it may be like."""
    try:
        text = read_text(file) if isinstance(file, Path) else file.read_text(encoding="utf-8")
        table = tomllib.loads(text)
    except OSError as error:
        raise RecipeError(f"target {source} cannot be read: {error.strerror}.", "Check the path.") from error
    except (ValueError, RecursionError) as error:
        raise _wrong(f"{source} is not valid TOML: {first_line(error)}.") from error
    like = table.pop("like", None)
    if like is not None and str(like) not in known:
        raise _wrong(f"{source}: 'like' names '{like}', which is not a target.", near(str(like), known))
    sources, check = _table(table, "sources", source), _table(table, "check", source)
    given = _given(table, source, REQUIRED if like is None else ())
    words = {key: _sentence(source, f"sources.{key}", value) for key, value in sources.items()}
    verdicts = {rule: _verdict(source, rule, value) for rule, value in check.items()}
    if like is None:
        target = Target(**given, sources=words, check={**_everywhere(), **verdicts})
    else:
        base = known[like]
        target = replace(base, **given, sources={**base.sources, **words}, check={**base.check, **verdicts})
    oldest, newest, limit = target.oldest_opset, target.newest_opset, target.opset_limit
    if not oldest <= newest <= limit:
        bounds = f"'graph.oldest_opset' ({oldest}) and 'graph.opset_limit' ({limit})"
        raise _wrong(f"{source}: 'graph.newest_opset' ({newest}) must lie between {bounds}.", "Mend these lines.")
    if target.storage is Storage.BIT_PLANES and target.signed_weights and target.symmetric_weights:
        return target
    if given.get("shifted_bits"):
        needs = "signed symmetric weights that are stored as planes"
        raise _wrong(f"{source}: 'weights.shifted_bits' needs {needs}.", "Leave it out, or change these.")
    return replace(target, shifted_bits=())  # of the target that it is like


def _wrong(what: str, hint: str = "Mend that line.") -> RecipeError:
    return RecipeError(f"target {what}", hint)


@cache
def rules() -> dict[str, dict[str, str]]:
    """Every rule of `check`: what it finds, and for those that hold everywhere the severity and the source."""
    file = resources.files(__package__) / "rules.toml"
    return tomllib.loads(file.read_text(encoding="utf-8"))


def _table(table: Fields, name: str, source: str) -> Fields:
    found = table.pop(name, {})
    if not isinstance(found, dict):
        raise _wrong(f"{source}: '{name}' must be a table, not {brief(found)}.", f"Write [{name}].")
    return found


def _given(table: Fields, source: str, required: Collection[str]) -> Fields:
    given: Fields = {}
    flat = _flat(table)
    for key, value in flat.items():
        if key not in KEYS:
            raise _wrong(f"{source} has an unknown key '{key}'.", near(key, [*KEYS, *TABLES, "like"]))
        if not KEYS[key].takes(value):
            raise _wrong(f"{source}: '{key}' must be {KEYS[key].words}, not {brief(value)}.")
        given |= KEYS[key].fields(value)
    for key in required:
        if key not in flat:
            raise _wrong(f"{source} lacks '{key}' ({KEYS[key].words}).", 'Add it, or start with like = "ort".')
    return given


def _flat(table: Fields) -> Fields:
    flat: Fields = {}
    for key, value in table.items():
        flat |= {f"{key}.{inner}": item for inner, item in value.items()} if isinstance(value, dict) else {key: value}
    return flat


def _sentence(source: str, key: str, value: Any) -> str:
    if not isinstance(value, str):
        raise _wrong(f"{source}: '{key}' must be a text, not {brief(value)}.")
    return value


def _verdict(source: str, rule: str, value: Any) -> Verdict:
    """A severity alone, or a table with a reason and a source of its own."""
    known, keys = rules(), ("severity", "reason", "source")
    if rule not in known:
        raise _wrong(f"{source} has an unknown rule 'check.{rule}'.", near(rule, known))
    table = value if isinstance(value, dict) else {"severity": value}
    for key in table:
        if key not in keys:
            raise _wrong(f"{source} has an unknown key 'check.{rule}.{key}'.", near(key, keys))
    severity = table.get("severity")
    if severity not in list(Severity):
        raise _wrong(f"{source}: 'check.{rule}' must have a severity, {', '.join(Severity)}, not {brief(severity)}.")
    texts = {key: _sentence(source, f"check.{rule}.{key}", table.get(key, "")) for key in ("reason", "source")}
    return Verdict(Severity(severity), texts["reason"], texts["source"] or known[rule].get("source", ""))


def _everywhere() -> dict[str, Verdict]:
    """The rules that hold for every target."""
    return {
        name: Verdict(Severity(rule["severity"]), "", rule["source"])
        for name, rule in rules().items()
        if "severity" in rule
    }
