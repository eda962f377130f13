"""What there is to quantize in a model."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx

from onnxcalib.algorithms.constants import Candidate, candidates
from onnxcalib.algorithms.sizes import with_measured_macs
from onnxcalib.data import open_data
from onnxcalib.model.layers import LayerList
from onnxcalib.model.read import Graph, graphs_of, merged, read_prepared
from onnxcalib.model.shapes import input_specs
from onnxcalib.recipe import Recipe
from onnxcalib.targets import Target, find_target


def inspect(model: str | Path | onnx.ModelProto, calibration: Any = None) -> LayerList:
    """The layers of a model, its products of attention, and what stays float and why.

    Args:
        model: A float model, as a path or in memory.
        calibration: Samples in all forms that `quantize` takes: the first one tells sizes that the file leaves open,
            such as the length of a sequence, and with them what each layer multiplies.
    """
    target = find_target(Recipe().target)
    graphs = graphs_of(read_prepared(model, target))
    if calibration is not None:
        own = graphs[0]
        data = open_data(calibration, input_specs(own.model.proto))
        graphs[0] = replace(own, listed=with_measured_macs(own.model, own.listed, data))
    found = [it.constant for graph in graphs for it in _candidates(graph, target)]
    # Branches of Ifs are looked at by themselves, and within the graph around them.
    return replace(merged(graphs), constants=tuple({it.name: it for it in found}.values()))


def _candidates(graph: Graph, target: Target) -> Iterable[Candidate]:
    return candidates(graph.model, graph.listed.layers, target, lambda _: True).values()
