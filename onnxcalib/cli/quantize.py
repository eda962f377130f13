"""onnxcalib quantize."""

from __future__ import annotations

import contextlib
from functools import partial
from pathlib import Path
from typing import Any

import click

from onnxcalib.cache.folder import check_run_directory
from onnxcalib.cli.closing import lost, next_step
from onnxcalib.cli.options import FILE, console, image_options, with_options, with_runtime
from onnxcalib.cli.recipes import ADVANCED, FILES, MIXED, PIPELINE, QUANTIZER, settings_from
from onnxcalib.cli.tables import file_summary, stage_summary
from onnxcalib.cli.watch import watching
from onnxcalib.errors import RecipeError
from onnxcalib.files import check_outputs, check_writable
from onnxcalib.model.files import model_outputs
from onnxcalib.model.io import file_bytes
from onnxcalib.pipeline.inputs import data_read, models_read, recipe_read
from onnxcalib.pipeline.pipelines import quantize as quantize_model
from onnxcalib.pipeline.result import Result
from onnxcalib.progress import Event
from onnxcalib.recipe import Settings
from onnxcalib.reports.write import check_report, write_report
from onnxcalib.runtime.memory import bounded
from onnxcalib.runtime.providers import using


@click.command()
@click.argument("model", type=FILE)
@with_options(FILES, PIPELINE, QUANTIZER, MIXED, ADVANCED)
@click.option("-v", "--verbose", is_flag=True, help="Print a log that can go into a bug report.")
@click.option("--json", "as_json", is_flag=True, help="Print events for programs, one JSON object a line.")
@image_options
@with_runtime
def quantize(model: Path, recipe: str | None, verbose: bool, as_json: bool, **options: Any) -> None:
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
    if verbose and as_json:
        raise RecipeError("--verbose has no effect with --json, which tells everything.", "Give one of them.")
    with watching(verbose=verbose, as_json=as_json) as watch, contextlib.ExitStack() as stack:
        settings = settings_from(options, recipe)
        stack.enter_context(using(settings.provider))
        stack.enter_context(bounded(settings.memory))
        calibration, output = _needed("calibration", settings.calibration), _needed("output", settings.output)
        folder = _check_files(settings, model, output, recipe)
        run = partial(quantize_model, model, calibration, settings.recipe, output=output, run_dir=folder)
        test, pixels = settings.test_data, settings.preprocess
        try:
            result = run(preprocess=pixels, progress=watch, workers=settings.workers, scheduler=settings.scheduler)
        except KeyboardInterrupt as error:
            kept = f"give the same command again to go on: {folder} keeps what is finished."
            message = f"interrupted; {kept}" if folder.is_dir() else "interrupted; nothing was written."
            raise click.exceptions.Abort(message) from error
        if settings.report is not None:
            write_report(result, model, calibration, settings.report, test=test, preprocess=pixels, progress=watch)
        if as_json:
            watch.event(Event("result", _outcome(result, model, output, folder)))
            return
    screen = console(stderr=True)
    for line in stage_summary(result):
        screen.print(line)
    if settings.report is not None:
        screen.print(f"report: {settings.report}")
    screen.print(f"{output}: {file_summary(result.plan, file_bytes(model), file_bytes(output))}")
    for line in (*lost(result), f"next: {next_step(result, model, output)}"):
        screen.print(line, soft_wrap=True)


def _check_files(settings: Settings, model: Path, output: Path, recipe: str | None) -> Path:
    """Refuses files that would overwrite each other or what is read, before any work; the run directory."""
    check_writable(output)
    folder = settings.run_dir or output.with_name(f"{output.name}.run")
    files, claimed = model_outputs("--output", output), check_run_directory(folder)
    if settings.report is not None:
        pages, figures = check_report(settings.report)
        files, claimed = files | pages, claimed | figures
    reads = (*models_read(model), *data_read(settings.calibration, settings.test_data))
    check_outputs(files, (*reads, *recipe_read(settings.recipe, recipe)), claimed)
    return folder


def _needed(option: str, path: Path | None) -> Path:
    if path is None:
        raise RecipeError(f"--{option} is missing.", f"Give -{option[0]} PATH, or '{option}' in a recipe.")
    return path


def _outcome(result: Result, model: Path, output: Path, folder: Path) -> dict[str, Any]:
    return {
        "output": str(output),
        "run_dir": str(folder),
        "bytes": file_bytes(output),
        "float_bytes": file_bytes(model),
        "ranges": result.plan.ranges,
        "bits": {name: str(precision) for name, precision in result.plan.precisions.items()},
        "summary": stage_summary(result),
    }
