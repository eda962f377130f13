"""Tensor shapes with the batch set to one."""

from __future__ import annotations

import numpy as np
import onnx

from onnxcalib.data import InputSpec
from onnxcalib.model.constants import fold_shapes


def infer_shapes(model: onnx.ModelProto) -> dict[str, tuple[int | None, ...]]:
    """Shapes of tensors with the batch set to one; None where a size stays unknown."""
    shapes: dict[str, tuple[int | None, ...]] = {}
    for value in _inferred(model):
        if value.type.tensor_type.HasField("shape"):
            dims = value.type.tensor_type.shape.dim
            shapes[value.name] = tuple(dim.dim_value if dim.HasField("dim_value") else None for dim in dims)
    return shapes


def float_tensors(model: onnx.ModelProto) -> set[str]:
    """The tensors that are known to hold floats."""
    return {value.name for value in _inferred(model) if value.type.tensor_type.elem_type == onnx.TensorProto.FLOAT}


def _inferred(model: onnx.ModelProto) -> list[onnx.ValueInfoProto]:
    """What can be said of every tensor, with the batch set to one."""
    bare = onnx.ModelProto()
    bare.CopyFrom(model)
    _without_large_weights(bare)
    for value in bare.graph.input:
        dims = value.type.tensor_type.shape.dim
        if dims and not dims[0].dim_value:
            dims[0].dim_value = 1
    # A declared output shape still names the old batch; it must not contradict the new one.
    for value in bare.graph.output:
        value.type.tensor_type.ClearField("shape")
    del bare.graph.value_info[:]
    try:
        inferred = onnx.shape_inference.infer_shapes(bare, data_prop=True)
    except onnx.shape_inference.InferenceError:
        return []
    return [*inferred.graph.value_info, *inferred.graph.input, *inferred.graph.output]


def with_fixed_batch(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy whose inputs and outputs have a batch of one where it was free, with what that decides computed."""
    fixed = onnx.ModelProto()
    fixed.CopyFrom(model)
    shapes = infer_shapes(model)
    for value in (*fixed.graph.input, *fixed.graph.output):
        known = shapes.get(value.name, ())
        for dim, size in zip(value.type.tensor_type.shape.dim, known, strict=False):
            if not dim.dim_value and size is not None:
                dim.dim_value = size
    fold_shapes(fixed, shapes)
    return fixed


def typed(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy that declares the element type of every tensor, and no shapes."""
    inferred = onnx.shape_inference.infer_shapes(model)
    known = [
        onnx.helper.make_tensor_value_info(value.name, value.type.tensor_type.elem_type, None)
        for value in inferred.graph.value_info
    ]
    del inferred.graph.value_info[:]
    inferred.graph.value_info.extend(known)
    return inferred


def _without_large_weights(model: onnx.ModelProto) -> None:
    """Large initialisers become inputs of the same shape: inference needs their shapes only."""
    large = [tensor for tensor in model.graph.initializer if np.prod(tensor.dims, dtype=np.int64) > 1024]
    small = [tensor for tensor in model.graph.initializer if np.prod(tensor.dims, dtype=np.int64) <= 1024]
    for tensor in large:
        model.graph.input.append(onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
    del model.graph.initializer[:]
    model.graph.initializer.extend(small)


def input_specs(model: onnx.ModelProto) -> tuple[InputSpec, ...]:
    """The inputs that data must provide; a free, symbolic or negative size is any size."""
    stored = {tensor.name for tensor in model.graph.initializer}
    specs = []
    for value in model.graph.input:
        if value.name not in stored:
            tensor = value.type.tensor_type
            shape = tuple(dim.dim_value if dim.dim_value > 0 else None for dim in tensor.shape.dim)
            specs.append(InputSpec(value.name, onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type), shape))
    return tuple(specs)
