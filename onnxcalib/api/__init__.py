"""The names of the public API."""

from __future__ import annotations

from onnxcalib.analysis.compare import Comparison, LayerComparison
from onnxcalib.analysis.evaluate import Evaluation
from onnxcalib.analysis.explain import Question
from onnxcalib.analysis.inspect import inspect
from onnxcalib.api.measuring import check, compare, evaluate, explain
from onnxcalib.api.mixing import allocate, curve, read_table, sensitivity, write_table
from onnxcalib.api.quantizing import quantize
from onnxcalib.api.reporting import report
from onnxcalib.checks.check import Finding
from onnxcalib.data import Preprocess
from onnxcalib.errors import DataError, ModelError, OnnxcalibError, OutputError, RecipeError, RuntimeMissingError
from onnxcalib.mixed_precision.allocate import Allocation
from onnxcalib.mixed_precision.curve import Point
from onnxcalib.mixed_precision.table import SensitivityTable
from onnxcalib.model.io import write_model
from onnxcalib.pipeline.result import Result
from onnxcalib.progress import Event
from onnxcalib.recipe import (
    ActivationOptions,
    MixedPrecisionOptions,
    OnBroken,
    Pipeline,
    Precision,
    RangeMethod,
    Recipe,
    Settings,
    TrainingOptions,
    WeightOptions,
    read_recipe,
    read_settings,
    write_recipe,
    write_settings,
)

write_report = report  # the name that it had before it stood beside the others

__all__ = [
    "ActivationOptions", "Allocation", "Comparison", "DataError", "Evaluation", "Event", "Finding", "LayerComparison",
    "MixedPrecisionOptions", "ModelError", "OnBroken", "OnnxcalibError", "OutputError", "Pipeline", "Point",
    "Precision", "Preprocess", "Question", "RangeMethod", "Recipe", "RecipeError", "Result", "RuntimeMissingError",
    "SensitivityTable", "Settings", "TrainingOptions", "WeightOptions", "allocate", "check", "compare", "curve",
    "evaluate", "explain", "inspect", "quantize", "read_recipe", "read_settings", "read_table", "report",
    "sensitivity", "write_model", "write_recipe", "write_report", "write_settings", "write_table",
]  # fmt: skip
