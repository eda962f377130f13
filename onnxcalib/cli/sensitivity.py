"""onnxcalib sensitivity."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from onnxcalib.cli.options import FILE, console, image_options, preprocess_from, with_options, with_runtime
from onnxcalib.cli.recipes import QUANTIZER, WHERE_OPTIONS, sweep_from, workers_from
from onnxcalib.cli.tables import sensitivity_table
from onnxcalib.cli.watch import watching
from onnxcalib.files import check_outputs
from onnxcalib.mixed_precision.table_files import check_output, save
from onnxcalib.pipeline.inputs import data_read, models_read, recipe_read
from onnxcalib.pipeline.sweep import sensitivity as measure
from onnxcalib.runtime.memory import bounded
from onnxcalib.runtime.providers import using


@click.command()
@click.argument("model", type=FILE)
@click.option("-c", "--calibration", required=True, type=FILE, help="npz, folder of arrays, images or .pb test sets.")
@click.option("-o", "--output", required=True, type=FILE, help="The table to write: .csv or .json.")
@with_options(QUANTIZER, WHERE_OPTIONS)
@image_options
@with_runtime
def sensitivity(model: Path, calibration: Path, output: Path, **options: Any) -> None:
    """Measure what each layer of MODEL loses at each precision.

    \b
    onnxcalib sensitivity model.onnx -c calibration.npz --bits w4a4,w8a8 -o table.csv
    """
    recipe = sweep_from(options)
    check_output(output)
    check_outputs({"--output": output}, (*models_read(model), *data_read(calibration), *recipe_read(recipe)))
    with watching() as progress, using(options["provider"]), bounded(options["memory"]):
        pixels, workers = preprocess_from(options), workers_from(options)
        measured = measure(model, calibration, recipe, preprocess=pixels, progress=progress, workers=workers)
    save(measured.table, output)
    screen = console()
    screen.print(sensitivity_table(measured.table))
    table, passes = measured.table, measured.float_passes
    screen.print(f"{len(table.layers)} layers, {table.samples} samples, base loss {table.base_loss:.6g}")
    screen.print(f"it took the time of {passes:.1f} float passes, {passes / max(measured.probes, 1):.2f} a probe")
