"""From a file to the prepared graphs of a model: its own, and the branches of its Ifs."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx

from onnxcalib.errors import ModelError, understanding
from onnxcalib.model.branches import Branch, branch_model, find_branches
from onnxcalib.model.io import opset_of, read_model
from onnxcalib.model.layers import LayerList, find_layers
from onnxcalib.model.prepare import Model, prepare
from onnxcalib.targets import Target


def read_prepared(
    model: str | Path | onnx.ModelProto, target: Target, weight_bits: Collection[int] = (), *, blocks: bool = False
) -> Model:
    """The model as stages see it, at an opset that the target reads and weights of these widths can have."""
    source = "the given model" if isinstance(model, onnx.ModelProto) else str(model)
    least = target.least_opset(set(weight_bits), blocks=blocks)
    with understanding(source):
        prepared = prepare(read_model(model), source, least, max(least, target.newest_opset), target.newest_ir)
    if opset_of(prepared.proto) > target.opset_limit:
        raise ModelError(
            f"{source} needs opset {opset_of(prepared.proto)}, and target {target.name} reads {target.opset_limit} at "
            "most.",
            f"Export it with opset {target.newest_opset} or older.",
        )
    return prepared


def list_layers(model: Model) -> LayerList:
    """The layers of the model and of the branches of its Ifs."""
    return merged(graphs_of(model))


@dataclass(frozen=True)
class Graph:
    """A prepared graph with its layers, and the branch of an If that it is."""

    model: Model
    listed: LayerList
    branch: Branch | None


def graphs_of(model: Model) -> list[Graph]:
    """The model's own graph, and the branches of its Ifs."""
    with understanding(model.source):
        graphs = [Graph(model, find_layers(model), None)]
        for branch in find_branches(model.proto):
            # The model's own opset was raised already; its branches go along with it.
            inner = prepare(branch_model(model.proto, branch), f"{model.source} ({branch.node}, {branch.attribute})")
            graphs.append(Graph(inner, find_layers(inner), branch))
    return graphs


def merged(graphs: Sequence[Graph]) -> LayerList:
    """The layers of all graphs, and what stays float in any of them."""
    opened = {graph.branch.node for graph in graphs if graph.branch is not None}
    floats = [node for node in graphs[0].listed.float_nodes if node.inside not in opened]
    inner = [graph.listed for graph in graphs[1:]]
    return LayerList(
        (*graphs[0].listed.layers, *(layer for listed in inner for layer in listed.layers)),
        (*floats, *(node for listed in inner for node in listed.float_nodes)),
        tuple(product for graph in graphs for product in graph.listed.products),
        tuple(pattern for graph in graphs for pattern in graph.listed.patterns),
    )
