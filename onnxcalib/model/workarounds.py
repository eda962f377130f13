"""Forms that a runtime fails on, written otherwise."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import helper, numpy_helper

from onnxcalib.model.graph import GraphIndex, attributes, fresh_name
from onnxcalib.model.shapes import float_tensors, infer_shapes

# Ops that a runtime removes where they do nothing.
DROPPED = ("Identity", "Dropout", "Cast", "Slice", "Pad", "Expand")


def avoid_clipped_inputs(graph: onnx.GraphProto) -> None:
    """Makes the Clip of a graph input a Max and a Min: onnxruntime 1.19 cannot load one before a quantizer."""
    index = GraphIndex(graph)
    used = {node.name for node in graph.node} | set(index.producers) | set(index.inputs) | set(index.initializers)
    for node in list(graph.node):
        if node.op_type != "Clip" or node.domain or not _is_input(index, node.input[0]):
            continue
        bounds = [(op, name) for op, name in zip(("Max", "Min"), node.input[1:], strict=False) if name]
        made, place, tensor = [], list(graph.node).index(node), node.input[0]
        for op, bound in bounds:
            name = fresh_name(f"{node.name}_{op}", used)
            used.add(name)
            made.append(helper.make_node(op, [tensor, bound], [name], name))
            tensor = name
        made = made or [helper.make_node("Identity", [tensor], [tensor], node.name)]
        made[-1].name, made[-1].output[0] = node.name, node.output[0]
        graph.node.remove(node)
        for offset, each in enumerate(made):
            graph.node.insert(place + offset, each)


def avoid_softmax_of_one(model: onnx.ModelProto) -> None:
    """Makes a Softmax over an axis of one place an Exp of zero: onnxruntime's integer kernel would give zero."""
    ones = [node for node in model.graph.node if node.op_type == "Softmax" and not node.domain]
    shapes = infer_shapes(model) if ones else {}
    for node in ones:
        shape, axis = shapes.get(node.input[0], ()), attributes(node).get("axis", -1)
        if not -len(shape) <= axis < len(shape) or shape[axis] != 1 or axis % len(shape) == 0:
            continue
        zero = f"{node.output[0]}_zero"
        place = list(model.graph.node).index(node)
        model.graph.node.insert(place, helper.make_node("Sub", [node.input[0]] * 2, [zero], f"{node.name}_zero"))
        node.op_type, node.input[0] = "Exp", zero
        del node.attribute[:]


def avoid_wide_pools(model: onnx.ModelProto) -> None:
    """Parts a pool from the Pad before it where onnxruntime would make one of both that pads by a whole kernel."""
    graph, index = model.graph, GraphIndex(model.graph)
    used = {node.name for node in graph.node} | set(index.producers) | set(index.inputs) | set(index.initializers)
    for node in list(graph.node):
        pad = index.producers.get(node.input[0]) if node.op_type in ("MaxPool", "AveragePool") else None
        if pad is None or pad.op_type != "Pad" or not _too_wide(index, pad, node):
            continue
        if pad.output[0] not in float_tensors(model):
            continue
        name, lowest = (fresh_name(f"{node.name}_{what}", used) for what in ("padded", "lowest"))
        used.update((name, lowest))
        graph.initializer.append(numpy_helper.from_array(np.array(np.finfo(np.float32).min, np.float32), lowest))
        graph.node.insert(list(graph.node).index(node), helper.make_node("Max", [pad.output[0], lowest], [name], name))
        node.input[0] = name


def _too_wide(index: GraphIndex, pad: onnx.NodeProto, pool: onnx.NodeProto) -> bool:
    """Whether the pads of both reach the size of the kernel on any side."""
    values, given = attributes(pool), index.constant(pad.input[1]) if len(pad.input) > 1 else None
    kernel = values.get("kernel_shape", [])
    if given is None or given.size != 2 * (len(kernel) + 2):
        return False
    ends = given.reshape(2, -1)[:, 2:].reshape(-1)
    both = ends + np.array(values.get("pads", [0] * ends.size))
    return bool((both >= np.tile(kernel, 2)).any())


def _is_input(index: GraphIndex, name: str) -> bool:
    """Whether a tensor is a graph input, as runtimes may see it."""
    while (maker := index.producers.get(name)) is not None and maker.op_type in DROPPED:
        name = maker.input[0]
    return name in index.inputs
