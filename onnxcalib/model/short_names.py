"""Short names for what quantization added: in a small file of long names, these weigh more than its weights."""

from __future__ import annotations

from collections.abc import Iterator

import onnx

from onnxcalib.model.io import copied
from onnxcalib.model.walk import bodies


def with_short_names(model: onnx.ModelProto, source: onnx.ModelProto) -> onnx.ModelProto:
    """A copy in which tensors that the source does not have, and the nodes that make them, are called q0, q1, ..."""
    short = copied(model)
    kept = {name for graph in _graphs(source.graph) for name in _names(graph)}
    kept |= {node.name for graph in _graphs(source.graph) for node in graph.node}
    added = dict.fromkeys(name for graph in _graphs(short.graph) for name in _names(graph) if name and name not in kept)
    free = (name for name in (f"q{number}" for number in range(len(added) + len(kept) + 1)) if name not in kept)
    renamed = dict(zip(added, free, strict=False))
    for graph in _graphs(short.graph):
        for value in (*graph.initializer, *graph.value_info):
            value.name = renamed.get(value.name, value.name)
        for node in graph.node:
            if node.name not in kept and node.output and node.output[0] in renamed:
                node.name = renamed[node.output[0]]
            node.input[:] = [renamed.get(name, name) for name in node.input]
            node.output[:] = [renamed.get(name, name) for name in node.output]
        for value in graph.output:
            value.name = renamed.get(value.name, value.name)
    return short


def _graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    yield graph
    for body in (body for node in graph.node for body in bodies(node)):
        yield from _graphs(body)


def _names(graph: onnx.GraphProto) -> Iterator[str]:
    """The tensors of one graph; what it gives to the outside keeps its name."""
    yield from (value.name for value in graph.input)
    yield from (tensor.name for tensor in graph.initializer)
    yield from (name for node in graph.node for name in node.output)
