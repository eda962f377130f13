"""The names of the public API."""

from __future__ import annotations

from onnxcalib.analysis.evaluate import Evaluation, evaluate
from onnxcalib.analysis.inspect import inspect
from onnxcalib.data import Preprocess
from onnxcalib.errors import DataError, ModelError, OnnxcalibError, OutputError, RecipeError, RuntimeMissingError
from onnxcalib.model.io import write_model
from onnxcalib.pipeline.pipelines import quantize
from onnxcalib.pipeline.result import Result
from onnxcalib.recipe import (
    Pipeline,
    Precision,
    RangeMethod,
    Recipe,
    Settings,
    read_recipe,
    read_settings,
    write_recipe,
    write_settings,
)
from onnxcalib.report.write import write_report

__all__ = [
    "DataError", "Evaluation", "ModelError", "OnnxcalibError", "OutputError", "Pipeline", "Precision", "Preprocess",
    "RangeMethod", "Recipe", "RecipeError", "Result", "RuntimeMissingError", "Settings", "evaluate", "inspect",
    "quantize", "read_recipe", "read_settings", "write_model", "write_recipe",
    "write_report", "write_settings",
]  # fmt: skip
