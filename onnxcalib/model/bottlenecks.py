"""Tensors through which everything passes: the borders of a network's blocks."""

from __future__ import annotations

from collections import Counter

import onnx

from onnxcalib.model.graph import GraphIndex


def bottlenecks(graph: onnx.GraphProto) -> list[str]:
    """The tensors that alone carry what later nodes still read, in order."""
    index = GraphIndex(graph)
    moving, _ = index.downstream(index.inputs)
    unread = Counter(name for node in graph.node for name in GraphIndex.reads(node) if name in moving)
    live: set[str] = set(index.inputs) & unread.keys()
    found: list[str] = []
    for node in graph.node:
        for name in GraphIndex.reads(node):
            unread[name] -= 1
            if not unread[name]:
                live.discard(name)
        live.update(name for name in node.output if unread.get(name, 0) > 0)
        if len(live) == 1 and live <= set(node.output):
            found.extend(live)
    return found
