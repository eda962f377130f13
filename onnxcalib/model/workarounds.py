"""Forms that a runtime fails on, written otherwise."""

from __future__ import annotations

import onnx
from onnx import helper

from onnxcalib.model.graph import GraphIndex, attributes, fresh_name
from onnxcalib.model.shapes import infer_shapes

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


def _is_input(index: GraphIndex, name: str) -> bool:
    """Whether a tensor is a graph input, as runtimes may see it."""
    while (maker := index.producers.get(name)) is not None and maker.op_type in DROPPED:
        name = maker.input[0]
    return name in index.inputs
