"""onnxcalib compare."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import click

from onnxcalib.analysis.compare import compare as compare_files
from onnxcalib.analysis.compare import csv_rows
from onnxcalib.cli.options import FILE, console, image_options, preprocess_from, with_runtime
from onnxcalib.cli.tables import comparison_table, evaluation_table
from onnxcalib.cli.watch import watching
from onnxcalib.errors import OutputError
from onnxcalib.files import check_outputs, replacing
from onnxcalib.pipeline.inputs import data_read, models_read

SHOWN = 20


@click.command()
@click.argument("first", type=FILE)
@click.argument("second", type=FILE)
@click.option("-d", "--data", required=True, type=FILE, help="Data with or without labels.")
@click.option("--model", type=FILE, help="The float model that both were made from.")
@click.option("--csv", "table", type=FILE, help="Write every layer to this file.")
@image_options
@with_runtime
def compare(first: Path, second: Path, data: Path, model: Path | None, table: Path | None, **options: Any) -> None:
    """Compare two quantized files layer by layer, worst difference first.

    \b
    onnxcalib compare a.onnx b.onnx -d test.npz --model float.onnx
    onnxcalib compare a.onnx b.onnx -d test.npz --csv layers.csv
    """
    if table is not None:
        if table.suffix != ".csv":
            raise OutputError(f"the table {table} does not end in .csv.", "Name a .csv file.")
        check_outputs({"--csv": table}, (*models_read(first, second, model), *data_read(data)))
    with watching() as progress:
        found = compare_files((first, second), data, model, preprocess=preprocess_from(options), progress=progress)
    if table is not None:
        with replacing(table) as temporary, temporary.open("w", newline="") as file:
            csv.writer(file).writerows(csv_rows(found.layers))
    screen = console()
    screen.print(comparison_table(found.layers[:SHOWN]))
    if len(found.layers) > SHOWN:
        screen.print(f"{len(found.layers) - SHOWN} more layers differ less; --csv FILE has all.")
    screen.print(evaluation_table(found.whole))
