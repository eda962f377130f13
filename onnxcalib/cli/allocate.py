"""onnxcalib allocate."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from onnxcalib.cli.options import FILE, console, with_options, with_runtime
from onnxcalib.cli.recipes import MIXED, OVERRIDES, recipe_from
from onnxcalib.cli.tables import allocation_line, allocation_table
from onnxcalib.errors import RecipeError
from onnxcalib.files import check_outputs, replacing
from onnxcalib.mixed_precision.assignment import METHODS, solve
from onnxcalib.mixed_precision.request import Request, add_cost_tables, naming_rows, offered
from onnxcalib.mixed_precision.table_files import load
from onnxcalib.pipeline.inputs import files_read
from onnxcalib.recipe import Pipeline, parse_pair


@click.command()
@click.argument("table", type=FILE)
@with_options(MIXED, OVERRIDES)
@click.option("--edge-bits", type=int, help="Bits of the first and the last layer.")
@click.option("--method", type=click.Choice(METHODS), default=METHODS[0], show_default=True, help="How to solve.")
@click.option("-o", "--output", type=FILE, help="Write the assignment as JSON.")
@with_runtime
def allocate(table: Path, method: str, output: Path | None, **options: Any) -> None:
    """Assign bits from a saved sensitivity TABLE.

    \b
    onnxcalib allocate table.csv --compression 0.18
    onnxcalib allocate table.csv --max-loss 0.05 --override '*fc*=w8a8'
    """
    if output is not None:
        costs = [parse_pair("cost", text)[1] for text in options["costs"]]
        check_outputs({"--output": output}, files_read(table, *costs))
    loaded = load(table)
    recipe = recipe_from(options, pipeline=Pipeline.LIGHT, bits=offered(loaded))
    if recipe.mixed_precision.max_drop is not None:
        raise RecipeError("`max_drop` has no effect on a table: it is measured.", "Give it to onnxcalib quantize.")
    recipe = naming_rows(recipe, loaded)
    costed = add_cost_tables(loaded, recipe)
    found = solve(costed, Request.of(costed, recipe), method)
    if output is not None:
        with replacing(output) as temporary:
            temporary.write_text(json.dumps({name: str(bits) for name, bits in found.choices.items()}, indent=1))
    screen = console()
    screen.print(allocation_table(found))
    screen.print(allocation_line(loaded, found))
