"""Constants in one form: initialisers, with layout ops and arithmetic on them already computed."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper
from onnx.reference import ReferenceEvaluator

from onnxcalib.model.external import has_external, refill_tensor, values_of
from onnxcalib.model.graph import GraphIndex, attributes, drop_unused_initializers
from onnxcalib.model.io import opset_of
from onnxcalib.model.walk import refill

# Cheap shape and layout ops that exporters leave between an initialiser and the layer that reads it.
LAYOUT_OPS = ("Identity", "Transpose", "Reshape", "Squeeze", "Unsqueeze", "Cast", "Flatten")
# What weights are computed with: a norm of weights, a mask on them, a scale in front.
ARITHMETIC_OPS = (
    "Abs", "Add", "Div", "Exp", "Max", "Min", "Mul", "Neg", "Pow", "Reciprocal", "ReduceL2", "ReduceMean", "ReduceSum",
    "ReduceSumSquare", "Sqrt", "Sub", "Tanh", "Where",
)  # fmt: skip
# What exporters compute sizes with.
SHAPE_OPS = (*LAYOUT_OPS, "Add", "Concat", "ConstantOfShape", "Div", "Gather", "Mul", "Slice", "Sub")

Arrays = dict[str, np.ndarray[Any, Any]]


def constants_to_initializers(graph: onnx.GraphProto, least: int = 0) -> None:
    """Ensures that Constants of at least so many elements are initialisers, sparse ones too; those of text stay."""
    keep = []
    for node in graph.node:
        value = _constant_value(node)
        sparse = attributes(node).get("sparse_value") if node.op_type == "Constant" else None
        if sparse is not None:
            graph.sparse_initializer.add().CopyFrom(sparse)
            graph.sparse_initializer[-1].values.name = node.output[0]
        elif value is None or math.prod(value.dims) < least:
            keep.append(node)
        else:
            value.name = node.output[0]
            graph.initializer.append(value)
    refill(graph.node, keep)


def _constant_value(node: onnx.NodeProto) -> onnx.TensorProto | None:
    if node.op_type != "Constant":
        return None
    values = attributes(node)
    if "value" in values:
        tensor = onnx.TensorProto()
        tensor.CopyFrom(values["value"])
        return tensor
    for name, kind in (("value_float", np.float32), ("value_floats", np.float32), ("value_int", np.int64),
                       ("value_ints", np.int64)):  # fmt: skip
        if name in values:
            return numpy_helper.from_array(np.asarray(values[name], kind))
    return None


def fold_constants(
    model: onnx.ModelProto, ops: Collection[str] = (*LAYOUT_OPS, *ARITHMETIC_OPS, "Shape", "Size")
) -> None:
    """Computes such ops on initialisers, so that a layer reads its weight directly."""
    _fold(model, {}, lambda node, _: node.op_type in ops)


def fold_shapes(model: onnx.ModelProto, shapes: Mapping[str, tuple[int | None, ...]]) -> None:
    """Computes what only depends on shapes, as far as these are known."""
    values = {}
    shapes = {**shapes, **{tensor.name: tuple(tensor.dims) for tensor in model.graph.initializer}}
    for node in model.graph.node:
        sizes = shapes.get(node.input[0], (None,)) if node.op_type == "Shape" else (None,)
        ends = attributes(node)
        sizes = sizes[ends.get("start", 0) : ends.get("end", len(sizes))]
        if None not in sizes:
            values[node.output[0]] = np.array(sizes, np.int64)

    stored = {tensor.name for tensor in model.graph.initializer if tensor.data_type == onnx.TensorProto.INT64}

    def folds(node: onnx.NodeProto, known: Arrays) -> bool:
        # Other types than that of sizes stay: packed weights are for the runtime to unpack.
        inputs = [name for name in node.input if name]
        whole = all(known[name].dtype == np.int64 if name in known else name in stored for name in inputs)
        return whole and node.op_type in SHAPE_OPS

    _fold(model, values, folds)


def _fold(model: onnx.ModelProto, values: Arrays, folds: Callable[[onnx.NodeProto, Arrays], bool]) -> None:
    """Computes nodes that may be and whose inputs are known; some values are known from the start."""
    graph, opset = model.graph, onnx.helper.make_opsetid("", opset_of(model))
    stored = {tensor.name: tensor for tensor in graph.initializer}
    outputs = {value.name for value in graph.output}
    keep, outside = [], has_external(model)
    for node in graph.node:
        inputs = [name for name in node.input if name]
        known = bool(inputs) and all(name in stored or name in values for name in inputs)
        if outputs & set(node.output):
            keep.append(node)
        elif not node.domain and known and folds(node, values):
            feeds = {name: values[name] if name in values else values_of(stored[name]) for name in inputs}
            results = _computed(node, feeds, opset)
            if node.op_type in ARITHMETIC_OPS and _nbytes(results) > _nbytes(feeds):  # a file would grow by it
                results = {}
            values |= results
            keep += [] if results else [node]
        elif node.output[0] not in values:
            keep.append(node)
    refill(graph.node, keep)
    used = set(GraphIndex(graph).readers) - {name for node in keep for name in node.output}
    for name, value in values.items():
        if name in used:
            refill_tensor(graph.initializer.add(), value, name, outside=outside)
    drop_unused_initializers(graph)


def _nbytes(arrays: Arrays) -> int:
    return sum(value.nbytes for value in arrays.values())


def _computed(node: onnx.NodeProto, feeds: Arrays, opset: onnx.OperatorSetIdProto) -> Arrays:
    """The outputs of one node, none where it does not fit its inputs: what is wrong with it is the runtime's to say.

    As a function, for onnx computes a lone node by the newest opset.
    """
    names = [name for name in node.output if name]
    function = onnx.helper.make_function("folded", "node", list(feeds), names, [node], [opset])
    try:
        results: Any = ReferenceEvaluator(function).run(None, feeds, attributes={})
    except Exception:  # whatever NumPy or the evaluator raises
        return {}
    return {name: np.asarray(result) for name, result in zip(names, results, strict=True)}
