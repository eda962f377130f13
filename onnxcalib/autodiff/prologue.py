"""What of a gradient graph depends on parameters alone: run once a step, not for each piece of a batch."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt
import onnx

from onnxcalib.model.graph import GraphIndex
from onnxcalib.model.io import copied
from onnxcalib.model.walk import refill

SIZES = ("Shape", "Size")  # known when a session is opened, which needs them there


@dataclass(frozen=True)
class Parted:
    """A graph that computes `shared` from parameters, and one that reads these beside parameters and data."""

    prologue: onnx.ModelProto
    main: onnx.ModelProto
    shared: tuple[str, ...]


def parted(model: onnx.ModelProto, parameters: Collection[str]) -> Parted | None:
    """The two graphs of a gradient model; None where nothing depends on parameters alone."""
    graph, moving = model.graph, set(parameters)
    known = {*moving, *(tensor.name for tensor in graph.initializer)}
    results = {value.name for value in graph.output}
    early, late = list[onnx.NodeProto](), list[onnx.NodeProto]()
    for node in graph.node:
        reads = set(GraphIndex.reads(node))
        is_early = node.op_type not in SIZES and reads <= known and results.isdisjoint(node.output)
        # What constants alone make, the runtime folds.
        if is_early and not reads.isdisjoint(moving):
            moving.update(node.output)
            known.update(node.output)
            early.append(node)
        else:
            late.append(node)
    asked = {name for node in late for name in GraphIndex.reads(node)}
    shared = tuple(name for node in early for name in node.output if name in asked)
    if not shared:
        return None
    return Parted(_with_nodes(model, early, parameters, shared), _with_nodes(model, late, None, ()), shared)


def _with_nodes(
    model: onnx.ModelProto, nodes: list[onnx.NodeProto], inputs: Collection[str] | None, outputs: Collection[str]
) -> onnx.ModelProto:
    """The model with these nodes, what they read of constants, and other inputs and outputs where some are given."""
    result = copied(model)
    graph = result.graph
    refill(graph.node, nodes)
    used = {name for node in nodes for name in GraphIndex.reads(node)}
    refill(graph.initializer, [tensor for tensor in graph.initializer if tensor.name in used])
    if inputs is not None:
        refill(graph.input, [value for value in graph.input if value.name in inputs and value.name in used])
        refill(graph.output, [onnx.ValueInfoProto(name=name) for name in outputs])
    return result


def reading(model: onnx.ModelProto, arrays: Mapping[str, npt.NDArray[Any]]) -> onnx.ModelProto:
    """The model with these as further inputs."""
    for name, array in arrays.items():
        kind = onnx.helper.np_dtype_to_tensor_dtype(array.dtype)
        model.graph.input.append(onnx.helper.make_tensor_value_info(name, kind, array.shape))
    return model
