"""onnxcalib explain."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from onnxcalib.analysis.diagnose import diagnose_file
from onnxcalib.analysis.explain import TITLES, Facts, Question, answer
from onnxcalib.analysis.layer_rows import layer_rows
from onnxcalib.cli.options import FILE, console, image_options, preprocess_from, with_runtime
from onnxcalib.cli.watch import watching
from onnxcalib.cli.wording import as_typed
from onnxcalib.errors import RecipeError
from onnxcalib.report.find import find_report


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
    if (model is None) != (data is None):
        given, missing = ("--model", "-d DATA") if data is None else ("-d", "--model FLOAT.onnx")
        raise RecipeError(f"{given} has no effect alone.", f"Add {missing}.")
    if report is not None and model is not None:
        raise RecipeError("--report and --model both say what the layers do.", "Give one of them.")
    facts = Facts.read(output)
    if model is not None:
        with watching() as progress:
            pixels = preprocess_from(options)
            listed, found = diagnose_file(facts.file, model, data, preprocess=pixels, progress=progress)
        facts = replace(facts, rows=layer_rows(facts.file, listed, found))
    else:
        told = find_report(output, report)
        facts = replace(facts, report=told, rows=told["layers"] if told is not None else ())
    screen = console()
    for asked in Question if question is None else (Question(question),):
        screen.print(TITLES[asked], style="bold")
        for line in answer(asked, facts):
            screen.print(f"  {as_typed(line)}", soft_wrap=True)
