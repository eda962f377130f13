"""What onnxruntime makes of a model when it loads it."""

from __future__ import annotations

import tempfile
from pathlib import Path

import onnx

from onnxcalib.model.io import load
from onnxcalib.runtime.opening import new_options, open_session, safe_levels
from onnxcalib.runtime.trial import LEVELS


def optimized(path: Path) -> onnx.ModelProto:
    """The graph that really runs: constants folded, quantized patterns turned into integer kernels.

    Its weights are not there: they lie in a file that goes at once.
    """
    options = new_options()
    levels = safe_levels(load(path), str(path))
    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder) / "optimized.onnx"
        options.optimized_model_filepath = str(written)
        # In one file, weights of more than 2 GB cannot be written.
        options.add_session_config_entry("session.optimized_model_external_initializers_file_name", "weights")
        # The level above this one only changes layouts, for one kind of processor.
        open_session(path, options, str(path), levels=levels[levels[0] == LEVELS[0] :])
        return onnx.load(str(written), "protobuf", load_external_data=False)
