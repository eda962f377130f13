"""onnxcalib quantize."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from onnxcalib.cli.options import FILE, console, image_options, preprocess_from, progress_bar, with_runtime
from onnxcalib.cli.recipes import ADVANCED, MIXED, PIPELINE, QUANTIZER, recipe_from, with_options
from onnxcalib.errors import RecipeError
from onnxcalib.model.io import file_bytes
from onnxcalib.pipeline import quantize as quantize_model
from onnxcalib.recipe import Pipeline
from onnxcalib.report.tables import story, summary
from onnxcalib.report.write import check_report, write_report


@click.command()
@click.argument("model", type=FILE)
@click.option("-c", "--calibration", required=True, type=FILE, help="npz, folder of arrays, images or .pb test sets.")
@click.option("-o", "--output", required=True, type=FILE, help="The file to write.")
@with_options(PIPELINE, QUANTIZER, MIXED, ADVANCED)
@click.option("--report", type=FILE, help="Write a report: FILE.html, FILE.json and FILE_figures/.")
@click.option("--test-data", type=FILE, help="What the report measures on (default: the calibration data).")
@click.option("--workers", type=click.IntRange(1), help="Layers trained side by side (default: one a core).")
@image_options
@with_runtime
def quantize(
    model: Path,
    calibration: Path,
    output: Path,
    recipe: Path | None,
    workers: int | None,
    report: Path | None,
    **options: Any,
) -> None:
    """Quantize MODEL with unlabelled calibration data.

    \b
    onnxcalib quantize model.onnx -c calibration.npz -o small.onnx
    onnxcalib quantize model.onnx -c images/ --bits w4a8 --edge-bits 8 --pipeline light -o small.onnx
    onnxcalib quantize model.onnx -c calibration.npz --pipeline light --bits w4a4,w8a8 --compression 0.18 -o small.onnx
    onnxcalib quantize model.onnx -c calibration.npz --pipeline advanced --bits w4a4 --edge-bits 8 -o small.onnx
    onnxcalib quantize model.onnx -c calibration.npz -o small.onnx --report small.html --test-data test.npz
    """
    chosen = recipe_from(options, recipe)
    if workers is not None and chosen.pipeline is not Pipeline.ADVANCED:
        raise RecipeError(f"--workers has no effect in the {chosen.pipeline} pipeline.", "Add --pipeline advanced.")
    if report is not None:
        check_report(report)
    elif options["test_data"] is not None:
        raise RecipeError("--test-data has no effect without --report.", "Add --report FILE.html.")
    with progress_bar() as progress:
        result = quantize_model(
            model,
            calibration,
            chosen,
            output=output,
            preprocess=preprocess_from(options),
            progress=progress,
            workers=workers,
        )
        if report is not None:
            pixels = preprocess_from(options)
            test = options["test_data"]
            write_report(result, model, calibration, report, test=test, preprocess=pixels, progress=progress)
    screen = console(stderr=True)
    for line in story(result):
        screen.print(line)
    if report is not None:
        screen.print(f"report: {report}")
    screen.print(f"{output}: {summary(result.plan, file_bytes(model), file_bytes(output))}")
