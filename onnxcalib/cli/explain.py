"""onnxcalib explain."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from onnxcalib.analysis.explain import TITLES, Question
from onnxcalib.api.measuring import explain as explain_file
from onnxcalib.cli.options import FILE, console, image_options, preprocess_from, with_runtime
from onnxcalib.cli.watch import watching
from onnxcalib.cli.wording import as_typed


@click.command()
@click.argument("output", type=FILE)
@click.option("--report", type=FILE, help="The report's .json (default: one beside OUTPUT that tells of it).")
@click.option("--model", type=FILE, help="The float model, to measure layers where there is no report.")
@click.option("-d", "--data", type=FILE, help="Data to measure layers on.")
@click.option("--question", type=click.Choice([str(each) for each in Question]), help="Ask one question only.")
@image_options
@with_runtime
def explain(
    output: Path, report: Path | None, model: Path | None, data: Path | None, question: str | None, **options: Any
) -> None:
    """Explain a quantized file: accuracy, float ops, size, speed, bits.

    \b
    onnxcalib explain small.onnx
    onnxcalib explain small.onnx --model model.onnx -d test.npz
    onnxcalib explain small.onnx --question speed
    """
    questions = tuple(Question) if question is None else (Question(question),)
    pixels = preprocess_from(options)
    with watching() as progress:
        found = explain_file(
            output, report=report, model=model, data=data, questions=questions, preprocess=pixels, progress=progress
        )
    screen = console()
    for asked, lines in found.items():
        screen.print(TITLES[asked], style="bold")
        for line in lines:
            screen.print(f"  {as_typed(line)}", soft_wrap=True)
