"""The options that make a recipe, shared by the commands that need one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from onnxcalib.cli.options import FILE
from onnxcalib.errors import RecipeError
from onnxcalib.numerics.loss import LossKind
from onnxcalib.recipe import (
    BatchNormReference,
    Engine,
    LayerOptimizer,
    Pipeline,
    RangeMethod,
    Recipe,
    Training,
    parse_bits,
    parse_choice,
    read_options,
)
from onnxcalib.targets import NAMES

Command = TypeVar("Command")

QUANTIZER = (
    click.option("--bits", help="8, w4a8, w4 for weights alone, or a list to mix: w4a4,w8a8 (default 8)."),
    click.option("--edge-bits", type=int, help="Bits of the first and the last layer."),
    click.option("--block-size", type=int, help="Weights alone: so many share a scale in Gemm and MatMul."),
    click.option("--target", help=f"{', '.join(NAMES)}, or a TOML file (default ort)."),
    click.option("--ranges", help=f"{', '.join(RangeMethod)} (default auto)."),
    click.option("--include", multiple=True, metavar="GLOB", help="Quantize only layers with such names."),
    click.option("--exclude", multiple=True, metavar="GLOB", help="Leave layers with such names float."),
    click.option(
        "--seed", type=int, help="For the order of training samples; plain and light make no random choice (default 0)."
    ),
    click.option("--loss", help=f"{', '.join(LossKind)} (default distillation)."),
)
MIXED = (
    click.option("--compression", type=float, metavar="RATIO", help="The most bytes, relative to the float file."),
    click.option("--max-loss", type=float, metavar="LOSS", help="The most loss, measured on the assembled model."),
    click.option("--limit", "limits", multiple=True, metavar="COST=VALUE", help="Further limits, such as bops=0.05."),
    click.option("--cost", "costs", multiple=True, metavar="NAME=CSV", help="Your own cost: layer,precision,cost."),
    click.option("--minimise", metavar="COST", help="What to make small under --max-loss (default size)."),
    click.option("--pin", "pins", multiple=True, metavar="GLOB=BITS", help="Fix layers, such as '*fc*=w8a8'."),
)
PIPELINE = (
    click.option("--pipeline", help=f"{', '.join(Pipeline)} (default {Pipeline.PLAIN})."),
    click.option("--bn-reference", help=f"{', '.join(BatchNormReference)} (default float): whose channel statistics."),
    click.option("--recipe", type=FILE, help="TOML file with any of these options; options given here go on top."),
)
ADVANCED = (
    click.option("--engine", help=f"{', '.join(Engine)} (default auto): who makes the gradients."),
    click.option("--layer-optimizer", help=f"{', '.join(LayerOptimizer)} (default adaquant)."),
    click.option("--training", help=f"{', '.join(Training)} (default standard): learning rates and iterations."),
    click.option("--steps", type=int, help="Iterations a layer."),
    click.option("--strict", is_flag=True, default=None, help="Fail where an op has no gradient."),
)
_ENUMS = ("pipeline", "ranges", "loss", "bn_reference", "engine", "layer_optimizer", "training")


def with_options(*groups: tuple[Callable[[Any], Any], ...]) -> Callable[[Command], Command]:
    """Adds groups of options to a command, in their order."""

    def decorate(function: Command) -> Command:
        for option in reversed([option for group in groups for option in group]):
            function = option(function)
        return function

    return decorate


def recipe_from(options: dict[str, Any], recipe: Path | None = None, **fixed: Any) -> Recipe:
    """The recipe file's options, with those of the command line on top."""
    given = {name: value for name, value in options.items() if name in _FIELDS and value not in (None, ())}
    given |= {name: parse_choice(name, given[name]) for name in _ENUMS if name in given}
    if "bits" in given:
        given["bits"] = parse_bits(given["bits"])
    return Recipe(**(read_options(recipe) if recipe else {}) | given | fixed)


def sweep_from(options: dict[str, Any]) -> Recipe:
    """The recipe of a command that compares a list of bits and aims for nothing."""
    if len(parse_bits(options["bits"] or "8")) == 1:
        raise RecipeError(
            f"--bits {options['bits'] or '8'} leaves nothing to compare.", "Give --bits a list such as w4a4,w8a8."
        )
    # A list needs an aim; any compression that all assignments keep will do.
    return recipe_from(options, pipeline=Pipeline.LIGHT, compression=2.0)


_FIELDS = set(Recipe.__dataclass_fields__)
