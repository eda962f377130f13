"""The options that make a recipe, shared by the commands that need one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import click
from click.shell_completion import CompletionItem

from onnxcalib.cli.options import FILE, images_from
from onnxcalib.errors import RecipeError
from onnxcalib.recipe import (
    ENUMS,
    IMAGES,
    KEYS,
    PRESETS,
    RECIPE_FIELDS,
    Pipeline,
    Recipe,
    Settings,
    parse_bits,
    parse_choice,
    read_options,
    settings_of,
)
from onnxcalib.targets import NAMES

Command = TypeVar("Command")
WORDS: Mapping[str, Iterable[str]] = {**ENUMS, "target": NAMES}


def _option(key: str, *names: str, **more: Any) -> Callable[[Any], Any]:
    """An option with the key's name and help; the shell completes what the key chooses from."""
    names = names or (f"--{key.replace('_', '-')}",)
    if key in WORDS:
        more["shell_complete"] = lambda _context, _option, start: [str(w) for w in WORDS[key] if w.startswith(start)]
    return click.option(*names, help=KEYS[key].help, **more)


def _recipes(_context: click.Context, _option: click.Parameter, start: str) -> list[CompletionItem]:
    presets = [CompletionItem(name) for name in PRESETS if name.startswith(start)]
    return [*presets, CompletionItem(start, type="file")]


QUANTIZER = (
    _option("bits"),
    _option("edge_bits", type=int),
    _option("block_size", type=int),
    _option("target"),
    _option("ranges"),
    _option("include", multiple=True, metavar="GLOB"),
    _option("exclude", multiple=True, metavar="GLOB"),
    _option("seed", type=int),
    _option("loss"),
)
MIXED = (
    _option("compression", type=float, metavar="RATIO"),
    _option("max_loss", type=float, metavar="LOSS"),
    _option("limits", "--limit", "limits", multiple=True, metavar="COST=VALUE"),
    _option("costs", "--cost", "costs", multiple=True, metavar="NAME=CSV"),
    _option("minimise", metavar="COST"),
    _option("pins", "--pin", "pins", multiple=True, metavar="GLOB=BITS"),
)
PIPELINE = (
    _option("pipeline"),
    _option("bn_reference"),
    click.option(
        "--recipe",
        type=click.Path(),  # as typed: ./best is a file, best is the preset
        shell_complete=_recipes,
        help=f"TOML file with any of these options, or {', '.join(PRESETS)}; options given here go on top.",
    ),
)
ADVANCED = (
    _option("engine"),
    _option("layer_optimizer"),
    _option("training"),
    _option("steps", type=int),
    _option("strict", "--strict/--no-strict", default=None),
    _option("workers", type=int),
)
FILES = (
    _option("calibration", "-c", "--calibration", type=FILE),
    _option("output", "-o", "--output", type=FILE),
    _option("run_dir", type=FILE),
    _option("report", type=FILE),
    _option("test_data", type=FILE),
)


def with_options(*groups: tuple[Callable[[Any], Any], ...]) -> Callable[[Command], Command]:
    """Adds groups of options to a command, in their order."""

    def decorate(function: Command) -> Command:
        for option in reversed([option for group in groups for option in group]):
            function = option(function)
        return function

    return decorate


def recipe_from(options: Mapping[str, Any], **fixed: Any) -> Recipe:
    """The recipe of the command line's options."""
    return Recipe(**{name: value for name, value in _given(options).items() if name in RECIPE_FIELDS} | fixed)


def settings_from(options: dict[str, Any], recipe: str | None) -> Settings:
    """All that the recipe file or the preset sets, with the options of the command line on top."""
    given = _given(options)
    if recipe is None:
        return settings_of(given | {IMAGES: images_from(options)})
    read = read_options(recipe)
    images = read.get(IMAGES, {}) | images_from(options)
    try:
        return settings_of(read | given | {IMAGES: images})
    except RecipeError as error:
        raise RecipeError(f"with recipe {recipe}, {error.message}", error.hint) from error


def _given(options: Mapping[str, Any]) -> dict[str, Any]:
    given = {name: value for name, value in options.items() if name in KEYS and value not in (None, ())}
    given |= {name: parse_choice(name, given[name]) for name in ENUMS if name in given}
    if "bits" in given:
        given["bits"] = parse_bits(given["bits"])
    return given


def sweep_from(options: dict[str, Any]) -> Recipe:
    """The recipe of a command that compares a list of bits and aims for nothing."""
    if len(parse_bits(options["bits"] or "8")) == 1:
        raise RecipeError(
            f"--bits {options['bits'] or '8'} leaves nothing to compare.", "Give --bits a list such as w4a4,w8a8."
        )
    # A list needs an aim; any compression that all assignments keep will do.
    return recipe_from(options, pipeline=Pipeline.LIGHT, compression=2.0)
