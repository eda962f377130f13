"""What protobuf and the checker let pass, and every reader of a model would stumble over."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import onnx
from onnx import TensorProto, helper

from onnxcalib.errors import ModelError
from onnxcalib.model.walk import all_nodes, graphs_in, refill

_DAMAGED = "Export or copy it again."
_TYPES = frozenset(TensorProto.DataType.values()) - {TensorProto.UNDEFINED}
_BITS = {"UINT4": 4, "INT4": 4, "FLOAT4E2M1": 4, "UINT2": 2, "INT2": 2, "FLOAT6E2M3": 6, "FLOAT6E3M2": 6}
# Types whose values share bytes, as far as this version of onnx has them.
_PACKED = {number: _BITS[name] for name, number in TensorProto.DataType.items() if name in _BITS}

# Numbers of layers and pools that can only be one or more.
_POSITIVE = ("group", "strides", "dilations", "kernel_shape", "num_groups")


def check_well_formed(model: onnx.ModelProto, source: str) -> None:
    """Fails on texts that are no text, unknown types and constants whose values do not fill their shape.

    What is declared of inner tensors is only a hint; where its type is unknown it goes.
    """
    tensors = [message for message in _messages(model, source) if isinstance(message, TensorProto)]
    for tensor in tensors:
        reason = _why_bad(tensor)
        if reason is not None:
            raise ModelError(f"{source} is damaged: the constant '{tensor.name}' {reason}.", _DAMAGED)
    for graph in graphs_in(model.graph):
        refill(graph.value_info, [value for value in graph.value_info if _is_typed(value)])
        for value in (*graph.input, *graph.output):
            if value.type.HasField("tensor_type") and value.type.tensor_type.elem_type not in {0, *_TYPES}:
                number = value.type.tensor_type.elem_type
                raise ModelError(f"{source} is damaged: the type {number} of '{value.name}' is unknown.", _DAMAGED)
    for node in all_nodes(model.graph):
        _check_attributes(node, source)


def _check_attributes(node: onnx.NodeProto, source: str) -> None:
    """Fails on attributes that nobody gave, and on numbers that libraries divide or count by without a look."""
    for attribute in node.attribute:
        numbers = attribute.ints if attribute.type == onnx.AttributeProto.INTS else (attribute.i,)
        why = ""
        if attribute.ref_attr_name:
            why = "refers to an attribute of a function, and stands in none"
        elif attribute.name in _POSITIVE and not node.domain and any(number < 1 for number in numbers):
            why = "is not positive"
        elif attribute.name == "num_outputs" and node.op_type == "Split" and attribute.i != len(node.output):
            why = f"is {attribute.i}, and the node has {len(node.output)} outputs"
        if why:
            name = node.name or next(iter(node.output), "")
            message = f"{source}: '{attribute.name}' of node '{name}' ({node.op_type}) {why}."
            raise ModelError(message, "Export it again.")


def _messages(message: Any, source: str) -> Iterator[Any]:
    """A message and all within it, each text of which is one: protobuf gives the bytes where it is not."""
    yield message
    for field, value in message.ListFields():
        items = value if hasattr(value, "extend") else (value,)
        if field.type == field.TYPE_MESSAGE:
            for each in items:
                yield from _messages(each, source)
        elif field.type == field.TYPE_STRING and not all(isinstance(item, str) for item in items):
            raise ModelError(f"{source} is damaged: '{field.full_name}' is no UTF-8 text.", _DAMAGED)


def _is_typed(value: onnx.ValueInfoProto) -> bool:
    return not value.type.HasField("tensor_type") or value.type.tensor_type.elem_type in _TYPES


def _why_bad(tensor: TensorProto) -> str | None:
    """Why a constant cannot be read; those in files of their own were read before."""
    kind = tensor.data_type
    if kind not in _TYPES:
        return f"has the unknown type {kind}"
    if any(size < 0 for size in tensor.dims):
        return f"has the shape {list(tensor.dims)}"
    if tensor.data_location == TensorProto.EXTERNAL or tensor.HasField("segment"):
        return None
    count, bits = math.prod(tensor.dims), _PACKED.get(kind)
    if tensor.raw_data:
        wanted = -(-count * bits // 8) if bits else count * helper.tensor_dtype_to_np_dtype(kind).itemsize
        held, unit = len(tensor.raw_data), "bytes"
    else:
        pairs = 2 if kind in (TensorProto.COMPLEX64, TensorProto.COMPLEX128) else 1
        wanted = -(-count * bits // 8) if bits else count * pairs
        held, unit = len(getattr(tensor, helper.tensor_dtype_to_field(kind))), "values"
    return None if held == wanted else f"of shape {list(tensor.dims)} holds {held} {unit}, not {wanted}"
