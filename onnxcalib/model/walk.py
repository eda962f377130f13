"""Nodes and subgraphs of a graph, and its repeated fields."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import onnx


def all_nodes(graph: onnx.GraphProto | onnx.FunctionProto) -> Iterator[onnx.NodeProto]:
    """Every node, those of subgraphs included."""
    for node in graph.node:
        yield node
        for body in bodies(node):
            yield from all_nodes(body)


def bodies(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    """The subgraphs of a node."""
    for attribute in node.attribute:
        yield from attribute.graphs
        if attribute.HasField("g"):
            yield attribute.g


def graphs_in(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    """The graph and all subgraphs of its nodes."""
    yield graph
    for node in all_nodes(graph):
        yield from bodies(node)


def refill(field: Any, items: Iterable[Any]) -> None:
    """Gives a repeated field of a message other items; these may be some of its own."""
    kept = list(items)
    del field[:]
    field.extend(kept)
