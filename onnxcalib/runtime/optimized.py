"""What onnxruntime makes of a model when it loads it."""

from __future__ import annotations

import tempfile
from pathlib import Path

import onnx

from onnxcalib.model.io import load
from onnxcalib.runtime.opening import new_options, open_session


def optimized(path: Path) -> onnx.ModelProto:
    """The graph that really runs: constants folded, quantized patterns turned into integer kernels."""
    options = new_options()
    import onnxruntime as ort

    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder) / "optimized.onnx"
        options.optimized_model_filepath = str(written)
        # The level above this one only changes layouts, for one kind of processor.
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
        open_session(path, options, str(path))
        return load(written)
