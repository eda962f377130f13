"""onnxcalib quantize."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from onnxcalib.cli.options import FILE, console, image_options, preprocess_from, progress_bar, with_runtime
from onnxcalib.model.io import file_bytes
from onnxcalib.pipeline import quantize as quantize_model
from onnxcalib.recipe import Pipeline, RangeMethod, Recipe, parse_bits, parse_choice, read_options
from onnxcalib.report.tables import summary
from onnxcalib.targets import TARGETS


@click.command()
@click.argument("model", type=FILE)
@click.option("-c", "--calibration", required=True, type=FILE, help="npz, folder of arrays, images or .pb test sets.")
@click.option("-o", "--output", required=True, type=FILE, help="The file to write.")
@click.option("--pipeline", help=f"{', '.join(Pipeline)} (default {Pipeline.PLAIN}).")
@click.option("--bits", help="8, w4a8, or a list to mix: w4a4,w8a8 (default 8).")
@click.option("--edge-bits", type=int, help="Bits of the first and the last layer.")
@click.option("--target", help=f"{', '.join(TARGETS)} (default ort).")
@click.option("--ranges", help=f"{', '.join(RangeMethod)} (default auto).")
@click.option("--include", multiple=True, metavar="GLOB", help="Quantize only layers with such names.")
@click.option("--exclude", multiple=True, metavar="GLOB", help="Leave layers with such names float.")
@click.option("--recipe", type=FILE, help="TOML file with any of these options; options given here go on top.")
@click.option("--seed", type=int, help="Seed of all random choices (default 0).")
@image_options
@with_runtime
def quantize(model: Path, calibration: Path, output: Path, recipe: Path | None, **options: Any) -> None:
    """Quantize MODEL with unlabelled calibration data.

    \b
    onnxcalib quantize model.onnx -c calibration.npz -o small.onnx
    onnxcalib quantize model.onnx -c images/ --bits w4a8 --edge-bits 8 -o small.onnx
    """
    chosen = Recipe(**(read_options(recipe) if recipe else {}) | _given(options))
    with progress_bar() as progress:
        result = quantize_model(
            model, calibration, chosen, output=output, preprocess=preprocess_from(options), progress=progress
        )
    console(stderr=True).print(f"{output}: {summary(result.plan, file_bytes(model), file_bytes(output))}")


def _given(options: dict[str, Any]) -> dict[str, Any]:
    """The recipe's options that stand on the command line."""
    given: dict[str, Any] = {
        name: options[name] for name in ("edge_bits", "target", "seed") if options[name] is not None
    }
    given |= {name: options[name] for name in ("include", "exclude") if options[name]}
    given |= {name: parse_choice(name, options[name]) for name in ("pipeline", "ranges") if options[name] is not None}
    return given | ({"bits": parse_bits(options["bits"])} if options["bits"] is not None else {})
