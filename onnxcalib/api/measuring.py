"""Looks at models and measures them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx

from onnxcalib.analysis import compare as comparing
from onnxcalib.analysis import evaluate as evaluating
from onnxcalib.analysis.compare import Comparison
from onnxcalib.analysis.diagnose import diagnose_file
from onnxcalib.analysis.evaluate import Evaluation
from onnxcalib.analysis.explain import Facts, Question, answer
from onnxcalib.analysis.layer_rows import layer_rows
from onnxcalib.api.sources import ModelSource, as_file, as_files, in_memory
from onnxcalib.checks.check import Finding, check_model
from onnxcalib.data import Preprocess, Transform, transformed
from onnxcalib.errors import DataError, RecipeError
from onnxcalib.model.io import load
from onnxcalib.numerics.metric import MetricFunction
from onnxcalib.pipeline.result import Result
from onnxcalib.progress import Progress, silent
from onnxcalib.reports.find import find_report
from onnxcalib.runtime.providers import using
from onnxcalib.targets import find_target


def evaluate(
    models: ModelSource | Sequence[ModelSource],
    data: Any,
    reference: ModelSource | None = None,
    *,
    metric: str | MetricFunction | None = None,
    preprocess: Preprocess | None = None,
    transform: Transform | None = None,
    progress: Progress = silent,
    provider: str | None = None,
) -> list[Evaluation]:
    """Measures models on data: top-1, agreement with the float model, noise, loss, bytes and latency.

    Args:
        models: One or more models, each as a path, in memory, or as the result of `quantize`.
        data: Samples with or without labels, in all forms that `quantize` takes; labels are what top-1 needs.
        reference: The float model, which agreement, noise, loss and the ratio of latencies are measured against.
        metric: What to measure on labels: a metric's name, 'module:function', or a function of all outputs and all
            labels; higher is better.
        preprocess: How images become arrays, where the data is a folder of images.
        transform: Makes a feed of each item of the data.
        progress: Called with "evaluate", the samples that are done, and how many there are.
        provider: The execution provider of onnxruntime to measure on, such as "cuda" or "openvino"; the CPU by default.

    Returns:
        One row for each model, in their order; a figure is None where the data or the model has no such.
    """
    several = list(models) if isinstance(models, Sequence) and not isinstance(models, str) else [models]
    source = transformed(data, transform)
    with using(provider), as_files([*several, reference]) as paths:
        *found, float_file = paths
        files = [path for path in found if path is not None]
        rows = evaluating.evaluate(files, source, float_file, metric=metric, preprocess=preprocess, progress=progress)
    return [replace(row, model=Path(row.model).name) if _had_no_file(model) else row
            for model, row in zip(several, rows, strict=True)]  # fmt: skip


def compare(
    first: ModelSource,
    second: ModelSource,
    data: Any,
    model: ModelSource | None = None,
    *,
    preprocess: Preprocess | None = None,
    transform: Transform | None = None,
    progress: Progress = silent,
) -> Comparison:
    """Compares two quantized models of one float model, layer by layer and as a whole.

    Args:
        first: A quantized model, as a path, in memory, or as the result of `quantize`.
        second: Another one.
        data: Samples with or without labels, in all forms that `quantize` takes.
        model: The float model that both were made from; without it, the second is compared with the first.
        preprocess: How images become arrays, where the data is a folder of images.
        transform: Makes a feed of each item of the data.
        progress: Called with the stage, the samples that are done, and how many there are.

    Returns:
        The layers, worst difference first, and the evaluation of both models.
    """
    source = transformed(data, transform)
    with as_files([first, second, model]) as (one, two, own):
        assert one is not None
        assert two is not None
        return comparing.compare((one, two), source, own, preprocess=preprocess, progress=progress)


def check(model: ModelSource, target: str | Path = "ort") -> list[Finding]:
    """Lists what a target will refuse, keep in float or run slowly in a quantized model, ours or another tool's.

    Args:
        model: The quantized model, as a path, in memory, or as the result of `quantize`.
        target: The name of a target, or the path of a target's TOML file.

    Returns:
        The findings in the order of the nodes; an empty list where the target takes all of it.
    """
    given = in_memory(model)
    return check_model(given if isinstance(given, onnx.ModelProto) else load(Path(given)), find_target(str(target)))


def explain(
    output: ModelSource,
    *,
    report: str | Path | None = None,
    model: str | Path | onnx.ModelProto | None = None,
    data: Any = None,
    questions: Iterable[Question | str] = tuple(Question),
    preprocess: Preprocess | None = None,
    transform: Transform | None = None,
    progress: Progress = silent,
) -> dict[Question, list[str]]:
    """Explains a quantized model: which layers lose the accuracy, what is float, where the bytes and the time go.

    Args:
        output: The quantized model, as a path, in memory, or as the result of `quantize`.
        report: The .json of the run's report; by default one beside the file that tells of just these bytes.
        model: The float model, to measure layers where there is no report.
        data: Samples to measure layers on, in all forms that `quantize` takes; they need `model`.
        questions: What to answer: "accuracy", "float", "size", "speed", "bits"; all of them by default.
        preprocess: How images become arrays, where the data is a folder of images.
        transform: Makes a feed of each item of the data.
        progress: Called with the stage, how much of it is done, and of how much.

    Returns:
        The lines of each answer, by question; they name the options of the command line that would help.
    """
    if (model is None) != (data is None):
        given, missing = ("model", "data") if data is None else ("data", "model")
        raise RecipeError(f"`{given}` has no effect alone.", f"Add `{missing}`.")
    if report is not None and model is not None:
        raise RecipeError("`report` and `model` both say what the layers do.", "Give one of them.")
    asked = [_question(each) for each in questions]
    with as_file(output) as path:
        facts = Facts.read(path)
        if model is not None:
            source = transformed(data, transform)
            listed, found = diagnose_file(facts.file, model, source, preprocess=preprocess, progress=progress)
            facts = replace(facts, rows=layer_rows(facts.file, listed, found))
        else:
            told = find_report(path, None if report is None else Path(report))
            facts = replace(facts, report=told, rows=told["layers"] if told is not None else ())
        return {question: _answered(question, facts) for question in asked}


def _answered(question: Question, facts: Facts) -> list[str]:
    """The answer; a report whose numbers are not what was written gives none."""
    try:
        return answer(question, facts)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        if facts.report is None:
            raise
        hint = "Write it again, or move it away and add `model` and `data`."
        raise DataError(f"the report of {facts.path} is damaged: {type(error).__name__} {error}.", hint) from error


def _question(word: Question | str) -> Question:
    try:
        return Question(word)
    except ValueError as error:
        raise RecipeError(f"'{word}' is no question.", f"Ask for {', '.join(Question)}.") from error


def _had_no_file(model: ModelSource) -> bool:
    return isinstance(model, onnx.ModelProto) or (isinstance(model, Result) and model.output is None)
