"""onnxcalib quantize."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from onnxcalib.cli.options import FILE, console, image_options, progress_bar, with_runtime
from onnxcalib.cli.recipes import ADVANCED, FILES, MIXED, PIPELINE, QUANTIZER, settings_from, with_options
from onnxcalib.errors import RecipeError
from onnxcalib.model.io import file_bytes
from onnxcalib.pipeline import quantize as quantize_model
from onnxcalib.report.tables import story, summary
from onnxcalib.report.write import check_report, write_report


@click.command()
@click.argument("model", type=FILE)
@with_options(FILES, PIPELINE, QUANTIZER, MIXED, ADVANCED)
@image_options
@with_runtime
def quantize(model: Path, recipe: str | None, **options: Any) -> None:
    """Quantize MODEL with unlabelled calibration data.

    \b
    onnxcalib quantize model.onnx -c calibration.npz -o small.onnx
    onnxcalib quantize model.onnx -c images/ --bits w4a8 --edge-bits 8 --pipeline light -o small.onnx
    onnxcalib quantize model.onnx -c calibration.npz --pipeline light --bits w4a4,w8a8 --compression 0.18 -o small.onnx
    onnxcalib quantize model.onnx -c calibration.npz --pipeline advanced --bits w4a4 --edge-bits 8 -o small.onnx
    onnxcalib quantize model.onnx -c calibration.npz --recipe best --bits w4a8 -o small.onnx
    onnxcalib quantize model.onnx --recipe recipe.toml
    onnxcalib quantize model.onnx -c calibration.npz -o small.onnx --report small.html --test-data test.npz
    """
    settings = settings_from(options, recipe)
    calibration, output = _needed("calibration", settings.calibration), _needed("output", settings.output)
    if settings.report is not None:
        check_report(settings.report)
    with progress_bar() as progress:
        result = quantize_model(
            model,
            calibration,
            settings.recipe,
            output=output,
            preprocess=settings.preprocess,
            progress=progress,
            workers=settings.workers,
        )
        if settings.report is not None:
            test, pixels = settings.test_data, settings.preprocess
            write_report(result, model, calibration, settings.report, test=test, preprocess=pixels, progress=progress)
    screen = console(stderr=True)
    for line in story(result):
        screen.print(line)
    if settings.report is not None:
        screen.print(f"report: {settings.report}")
    screen.print(f"{output}: {summary(result.plan, file_bytes(model), file_bytes(output))}")


def _needed(option: str, path: Path | None) -> Path:
    if path is None:
        raise RecipeError(f"--{option} is missing.", f"Give -{option[0]} PATH, or '{option}' in a recipe.")
    return path
