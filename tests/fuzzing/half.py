"""A graph in half precision as one in float32, by another road than the toolkit's: what it means, without rounding."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from onnx import AttributeProto, TensorProto, TypeProto, numpy_helper


def in_float32(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy in which every half-precision type, constant and conversion is one of float32."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    _widen(copy)
    return copy


def _widen(message: Any) -> None:
    if isinstance(message, TensorProto):
        if message.data_type == TensorProto.FLOAT16:
            message.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(message).astype(np.float32), message.name))
        return
    if isinstance(message, TypeProto.Tensor) and message.elem_type == TensorProto.FLOAT16:
        message.elem_type = TensorProto.FLOAT
    if isinstance(message, AttributeProto) and message.name in ("to", "dtype") and message.i == TensorProto.FLOAT16:
        message.i = TensorProto.FLOAT
    for field, value in message.ListFields():
        if field.message_type is not None:
            for part in [value] if hasattr(value, "ListFields") else value:
                _widen(part)
