"""What the user fixes for single layers: patterns, and what the layers that they match get."""

from __future__ import annotations

import fnmatch
import glob
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from onnxcalib.errors import RecipeError, near
from onnxcalib.recipe.choices import Precision, RangeMethod, parse_pair

FLOAT = "float"
FIRST, LAST, OP = "first", "last", "op:"
SYMMETRY = {"symmetric": True, "asymmetric": False}
GRANULARITY = {"per-channel": True, "per-tensor": False}
DYNAMIC = {"dynamic": True, "static": False}
EXAMPLES = (
    "Write GLOB=w8a8, GLOB=w8, GLOB=float, a range method, dynamic, symmetric, per-tensor, or several: "
    "GLOB=w8a8+minmax."
)


@dataclass(frozen=True)
class Override:
    """What a layer gets whatever the rest gets; None: as all others."""

    precision: Precision | None = None
    is_float: bool = False
    ranges: RangeMethod | None = None  # of its weight and of what it reads
    symmetric: bool | None = None  # of its weight
    per_channel: bool | None = None  # of its weight
    dynamic: bool | None = None  # whether the range of what it reads is found at run time

    def over(self, other: Override) -> Override:
        """Both; where they differ, this one."""
        told = {name: value for name, value in vars(self).items() if value not in (None, False) or name in SETTINGS}
        return replace(other, **{name: value for name, value in told.items() if value is not None})


SETTINGS = ("symmetric", "per_channel", "dynamic")  # for which False says something


def parse_override(text: str) -> tuple[str, Override]:
    """Reads PATTERN=VALUE, where the value may be several joined by a plus."""
    pattern, value = parse_pair("overrides", text)
    found = Override()
    for word in value.split("+"):
        found = _parse(word.strip().lower(), text).over(found)
    if found.is_float and found != Override(is_float=True):
        raise RecipeError(f"`overrides={text!r}` says more of a layer that stays float.", "Say float alone.")
    return pattern, found


def _parse(word: str, text: str) -> Override:
    if word == FLOAT:
        return Override(is_float=True)
    if word in SYMMETRY:
        return Override(symmetric=SYMMETRY[word])
    if word in GRANULARITY:
        return Override(per_channel=GRANULARITY[word])
    if word in DYNAMIC:
        return Override(dynamic=DYNAMIC[word])
    if word in (method.value for method in RangeMethod) and word != RangeMethod.AUTO:
        return Override(ranges=RangeMethod(word))
    try:
        return Override(precision=Precision.parse(word))
    except RecipeError as error:
        raise RecipeError(f"`overrides={text!r}`: '{word}' is nothing that a layer can get.", EXAMPLES) from error


def expanded(overrides: Sequence[str], ops: Mapping[str, str]) -> tuple[str, ...]:
    """The same with each pattern replaced by the names of the layers that it matches, given with their ops."""
    found = []
    for text in overrides:
        pattern, value = parse_pair("overrides", text)
        found += [f"{glob.escape(name)}={value}" for name in _matched(pattern, ops, text)]
    return tuple(found)


def by_layer(overrides: Sequence[str], names: Sequence[str]) -> dict[str, Override]:
    """What each of these layers gets by overrides that name layers; the later of two wins where both say something."""
    found: dict[str, Override] = {}
    for text in overrides:
        pattern, override = parse_override(text)
        for name in fnmatch.filter(names, pattern):
            found[name] = override.over(found.get(name, Override()))
    return found


def _matched(pattern: str, ops: Mapping[str, str], text: str) -> list[str]:
    names = list(ops)
    if pattern in (FIRST, LAST):
        return [names[0 if pattern == FIRST else -1]]
    by_op = pattern.startswith(OP)
    wanted, known = (pattern.removeprefix(OP), ops.values()) if by_op else (pattern, names)
    matched = [name for name in names if fnmatch.fnmatchcase(ops[name] if by_op else name, wanted)]
    if not matched:
        raise RecipeError(f"`overrides={text!r}` matches no layer.", near(wanted, sorted(set(known) - {""})))
    return matched
