"""Writes the report of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx

from onnxcalib.analysis.layer_rows import ReportData
from onnxcalib.data import Preprocess, Transform, transformed
from onnxcalib.pipeline.result import Result
from onnxcalib.progress import Progress, silent
from onnxcalib.reports.write import write_report as write


def report(
    result: Result,
    model: str | Path | onnx.ModelProto,
    calibration: Any,
    path: str | Path,
    *,
    test: Any = None,
    preprocess: Preprocess | None = None,
    transform: Transform | None = None,
    progress: Progress = silent,
) -> ReportData:
    """Writes FILE.html, FILE.json and FILE_figures/ about a result, for which matplotlib must be installed.

    Args:
        result: What `quantize` gave.
        model: The float model that it was made from, as a path or in memory.
        calibration: The calibration data that it was made with.
        path: The .html file to write; the others lie beside it.
        test: The data to measure on; by default the calibration data.
        preprocess: How images become arrays, where data is a folder of images.
        transform: Makes a feed of each item of calibration and test data.
        progress: Called with the stage, how much of it is done, and of how much.

    Returns:
        The numbers of the report, as they stand in the .json.
    """
    own = transformed(calibration, transform)
    other = None if test is None else transformed(test, transform)
    return write(result, model, own, path, test=other, preprocess=preprocess, progress=progress)
