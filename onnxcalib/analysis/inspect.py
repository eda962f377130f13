"""What there is to quantize in a model."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import onnx

from onnxcalib.algorithms.constants import Candidate, candidates
from onnxcalib.model.layers import LayerList
from onnxcalib.model.read import Graph, graphs_of, merged, read_prepared
from onnxcalib.recipe import Recipe
from onnxcalib.targets import Target, find_target


def inspect(model: str | Path | onnx.ModelProto) -> LayerList:
    """The layers of a model, and what stays float and why.

    Args:
        model: A float model, as a path or in memory.
    """
    target = find_target(Recipe().target)
    graphs = graphs_of(read_prepared(model, target))
    found = [it.constant for graph in graphs for it in _candidates(graph, target)]
    # Branches of Ifs are looked at by themselves, and within the graph around them.
    return replace(merged(graphs), constants=tuple({it.name: it for it in found}.values()))


def _candidates(graph: Graph, target: Target) -> Iterable[Candidate]:
    return candidates(graph.model, graph.listed.layers, target, lambda _: True).values()
