"""The options that make a recipe, shared by the commands that need one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import click
from click.shell_completion import CompletionItem

from onnxcalib.api.mixing import ANY_SIZE
from onnxcalib.cli.options import TYPES, Option, images_from
from onnxcalib.cli.wording import flag
from onnxcalib.errors import RecipeError
from onnxcalib.executors.workers import Workers, find_workers
from onnxcalib.recipe import PRESETS, RECIPE_KEYS, Recipe, Settings, read_options, settings_of
from onnxcalib.recipe.choices import ENUMS, Pipeline, parse_bits, parse_choice
from onnxcalib.recipe.keys import IMAGES, KEYS, Kind
from onnxcalib.targets import NAMES

WORDS: Mapping[str, Iterable[str]] = {**ENUMS, "target": NAMES}


def _option(key: str, *names: str, **more: Any) -> Option:
    """An option with the key's name, type and help; the shell completes what the key chooses from."""
    kind, said = KEYS[key].kind, KEYS[key].help
    if key in WORDS:
        more["shell_complete"] = lambda _context, _option, start: [str(w) for w in WORDS[key] if w.startswith(start)]
    more["multiple"] = kind in (Kind.WORDS, Kind.TABLE)
    return click.option(*names or (flag(key),), type=TYPES.get(kind), help=said, **more)


def _recipes(_context: click.Context, _option: click.Parameter, start: str) -> list[CompletionItem]:
    presets = [CompletionItem(name) for name in PRESETS if name.startswith(start)]
    return [*presets, CompletionItem(start, type="file")]


provider_option = _option("provider")
WHERE_OPTIONS = tuple(map(_option, ("workers", "scheduler", "provider", "memory")))
OVERRIDES = (_option("overrides", "--override", "--pin", "overrides", metavar="PATTERN=VALUE"),)
QUANTIZER = (
    *map(_option, ("bits", "edge_bits", "block_size", "target", "ranges", "activations")),
    _option("include", metavar="GLOB"),
    _option("exclude", metavar="GLOB"),
    *OVERRIDES,
    *map(_option, ("on_broken", "seed", "loss", "metric")),
)
MIXED = (
    _option("max_drop", metavar="DROP"),
    _option("compression", metavar="RATIO"),
    _option("max_loss", metavar="LOSS"),
    _option("limits", "--limit", "limits", metavar="COST=VALUE"),
    _option("costs", "--cost", "costs", metavar="NAME=CSV"),
    _option("minimise", metavar="COST"),
)
PIPELINE = (
    *map(_option, ("pipeline", "rounding", "bn_reference")),
    click.option(
        "--recipe",
        type=click.Path(),  # as typed: ./best is a file, best is the preset
        shell_complete=_recipes,
        help=f"TOML file with any of these options, or {', '.join(PRESETS)}; options given here go on top.",
    ),
)
ADVANCED = (
    *map(_option, ("engine", "layer_optimizer", "training", "steps")),
    _option("strict", "--strict/--no-strict", default=None),
    *WHERE_OPTIONS,
)
FILES = (
    _option("calibration", "-c", "--calibration"),
    _option("output", "-o", "--output"),
    *map(_option, ("run_dir", "report", "test_data")),
)


def recipe_from(options: Mapping[str, Any], **fixed: Any) -> Recipe:
    """The recipe of the command line's options."""
    return Recipe(**{name: value for name, value in _given(options).items() if name in RECIPE_KEYS} | fixed)


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


def workers_from(options: Mapping[str, Any]) -> Workers:
    """Where the jobs of a command run."""
    return find_workers(options["workers"], options["scheduler"])


def sweep_from(options: dict[str, Any]) -> Recipe:
    """The recipe of a command that compares a list of bits and aims for nothing."""
    bits = options["bits"] or "8"
    if len(parse_bits(bits)) == 1:
        raise RecipeError(f"`bits={bits!r}` leaves nothing to compare.", "Give `bits` a list such as w4a4,w8a8.")
    return recipe_from(options, pipeline=Pipeline.LIGHT, compression=ANY_SIZE)
