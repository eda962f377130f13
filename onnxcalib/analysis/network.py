"""The network as blocks: its layers, the places where their results meet, and who reads whom."""

from __future__ import annotations

from typing import Any

from onnxcalib.model.graph import GraphIndex
from onnxcalib.model.layers import LayerList
from onnxcalib.model.prepare import Model


def blocks(model: Model, listed: LayerList) -> list[dict[str, Any]]:
    """Every layer and every node at which two of them meet, in the order of the graph, with the blocks that it reads.

    What else lies between is left out: a chain of activations and reshapes is one arrow.
    """
    index, layers = GraphIndex(model.proto.graph), {layer.name for layer in listed.layers}
    found: list[dict[str, Any]] = []
    made_by: dict[str, int] = {}  # by tensor: the block whose result it carries
    for node in model.proto.graph.node:
        read = list(dict.fromkeys(made_by[name] for name in index.reads(node) if name in made_by))
        if node.name in layers or len(read) > 1:
            found.append({"name": node.name, "op": node.op_type, "layer": node.name in layers, "reads": read})
            made_by |= {name: len(found) - 1 for name in node.output if name}
        elif read:
            made_by |= {name: read[0] for name in node.output if name}
    return found
