"""Half precision: the graph computes in float32, between a Cast at each input and one at each output of the file."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx
from onnx import TensorProto, helper

from onnxcalib.model.external import is_external, refill_tensor, values_of
from onnxcalib.model.graph import fresh_name
from onnxcalib.model.io import copied
from onnxcalib.model.shapes import float_tensors
from onnxcalib.model.walk import all_nodes, bodies, refill

HALVES = (TensorProto.FLOAT16, TensorProto.BFLOAT16)
TYPE_ATTRIBUTES = ("to", "dtype")  # of Cast, and of ops that make tensors out of nothing


def widened(model: onnx.ModelProto) -> dict[str, int]:
    """Makes all that is half precision float32 but for the inputs; gives the outputs that were, with their types.

    On CPUs runtimes compute half precision in float32 as well, and integer kernels read and write float32 only.
    """
    graph = model.graph
    if not _has_halves(graph):
        return {}
    inputs = {value.name: _element(value) for value in graph.input if _element(value) in HALVES}
    outputs = {value.name: _element(value) for value in graph.output if _element(value) in HALVES}
    _widen(graph)
    taken = {name for node in all_nodes(graph) for name in (*node.output, node.name)}
    taken |= {it.name for it in (*graph.input, *graph.initializer)}
    for name, kind in inputs.items():
        wide = fresh_name(f"{name}_float", taken)
        taken.add(wide)
        _rename(graph, name, wide)
        graph.node.insert(0, helper.make_node("Cast", [name], [wide], wide, to=TensorProto.FLOAT))
        for value in (*graph.input, *graph.output):  # an input may be passed through
            if value.name == name:
                value.type.tensor_type.elem_type = kind
    _drop_casts(model)
    return {name: kind for name, kind in outputs.items() if name not in inputs}


def with_output_types(model: onnx.ModelProto, types: Mapping[str, int]) -> onnx.ModelProto:
    """A copy whose outputs are cast to what they were."""
    if not types:
        return model
    cast = copied(model)
    graph = cast.graph
    taken = {name for node in all_nodes(graph) for name in (*node.output, node.name)}
    for value in {value.name: value for value in graph.output}.values():  # one may stand there twice
        if value.name in types:
            wide = fresh_name(f"{value.name}_float", taken)
            taken.add(wide)
            _rename(graph, value.name, wide)
            for node in graph.node:
                node.output[:] = [wide if name == value.name else name for name in node.output]
            for tensor in graph.initializer:
                tensor.name = wide if tensor.name == value.name else tensor.name
            name = fresh_name(f"{value.name}_cast", taken)
            graph.node.append(helper.make_node("Cast", [wide], [value.name], name, to=types[value.name]))
    for value in graph.output:
        value.type.tensor_type.elem_type = types.get(value.name, value.type.tensor_type.elem_type)
    return cast


def _has_halves(graph: onnx.GraphProto) -> bool:
    """Whether half precision comes into a graph anywhere: by an input, a constant or a type that a node names."""
    typed = [*(tensor.data_type for tensor in graph.initializer), *(_element(value) for value in graph.input)]
    for node in all_nodes(graph):
        for attribute in node.attribute:
            typed += [attribute.t.data_type, *(tensor.data_type for tensor in attribute.tensors)]
            typed += [attribute.i] if attribute.name in TYPE_ATTRIBUTES else []
        typed += [tensor.data_type for body in bodies(node) for tensor in body.initializer]
    return not set(HALVES).isdisjoint(typed)


def _drop_casts(model: onnx.ModelProto) -> None:
    """Takes away Casts from float32 to float32, which would hide a layer's bias and activation from it."""
    graph, floats = model.graph, float_tensors(model) | {it.name for it in model.graph.initializer if _is_float(it)}
    outputs, kept = {value.name for value in graph.output}, []
    for node in graph.node:
        plain = node.op_type == "Cast" and node.input[0] in floats and node.attribute[0].i == TensorProto.FLOAT
        if plain and node.output[0] not in outputs:
            _rename(graph, node.output[0], node.input[0])
        else:
            kept.append(node)
    refill(graph.node, kept)


def _is_float(tensor: onnx.TensorProto) -> bool:
    return bool(tensor.data_type == TensorProto.FLOAT)


def _widen(graph: onnx.GraphProto) -> None:
    for tensor in graph.initializer:
        _widen_tensor(tensor)
    for value in (*graph.input, *graph.output, *graph.value_info):
        _widen_type(value.type)
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.name in TYPE_ATTRIBUTES and attribute.i in HALVES:
                attribute.i = TensorProto.FLOAT
            for tensor in (attribute.t, *attribute.tensors) if attribute.HasField("t") else attribute.tensors:
                _widen_tensor(tensor)
        for body in bodies(node):
            _widen(body)


def _widen_tensor(tensor: onnx.TensorProto) -> None:
    if tensor.data_type in HALVES:
        refill_tensor(tensor, values_of(tensor).astype(np.float32), tensor.name, outside=is_external(tensor))


def _widen_type(kind: onnx.TypeProto) -> None:
    if kind.HasField("tensor_type") and kind.tensor_type.elem_type in HALVES:
        kind.tensor_type.elem_type = TensorProto.FLOAT
    elif kind.HasField("sequence_type"):
        _widen_type(kind.sequence_type.elem_type)
    elif kind.HasField("optional_type"):
        _widen_type(kind.optional_type.elem_type)


def _rename(graph: onnx.GraphProto, old: str, new: str) -> None:
    """Every reader of a tensor, in subgraphs too, reads another."""
    for node in all_nodes(graph):
        node.input[:] = [new if name == old else name for name in node.input]
    for body in (body for node in all_nodes(graph) for body in bodies(node)):
        for value in body.output:
            value.name = new if value.name == old else value.name


def _element(value: onnx.ValueInfoProto) -> int:
    return int(value.type.tensor_type.elem_type)
