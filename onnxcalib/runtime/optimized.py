"""What onnxruntime makes of a model when it loads it."""

from __future__ import annotations

import tempfile
from pathlib import Path

import onnx

from onnxcalib.errors import ModelError
from onnxcalib.model.io import load
from onnxcalib.runtime.installed import check_runtime
from onnxcalib.runtime.session import first_line


def optimized(path: Path) -> onnx.ModelProto:
    """The graph that really runs: constants folded, quantized patterns turned into integer kernels."""
    check_runtime()
    import onnxruntime as ort

    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder) / "optimized.onnx"
        options = ort.SessionOptions()
        options.log_severity_level = 4
        options.optimized_model_filepath = str(written)
        # The level above this one only changes layouts, for one kind of processor.
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
        try:
            ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        except Exception as error:  # the runtime's exceptions share no base class but this one
            raise ModelError(
                f"onnxruntime {ort.__version__} cannot load {path}: {first_line(error)}.",
                "If the model is newer than the runtime, install a newer one.",
            ) from error
        return load(written)
