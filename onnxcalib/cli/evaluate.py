"""onnxcalib evaluate."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from onnxcalib.analysis.evaluate import Evaluation
from onnxcalib.analysis.evaluate import evaluate as evaluate_models
from onnxcalib.cli.options import FILE, console, image_options, preprocess_from, with_runtime
from onnxcalib.cli.recipes import provider_option
from onnxcalib.cli.tables import evaluation_table
from onnxcalib.cli.watch import watching
from onnxcalib.numerics.metrics import METRICS
from onnxcalib.progress import Event
from onnxcalib.reports.data import evaluation
from onnxcalib.runtime.providers import using

DOUBTFUL = 2.0  # percent: a model that is right so seldom was asked with other labels, or other samples


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
    # The table shows the float model's own figures too, without which the others say little.
    shown = [*models, *([reference] if reference is not None and reference not in models and not as_json else [])]
    with watching() as progress, using(provider):
        pixels = preprocess_from(options)
        rows = evaluate_models(shown, data, reference, metric=metric, preprocess=pixels, progress=progress)
        doubt = _doubt([row for row in rows if reference is not None and row.model == str(reference)], data)
        if doubt is not None:
            progress.event(Event("warning", {"message": doubt}))
    if as_json:
        click.echo(json.dumps([evaluation(row) for row in rows], indent=1))
    else:
        console().print(evaluation_table(rows, metric))


def _doubt(floats: Sequence[Evaluation], data: Path) -> str | None:
    """What to look at where the float model is hardly ever right."""
    for row in floats:
        if row.top1 is not None and row.top1 < DOUBTFUL:
            return (
                f"the float model itself is right on {row.top1:.2f} % of {data}: check that labels number its classes "
                "from 0 (sub-folders by their names, or else by their order), and how samples are prepared."
            )
    return None
