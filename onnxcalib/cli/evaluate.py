"""onnxcalib evaluate."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from onnxcalib.analysis.evaluate import evaluate as evaluate_models
from onnxcalib.cli.options import FILE, console, image_options, preprocess_from, with_runtime
from onnxcalib.cli.recipes import provider_option
from onnxcalib.cli.tables import evaluation_table
from onnxcalib.cli.watch import watching
from onnxcalib.numerics.metrics import METRICS
from onnxcalib.reports.data import evaluation
from onnxcalib.runtime.providers import using


@click.command()
@click.argument("models", nargs=-1, required=True, type=FILE)
@click.option("-d", "--data", required=True, type=FILE, help="Data with or without labels.")
@click.option("--reference", type=FILE, help="The float model to compare with.")
@click.option("--metric", help=f"What to measure on labels: {', '.join(METRICS)}, or MODULE:FUNCTION.")
@provider_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")
@image_options
@with_runtime
def evaluate(
    models: tuple[Path, ...],
    data: Path,
    reference: Path | None,
    metric: str | None,
    provider: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Measure MODELS on data: top-1, agreement, SQNR, distillation loss, bytes, latency.

    \b
    onnxcalib evaluate small.onnx -d test.npz --reference model.onnx
    onnxcalib evaluate small.onnx model.onnx -d test.npz --metric top5
    """
    with watching() as progress, using(provider):
        pixels = preprocess_from(options)
        rows = evaluate_models(list(models), data, reference, metric=metric, preprocess=pixels, progress=progress)
    if as_json:
        click.echo(json.dumps([evaluation(row) for row in rows], indent=1))
    else:
        console().print(evaluation_table(rows, metric))
