"""Recipes as TOML, there and back."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from onnxcalib.errors import RecipeError, near
from onnxcalib.recipe.choices import ENUMS, Precision, parse_bits, parse_choice
from onnxcalib.recipe.recipe import Recipe


def read_recipe(path: str | Path) -> Recipe:
    """Reads a TOML recipe; unknown keys and wrong types are errors."""
    return Recipe(**read_options(path))


def read_options(path: str | Path) -> dict[str, Any]:
    """The options that a TOML recipe sets, checked one by one, so that others can go on top."""
    try:
        table = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise RecipeError(f"recipe {path} cannot be read: {error.strerror}.", "Check the path.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise RecipeError(f"recipe {path} is not valid TOML: {error}.", "Mend that line.") from error
    known = {f.name for f in fields(Recipe)}
    for key in table:
        if key not in known:
            raise RecipeError(f"recipe {path} has an unknown key '{key}'.", near(key, sorted(known)))
    return {key: _from_toml(str(path), key, value) for key, value in table.items()}


def write_recipe(recipe: Recipe) -> str:
    """The recipe as TOML text; reading it gives the same recipe."""
    lines = [f"{f.name} = {_to_toml(getattr(recipe, f.name))}" for f in fields(recipe) if _is_set(recipe, f.name)]
    return "\n".join(lines) + "\n"


def _is_set(recipe: Recipe, name: str) -> bool:
    return getattr(recipe, name) is not None


_KINDS: Mapping[str, tuple[type[Any], str]] = {
    "pipeline": (str, "a string"),
    "target": (str, "a string"),
    "ranges": (str, "a string"),
    "edge_bits": (int, "an integer"),
    "seed": (int, "an integer"),
    "include": (list, "a list of strings"),
    "exclude": (list, "a list of strings"),
    "bits": (list, "a list of strings"),
    "compression": (float, "a number"),
    "max_loss": (float, "a number"),
    "limits": (list, "a list of strings"),
    "costs": (list, "a list of strings"),
    "minimise": (str, "a string"),
    "pins": (list, "a list of strings"),
    "loss": (str, "a string"),
    "bn_reference": (str, "a string"),
    "engine": (str, "a string"),
    "layer_optimizer": (str, "a string"),
    "training": (str, "a string"),
    "steps": (int, "an integer"),
    "strict": (bool, "true or false"),
}


def _from_toml(path: str, key: str, value: Any) -> Any:
    kind, words = _KINDS[key]
    if kind is float and type(value) is int:
        value = float(value)
    if key == "bits" and isinstance(value, str | int) and not isinstance(value, bool):
        return parse_bits(str(value))
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise RecipeError(f"recipe {path}: '{key}' must be {words}, not {value!r}.", "Mend that line.")
    if kind is list and not all(isinstance(item, str) for item in value):
        raise RecipeError(f"recipe {path}: '{key}' must be {words}.", "Mend that line.")
    if key == "bits":
        return parse_bits(",".join(value))
    return parse_choice(key, value) if key in ENUMS else tuple(value) if kind is list else value


def _to_toml(value: Any) -> str:
    if isinstance(value, tuple):
        return "[" + ", ".join(_to_toml(item) for item in value) + "]"
    if isinstance(value, str | Precision):
        # TOML's strings are JSON's, but for one character that TOML wants escaped.
        return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")
    return str(value).lower() if isinstance(value, bool) else str(value)
