"""Recipes as TOML, there and back."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from reprlib import repr as brief
from typing import Any

from onnxcalib.errors import RecipeError, first_line, near
from onnxcalib.files import read_text
from onnxcalib.recipe.choices import ENUMS, Precision, parse_bits, parse_choice
from onnxcalib.recipe.groups import MAIN
from onnxcalib.recipe.keys import IMAGES, KEYS, TABLES, Key, Kind
from onnxcalib.recipe.presets import PRESETS, preset_options
from onnxcalib.recipe.recipe import RECIPE_KEYS, Recipe
from onnxcalib.recipe.settings import Settings, options_of, recipe_options, settings_of
from onnxcalib.recipe.values import READERS


def read_recipe(source: str | Path) -> Recipe:
    """Reads a TOML recipe, or takes a preset by name; unknown keys and wrong types are errors.

    Args:
        source: The path of a file that sets nothing but the recipe's own fields, or the name of a preset.
    """
    options = read_options(source)
    for name in options.keys() - RECIPE_KEYS:
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
    tables = {name: _table(source, name, table.pop(name)) for name in TABLES if _is_table(table, name)}
    options = _checked(source, None, table)
    for name, content in tables.items():
        read = _checked(source, name, content)
        if name == IMAGES:
            options |= {IMAGES: read} if read else {}
            continue
        for key in read.keys() & options.keys():
            raise RecipeError(f"recipe {source} sets '{key}' above and below [{name}].", "Leave one of them.")
        options |= read
    return options


def write_recipe(recipe: Recipe) -> str:
    """The recipe as TOML text; reading it gives the same recipe.

    Args:
        recipe: The recipe to write.
    """
    return _written(recipe_options(recipe))


def write_settings(settings: Settings) -> str:
    """The settings as TOML text; reading it gives the same settings.

    Args:
        settings: The settings to write.
    """
    return _written(options_of(settings))


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


def _written(options: dict[str, Any]) -> str:
    """The options as text, those of groups in their tables, empty lists left out there."""
    images = options.pop(IMAGES, {})
    own = {key.name for section in TABLES.values() for key in section.keys}
    text = _lines({name: value for name, value in options.items() if name not in own})
    for name, section in TABLES.items():
        given = images if name == IMAGES else options
        rows = {
            shown: given[key.name] for shown, key in section.by_name.items() if given.get(key.name) not in (None, ())
        }
        text += f"\n[{name}]\n{_lines(rows)}" if rows else ""
    return text


def _lines(values: Mapping[str, Any]) -> str:
    return "".join(f"{name} = {to_toml(value)}\n" for name, value in values.items())


def _is_table(table: Mapping[str, Any], name: str) -> bool:
    """Whether the key is to be a table: some groups may also be a word, for their main field."""
    return name in table and not (name in MAIN and not isinstance(table[name], dict))


def _table(source: str | Path, name: str, content: Any) -> dict[str, Any]:
    if not isinstance(content, dict):
        raise RecipeError(f"recipe {source}: '{name}' must be a table.", f"Begin a line with [{name}].")
    return content


def _checked(source: str | Path, inside: str | None, table: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a table, or of what stands above all tables, by key."""
    known = KEYS if inside is None else TABLES[inside].by_name
    for name in table:
        if name not in known:
            hint = _place(name, inside) or near(name, sorted(known))
            raise RecipeError(f"recipe {source} has an unknown key '{name}'.", hint)
    return {known[name].name: _value(str(source), name, known[name], value) for name, value in table.items()}


def _place(name: str, inside: str | None) -> str:
    """Where a key belongs that stands at the wrong place."""
    if name == inside and name in MAIN:
        return f"It is called '{MAIN[name]}' there."
    for table, section in TABLES.items():
        if name in section.by_name:
            return f"It belongs below [{table}]."
    return "It belongs above all tables." if name in KEYS else ""


def _value(source: str, name: str, key: Key, value: Any) -> Any:
    read = READERS[key.kind](value)
    if read is None:
        raise RecipeError(f"recipe {source}: '{name}' must be {key.kind.value}, not {brief(value)}.", "Mend that line.")
    try:
        if key.kind is Kind.BITS:
            return parse_bits(read)
        return parse_choice(name, read) if name in ENUMS else read
    except RecipeError as error:
        raise RecipeError(f"recipe {source}: {error.message}", error.hint) from error
