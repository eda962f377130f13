"""Types and shapes of tensors, inferred without the large weights."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from typing import Any

import numpy.typing as npt
import onnx

from onnxcalib.data import InputSpec
from onnxcalib.errors import ModelError
from onnxcalib.model.constants import fold_shapes
from onnxcalib.model.io import copied
from onnxcalib.model.loss_writer import FAKE_QUANTIZE

LARGE = 1024  # elements; inference reads no value of a larger initialiser


def inferred(model: onnx.ModelProto, batch: int | None = None) -> list[onnx.ValueInfoProto]:
    """What inference can say of every tensor, a free batch set to a size if one is given; just the ends if it fails."""
    graph = _without_large_weights(model.graph)
    for value in graph.input:
        dims = value.type.tensor_type.shape.dim
        if batch is not None and dims and not dims[0].dim_value:
            dims[0].dim_value = batch
    bare = onnx.ModelProto(ir_version=model.ir_version, opset_import=model.opset_import, graph=graph)
    with contextlib.suppress(Exception):  # it raises more than its InferenceError
        graph = onnx.shape_inference.infer_shapes(bare, data_prop=True).graph
    large = {tensor.name for tensor in model.graph.initializer}
    large |= {sparse.values.name for sparse in model.graph.sparse_initializer}
    return [*graph.value_info, *(value for value in graph.input if value.name not in large), *graph.output]


def infer_shapes(model: onnx.ModelProto) -> dict[str, tuple[int | None, ...]]:
    """Shapes of tensors with the batch set to one; None where a size stays unknown."""
    shapes: dict[str, tuple[int | None, ...]] = {tensor.name: tuple(tensor.dims) for tensor in model.graph.initializer}
    for value in inferred(model, batch=1):
        if value.type.tensor_type.HasField("shape"):
            dims = value.type.tensor_type.shape.dim
            shapes[value.name] = tuple(dim.dim_value if dim.HasField("dim_value") else None for dim in dims)
    return shapes


def free_shapes(model: onnx.ModelProto) -> dict[str, tuple[int | None, ...]]:
    """Shapes of tensors as they are for any batch; None where a size is free or unknown."""
    return {
        value.name: tuple(dim.dim_value if dim.dim_value > 0 else None for dim in value.type.tensor_type.shape.dim)
        for value in inferred(model)
        if value.type.tensor_type.HasField("shape")
    }


def float_tensors(model: onnx.ModelProto) -> set[str]:
    """The tensors that are known to hold floats."""
    return {value.name for value in inferred(model) if value.type.tensor_type.elem_type == onnx.TensorProto.FLOAT}


def with_fixed_batch(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy whose inputs and outputs have a batch of one where it was free, with what that decides computed."""
    fixed = copied(model)
    shapes = infer_shapes(model)
    for value in (*fixed.graph.input, *fixed.graph.output):
        known = shapes.get(value.name, ())
        for dim, size in zip(value.type.tensor_type.shape.dim, known, strict=False):
            if not dim.dim_value and size is not None:
                dim.dim_value = size
    fold_shapes(fixed, shapes)
    return fixed


def with_single_samples(model: onnx.ModelProto, feed: Mapping[str, npt.NDArray[Any]]) -> onnx.ModelProto:
    """A copy for feeds of one sample: inputs with a free batch have a batch of one where this one feeds one."""
    single = copied(model)
    for value in single.graph.input:
        dims = value.type.tensor_type.shape.dim
        if dims and not dims[0].HasField("dim_value") and value.name in feed and feed[value.name].shape[0] == 1:
            dims[0].dim_value = 1
    return single


def typed(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy that declares the element type of every tensor, and no shapes."""
    declared = copied(model)
    del declared.graph.value_info[:]
    ends = {value.name for value in (*model.graph.input, *model.graph.output)}
    declared.graph.value_info.extend(value for value in inferred(model) if value.name not in ends)
    for value in declared.graph.value_info:
        if value.type.HasField("tensor_type"):
            value.type.tensor_type.ClearField("shape")
    return declared


def _without_large_weights(graph: onnx.GraphProto) -> onnx.GraphProto:
    """A copy whose large initialisers are inputs of the same shape: inference needs their shapes only."""
    bare = onnx.GraphProto(name=graph.name, node=graph.node, input=graph.input, output=graph.output)
    fed = {value.name for value in graph.input}
    for tensor in graph.initializer:
        if math.prod(tensor.dims) <= LARGE:
            bare.initializer.append(tensor)
        elif tensor.name not in fed:
            bare.input.append(onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
    for sparse in graph.sparse_initializer:  # inference knows none
        kind = sparse.values.data_type
        bare.input.append(onnx.helper.make_tensor_value_info(sparse.values.name, kind, sparse.dims))
    # A declared output shape may name another batch, and exporters leave stale ones behind.
    for value in bare.output:
        if value.type.HasField("tensor_type"):
            value.type.tensor_type.ClearField("shape")
    for node in bare.node:
        if node.op_type == FAKE_QUANTIZE:  # it keeps the shape of what it reads
            node.CopyFrom(onnx.helper.make_node("Identity", node.input[:1], node.output))
    return bare


def input_specs(model: onnx.ModelProto) -> tuple[InputSpec, ...]:
    """The inputs that data must provide; a free, symbolic or negative size is any size."""
    stored = {tensor.name for tensor in model.graph.initializer}
    specs = []
    for value in model.graph.input:
        if value.name not in stored:
            tensor = value.type.tensor_type
            if not tensor.elem_type:
                raise ModelError(
                    f"the input '{value.name}' is no tensor of a known type.", "Export the model with typed inputs."
                )
            shape = tuple(dim.dim_value if dim.dim_value > 0 else None for dim in tensor.shape.dim)
            kind = onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type)
            if kind.kind == "V":  # bfloat16 and its small relatives
                raise ModelError(
                    f"the input '{value.name}' is {kind.name}, of which onnxruntime takes no arrays.",
                    "Export the model with float32 inputs, and a Cast behind them.",
                )
            specs.append(InputSpec(value.name, kind, shape))
    return tuple(specs)
