"""onnxruntime: the ops of the optimised graph, and the outputs."""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from pathlib import Path

import onnx
import onnxruntime
from common import Feed, Found, main

INTEGER = {"QLinearConv", "QGemm", "QLinearMatMul", "MatMulIntegerToFloat", "ConvInteger", "MatMulInteger"}
PACKED = {"MatMulNBits"}
FLOAT = {"Conv", "FusedConv", "Gemm", "FusedGemm", "MatMul", "FusedMatMul", "ConvTranspose", "NhwcFusedConv"}


def probe(model: Path, feeds: list[Feed]) -> Found:
    """Layers are counted in the graph that the runtime writes after its own optimisations."""
    with tempfile.TemporaryDirectory() as folder:
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        options.intra_op_num_threads = 1
        if os.environ.get("PROBE_UNFUSED"):
            options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.optimized_model_filepath = str(Path(folder) / "optimised.onnx")
        session = onnxruntime.InferenceSession(str(model), options, providers=["CPUExecutionProvider"])
        ops = Counter(node.op_type for node in onnx.load(options.optimized_model_filepath).graph.node)
    integer = sum(ops[op] for op in INTEGER)
    told = {
        "int8": integer,
        "layers": integer + sum(ops[op] for op in FLOAT | PACKED),
        "packed": sum(ops[op] for op in PACKED),
        "ops": dict(ops.most_common()),
    }
    return [session.run(None, feed) for feed in feeds], told


if __name__ == "__main__":
    onnxruntime.set_default_logger_severity(4)
    main(lambda: str(onnxruntime.__version__), probe)
