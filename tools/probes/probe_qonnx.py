"""QONNX: imports the file, infers the data types of weights, and runs it with its own executor."""

from __future__ import annotations

from collections import Counter
from importlib.metadata import version
from pathlib import Path

from common import Feed, Found, main
from qonnx.core.modelwrapper import ModelWrapper
from qonnx.core.onnx_exec import execute_onnx
from qonnx.transformation.infer_datatypes import InferDataTypes
from qonnx.transformation.infer_shapes import InferShapes

LAYERS = ("Conv", "Gemm", "MatMul")
INTEGER = ("INT", "UINT", "SCALEDINT")


def probe(model: Path, feeds: list[Feed]) -> Found:
    """A layer counts as integer where QONNX recovers an integer type for its weight."""
    wrapped = ModelWrapper(str(model)).transform(InferShapes()).transform(InferDataTypes(allow_scaledint_dtypes=True))
    layers = [node for node in wrapped.graph.node if node.op_type in LAYERS]
    kinds = [wrapped.get_tensor_datatype(node.input[1]).name for node in layers]
    integer = sum(kind.startswith(INTEGER) for kind in kinds)
    told = {"int8": integer, "layers": len(layers), "note": "weights " + str(dict(Counter(kinds)))}
    output = wrapped.graph.output[0].name
    return [[execute_onnx(wrapped, feed)[output]] for feed in feeds], told


if __name__ == "__main__":
    main(lambda: version("qonnx"), probe)
