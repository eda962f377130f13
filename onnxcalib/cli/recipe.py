"""onnxcalib recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from onnxcalib.cli.options import FILE, echo, image_options, with_options
from onnxcalib.cli.recipes import ADVANCED, FILES, MIXED, PIPELINE, QUANTIZER, settings_from
from onnxcalib.errors import OutputError
from onnxcalib.files import check_writable, replacing
from onnxcalib.recipe import PRESETS, template, write_settings


@click.group()
def recipe() -> None:
    """Write a recipe file to start from, or show what a recipe comes to."""


@recipe.command()
@click.argument("file", type=FILE, default=Path("recipe.toml"))
@click.option("--preset", type=click.Choice(list(PRESETS)), help="What the file sets (default: nothing).")
def init(file: Path, preset: str | None) -> None:
    """Write a TOML recipe with every key explained to FILE (recipe.toml).

    \b
    onnxcalib recipe init
    onnxcalib recipe init best.toml --preset best
    """
    check_writable(file)
    if file.exists() or file.is_symlink():
        raise OutputError(f"{file} exists already.", "Name another file, or remove that one.")
    with replacing(file) as temporary:
        temporary.write_text(template(preset), encoding="utf-8")
    echo(f"{file}: edit it, then type: onnxcalib quantize MODEL --recipe {file}", err=True)


@recipe.command()
@with_options(FILES, PIPELINE, QUANTIZER, MIXED, ADVANCED)
@image_options
def show(recipe: str | None, **options: Any) -> None:
    """Print the recipe that a file or preset and options come to, as TOML.

    \b
    onnxcalib recipe show --recipe paper
    onnxcalib recipe show --recipe recipe.toml --bits w4a8
    """
    click.echo(write_settings(settings_from(options, recipe)), nl=False)
