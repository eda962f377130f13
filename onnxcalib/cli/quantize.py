"""onnxcalib quantize."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from onnxcalib.cli.options import FILE, console, image_options, preprocess_from, with_runtime
from onnxcalib.cli.recipes import ADVANCED, MIXED, PIPELINE, QUANTIZER, recipe_from, with_options
from onnxcalib.cli.watch import watching
from onnxcalib.errors import RecipeError
from onnxcalib.model.io import file_bytes
from onnxcalib.pipeline import Result
from onnxcalib.pipeline import quantize as quantize_model
from onnxcalib.recipe import Pipeline
from onnxcalib.report.tables import story, summary
from onnxcalib.runs.events import Event


@click.command()
@click.argument("model", type=FILE)
@click.option("-c", "--calibration", required=True, type=FILE, help="npz, folder of arrays, images or .pb test sets.")
@click.option("-o", "--output", required=True, type=FILE, help="The file to write.")
@with_options(PIPELINE, QUANTIZER, MIXED, ADVANCED)
@click.option("--workers", type=click.IntRange(1), help="Layers trained side by side (default: one a core).")
@click.option("--run-dir", type=FILE, help="Keeps what is finished, so that an interrupted run goes on [OUTPUT.run].")
@click.option("-v", "--verbose", is_flag=True, help="Print a log that can go into a bug report.")
@click.option("--json", "as_json", is_flag=True, help="Print events for programs, one JSON object a line.")
@image_options
@with_runtime
def quantize(model: Path, calibration: Path, output: Path, **options: Any) -> None:
    """Quantize MODEL with unlabelled calibration data.

    \b
    onnxcalib quantize model.onnx -c calibration.npz -o small.onnx
    onnxcalib quantize model.onnx -c images/ --bits w4a8 --edge-bits 8 --pipeline light -o small.onnx
    onnxcalib quantize model.onnx -c calibration.npz --pipeline light --bits w4a4,w8a8 --compression 0.18 -o small.onnx
    onnxcalib quantize model.onnx -c calibration.npz --pipeline advanced --bits w4a4 --edge-bits 8 -o small.onnx
    """
    folder = options["run_dir"] or output.with_name(f"{output.name}.run")
    verbose, as_json = options["verbose"], options["as_json"]
    if verbose and as_json:
        raise RecipeError("--verbose has no effect with --json, which tells everything.", "Give one of them.")
    with watching(verbose=verbose, as_json=as_json) as watch, _resumable(folder):
        chosen = recipe_from(options, options["recipe"])
        workers = options["workers"]
        if workers is not None and chosen.pipeline is not Pipeline.ADVANCED:
            raise RecipeError(f"--workers has no effect in the {chosen.pipeline} pipeline.", "Add --pipeline advanced.")
        result = quantize_model(
            model,
            calibration,
            chosen,
            output=output,
            preprocess=preprocess_from(options),
            progress=watch,
            workers=workers,
            run_dir=folder,
        )
        if as_json:
            watch.tell(Event("result", _outcome(result, model, output, folder)))
            return
    screen = console(stderr=True)
    for line in story(result):
        screen.print(line)
    screen.print(f"{output}: {summary(result.plan, file_bytes(model), file_bytes(output))}")


@contextlib.contextmanager
def _resumable(folder: Path) -> Iterator[None]:
    """An interrupt says how to go on."""
    try:
        yield
    except KeyboardInterrupt as error:
        kept = f"give the same command again to go on: {folder} keeps what is finished."
        message = f"interrupted; {kept}" if folder.is_dir() else "interrupted; nothing was written."
        raise click.exceptions.Abort(message) from error


def _outcome(result: Result, model: Path, output: Path, folder: Path) -> dict[str, Any]:
    return {
        "output": str(output),
        "run_dir": str(folder),
        "bytes": file_bytes(output),
        "float_bytes": file_bytes(model),
        "ranges": result.plan.ranges,
        "bits": {name: str(precision) for name, precision in result.plan.precisions.items()},
        "story": story(result),
    }
