"""Models without their large weights, for tools that take a serialized model and change only its nodes."""

from __future__ import annotations

from collections.abc import Mapping

import onnx

from onnxcalib.model.external import LARGE_TENSOR, is_external

Weights = Mapping[str, onnx.TensorProto]


def take_out(model: onnx.ModelProto) -> Weights:
    """Empties the weights of the main graph that are large or lie in files; gives what they were."""
    weights: dict[str, onnx.TensorProto] = {}
    for tensor in model.graph.initializer:
        if is_external(tensor) or tensor.ByteSize() >= LARGE_TENSOR:
            weights[tensor.name] = onnx.TensorProto()
            weights[tensor.name].CopyFrom(tensor)
            tensor.CopyFrom(onnx.TensorProto(name=tensor.name, data_type=tensor.data_type, dims=tensor.dims))
            tensor.raw_data = b""  # some exporters write numbers in its place, which would stay
            onnx.external_data_helper.set_external_data(tensor, "weights")
    return weights


def put_back(model: onnx.ModelProto, weights: Weights) -> None:
    """Fills the tensors of these names again."""
    for tensor in model.graph.initializer:
        if tensor.name in weights:
            tensor.CopyFrom(weights[tensor.name])
