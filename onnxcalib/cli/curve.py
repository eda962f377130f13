"""onnxcalib curve."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import click

from onnxcalib.cli.options import FILE, console, image_options, preprocess_from, with_options, with_runtime
from onnxcalib.cli.recipes import QUANTIZER, WHERE_OPTIONS, sweep_from, workers_from
from onnxcalib.cli.tables import curve_table
from onnxcalib.cli.watch import watching
from onnxcalib.errors import OutputError
from onnxcalib.files import check_outputs, replacing
from onnxcalib.pipeline.inputs import data_read, models_read, recipe_read
from onnxcalib.pipeline.sweep import compression_curve
from onnxcalib.reports.plots import check_plot, plot_curve
from onnxcalib.runtime.memory import bounded
from onnxcalib.runtime.providers import using

COLUMNS = ("ratio", "method", "size", "estimated_loss", "measured_loss")


@click.command()
@click.argument("model", type=FILE)
@click.option("-c", "--calibration", required=True, type=FILE, help="npz, folder of arrays, images or .pb test sets.")
@click.option("-o", "--output", required=True, type=FILE, help="The curve as CSV.")
@click.option("--plot", type=FILE, help="The curve as .png or .svg.")
@click.option("--points", type=click.IntRange(2, 200), default=10, show_default=True, help="How many sizes.")
@click.option("--measure", is_flag=True, help="Measure every assembled model, not only estimate it.")
@with_options(QUANTIZER, WHERE_OPTIONS)
@image_options
@with_runtime
def curve(
    model: Path, calibration: Path, output: Path, plot: Path | None, points: int, measure: bool, **options: Any
) -> None:
    """Draw the compression-loss curve of MODEL, with both greedy baselines.

    \b
    onnxcalib curve model.onnx -c calibration.npz --bits w4a4,w8a8 -o curve.csv --plot curve.png
    """
    recipe = sweep_from(options)
    if output.suffix != ".csv":
        raise OutputError(f"the curve {output} does not end in .csv.", "Name a .csv file; --plot draws a picture.")
    outputs = {"--output": output}
    if plot is not None:
        check_plot(plot)
        outputs["--plot"] = plot
    check_outputs(outputs, (*models_read(model), *data_read(calibration), *recipe_read(recipe)))
    with watching() as progress, using(options["provider"]), bounded(options["memory"]):
        pixels, workers = preprocess_from(options), workers_from(options)
        found = compression_curve(
            model, calibration, recipe, points, measure, preprocess=pixels, progress=progress, workers=workers
        )
    with replacing(output) as temporary, temporary.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(COLUMNS)
        rows.writerows([getattr(point, name) for name in COLUMNS] for point in found)
    if plot is not None:
        plot_curve(found, recipe.loss or "distillation", plot)
    console().print(curve_table(found))
