"""What onnx's version converter leaves wrong, put right."""

from __future__ import annotations

import contextlib

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from onnxcalib.model.graph import GraphIndex, attributes
from onnxcalib.model.io import PROTOBUF_LIMIT
from onnxcalib.model.shapes import inferred
from onnxcalib.model.walk import all_nodes, bodies

HALVES = {TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE}
# From these inputs on, attributes became inputs of the type of the first.
_TYPED_FROM = {"Clip": 1, "Pad": 2}


def correct(raised: onnx.ModelProto, opset: int) -> None:
    """Mends a model that the converter raised from this opset."""
    if opset < 11:
        _place_as_before(raised.graph)
    if opset < 13:
        _type_constants(raised)


def _place_as_before(graph: onnx.GraphProto) -> None:
    """Upsample and the first Resize counted from the corner; the Resize that they become does not, unless told to."""
    index = GraphIndex(graph)
    for node in all_nodes(graph):
        if node.op_type != "Resize" or node.domain or "coordinate_transformation_mode" in attributes(node):
            continue
        node.attribute.append(helper.make_attribute("coordinate_transformation_mode", "asymmetric"))
        scales = index.constant(node.input[2]) if len(node.input) > 2 else None
        smaller = scales is not None and bool((scales < 1).any())
        node.attribute.append(helper.make_attribute("nearest_mode", "ceil" if smaller else "floor"))


def _type_constants(model: onnx.ModelProto) -> None:
    """Bounds of a Clip and the value of a Pad become float32, whatever they bound or pad."""
    nodes = [node for node in all_nodes(model.graph) if node.op_type in _TYPED_FROM and not node.domain]
    if not nodes:
        return
    types = _types(model)
    constants = {node.output[0]: node for node in all_nodes(model.graph) if node.op_type == "Constant"}
    for node in nodes:
        kind = types.get(node.input[0])
        if kind not in HALVES:
            continue
        for name in node.input[_TYPED_FROM[node.op_type] :]:
            held = constants.get(name)
            value = next((each.t for each in held.attribute if each.name == "value"), None) if held else None
            if value is not None and value.data_type == TensorProto.FLOAT:
                array = numpy_helper.to_array(value).astype(helper.tensor_dtype_to_np_dtype(kind))
                value.CopyFrom(numpy_helper.from_array(np.asarray(array), value.name))


def _types(model: onnx.ModelProto) -> dict[str, int]:
    """Element types of tensors, those inside bodies too."""
    known = {value.name: value.type.tensor_type.elem_type for value in inferred(model)}
    if not any(list(bodies(node)) for node in model.graph.node) or model.ByteSize() >= PROTOBUF_LIMIT:
        return known
    with contextlib.suppress(onnx.shape_inference.InferenceError):
        for node in all_nodes(onnx.shape_inference.infer_shapes(model).graph):
            values = (value for body in bodies(node) for value in (*body.input, *body.value_info))
            known |= {value.name: value.type.tensor_type.elem_type for value in values}
    return known
