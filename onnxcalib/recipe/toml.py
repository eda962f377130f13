"""Recipes as TOML, there and back."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from reprlib import repr as brief
from typing import Any

from onnxcalib.errors import RecipeError, first_line, near
from onnxcalib.files import read_text
from onnxcalib.recipe.choices import ENUMS, Precision, parse_bits, parse_choice
from onnxcalib.recipe.keys import IMAGE_KEYS, IMAGES, KEYS, Key, Kind
from onnxcalib.recipe.presets import PRESETS, preset_options
from onnxcalib.recipe.recipe import RECIPE_FIELDS, Recipe
from onnxcalib.recipe.settings import Settings, fields_set, options_of, settings_of

_IMAGE_KEYS = {key.name: key for key in IMAGE_KEYS}


def read_recipe(source: str | Path) -> Recipe:
    """Reads a TOML recipe, or takes a preset by name; unknown keys and wrong types are errors.

    Args:
        source: The path of a file that sets nothing but the recipe's own fields, or the name of a preset.
    """
    options = read_options(source)
    for name in options.keys() - RECIPE_FIELDS:
        raise RecipeError(f"recipe {source} sets '{name}', which is no part of the recipe.", "Use read_settings.")
    return Recipe(**options)


def read_settings(source: str | Path) -> Settings:
    """Reads all that a TOML recipe can hold, or takes a preset by name.

    Args:
        source: The path of a file, or the name of a preset.
    """
    return settings_of(read_options(source))


def read_options(source: str | Path) -> dict[str, Any]:
    """The options that a TOML recipe or a preset sets, checked one by one, so that others can go on top."""
    if str(source) in PRESETS:
        return preset_options(str(source))
    try:
        table = tomllib.loads(read_text(Path(source)))
    except OSError as error:
        hint = f"Check the path, or name a preset: {', '.join(PRESETS)}."
        raise RecipeError(f"recipe {source} cannot be read: {error.strerror}.", hint) from error
    except (ValueError, RecursionError) as error:  # bytes that are no text, and numbers too long to read, as well
        raise RecipeError(f"recipe {source} is not valid TOML: {first_line(error)}.", "Mend that line.") from error
    if "pins" in table and "overrides" not in table:  # as recipes called them once
        table["overrides"] = table.pop("pins")
    images = table.pop(IMAGES, {})
    if not isinstance(images, dict):
        raise RecipeError(f"recipe {source}: '{IMAGES}' must be a table.", f"Begin a line with [{IMAGES}].")
    options = _checked(str(source), table, KEYS, _IMAGE_KEYS, f"It belongs below [{IMAGES}].")
    read = _checked(str(source), images, _IMAGE_KEYS, KEYS, f"It belongs above [{IMAGES}].")
    return options | ({IMAGES: read} if read else {})


def write_recipe(recipe: Recipe) -> str:
    """The recipe as TOML text; reading it gives the same recipe.

    Args:
        recipe: The recipe to write.
    """
    return _lines(fields_set(recipe))


def write_settings(settings: Settings) -> str:
    """The settings as TOML text; reading it gives the same settings.

    Args:
        settings: The settings to write.
    """
    options = options_of(settings)
    images = options.pop(IMAGES, None)
    return _lines(options) + (f"\n[{IMAGES}]\n{_lines(images)}" if images else "")


def to_toml(value: Any) -> str:
    """A value as TOML text."""
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{to_toml(name)} = {to_toml(item)}" for name, item in value.items()) + " }"
    if isinstance(value, tuple):
        return "[" + ", ".join(to_toml(item) for item in value) + "]"
    if isinstance(value, str | Precision | Path):
        # TOML's strings are JSON's, but for one character that TOML wants escaped, and nobody can read others.
        text = json.dumps(str(value), ensure_ascii=False)
        # So that no terminal takes a name for a command.
        return "".join(each if each.isprintable() else f"\\U{ord(each):08x}" for each in text)
    return str(value).lower() if isinstance(value, bool) else str(value)


def _lines(values: Mapping[str, Any]) -> str:
    return "".join(f"{name} = {to_toml(value)}\n" for name, value in values.items())


def _checked(
    source: str, table: Mapping[str, Any], known: Mapping[str, Key], elsewhere: Collection[str], move: str
) -> dict[str, Any]:
    for name in table:
        if name not in known:
            hint = move if name in elsewhere else near(name, sorted(known))
            raise RecipeError(f"recipe {source} has an unknown key '{name}'.", hint)
    return {name: _value(source, known[name], value) for name, value in table.items()}


def _value(source: str, key: Key, value: Any) -> Any:
    read = _READERS[key.kind](value)
    if read is None:
        raise RecipeError(
            f"recipe {source}: '{key.name}' must be {key.kind.value}, not {brief(value)}.", "Mend that line."
        )
    try:
        if key.kind is Kind.BITS:
            return parse_bits(read)
        return parse_choice(key.name, read) if key.name in ENUMS else read
    except RecipeError as error:
        raise RecipeError(f"recipe {source}: {error.message}", error.hint) from error


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


_READERS: Mapping[Kind, Callable[[Any], Any]] = {
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
