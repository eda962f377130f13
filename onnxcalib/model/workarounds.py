"""Forms that a runtime fails on, written otherwise."""

from __future__ import annotations

import onnx
from onnx import helper

from onnxcalib.model.graph import GraphIndex, fresh_name

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


def _is_input(index: GraphIndex, name: str) -> bool:
    """Whether a tensor is a graph input, as runtimes may see it."""
    while (maker := index.producers.get(name)) is not None and maker.op_type in DROPPED:
        name = maker.input[0]
    return name in index.inputs
