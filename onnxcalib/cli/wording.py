"""Messages in the words of the command line: they name parameters as Python does, and a person typed options."""

from __future__ import annotations

import ast
import re
import shlex

from onnxcalib.recipe import IMAGE_KEYS, KEYS
from onnxcalib.recipe.keys import Kind

RENAMED = {"limits": "limit", "costs": "cost", "overrides": "override"}
OPTIONS = {*KEYS, *(key.name for key in IMAGE_KEYS), "data", "method", "model", "points", "reference"}
PARAMETER = re.compile(r"`([a-z_]+)(?:=([^`]*))?`")


def flag(key: str) -> str:
    """The option of a key."""
    return f"--{key.replace('_', '-')}"


def as_typed(message: str) -> str:
    """The message with `steps=0` as --steps 0; what is no option stays as it is."""
    return PARAMETER.sub(_option, message)


def _option(found: re.Match[str]) -> str:
    name, value = found.groups()
    if name not in OPTIONS:
        return found[0]
    option = flag(RENAMED.get(name, name))
    if value is None:
        return option
    return f"{option} {_typed(value, pattern=name in KEYS and KEYS[name].kind in (Kind.WORDS, Kind.TABLE))}"


def _typed(value: str, *, pattern: bool) -> str:
    """The value as a shell reads it; patterns and pairs are easier to tell from the sentence within quotes."""
    try:
        text = ast.literal_eval(value)
    except (SyntaxError, ValueError):
        return value
    if not isinstance(text, str):
        return value
    quoted = shlex.quote(text)
    return f"'{text}'" if pattern and quoted == text else quoted
