"""What runtimes accept and the checker does not, put in order: domains, names of graphs, the order of nodes, sizes."""

from __future__ import annotations

import heapq

import onnx

from onnxcalib.errors import ModelError
from onnxcalib.model.walk import all_nodes, bodies, graphs_in, refill


def normalize(model: onnx.ModelProto, source: str) -> None:
    """Ensures the empty standard domain, named graphs, nodes after what they read, and no negative sizes."""
    _standard_domains(model)
    for graph in graphs_in(model.graph):
        graph.name = graph.name or "graph"
        for value in (*graph.input, *graph.output, *graph.value_info):
            for dim in value.type.tensor_type.shape.dim:
                if dim.dim_value < 0:  # some exporters mean any size by that
                    dim.ClearField("dim_value")
        _sort_nodes(graph, source)
    for function in model.functions:
        _sort_nodes(function, source)


def _standard_domains(model: onnx.ModelProto) -> None:
    """Standard operators have two names for their domain; the empty one is what the checker and converters know."""
    for body in (model.graph, *model.functions):
        for node in all_nodes(body):
            if node.domain == "ai.onnx":
                node.domain = ""
    for opsets in (model.opset_import, *(function.opset_import for function in model.functions)):
        standard = [entry for entry in opsets if entry.domain in ("", "ai.onnx")]
        for entry in standard:
            if entry.domain:
                entry.domain = ""
        for entry in standard[:-1]:  # onnxruntime goes by the last one
            opsets.remove(entry)


def _reads(node: onnx.NodeProto) -> set[str]:
    """What a node and its subgraphs read, their own tensors included."""
    inner = (each for body in bodies(node) for each in all_nodes(body))
    ends = {value.name for body in bodies(node) for graph in graphs_in(body) for value in graph.output}
    return {name for each in (node, *inner) for name in each.input if name} | ends


def _sort_nodes(graph: onnx.GraphProto | onnx.FunctionProto, source: str) -> None:
    """Puts nodes after the makers of what they read, as near to the old order as can be."""
    maker = {name: place for place, node in enumerate(graph.node) for name in node.output if name}
    needs = [{maker[name] for name in _reads(node) if name in maker} for node in graph.node]
    if all(place < number for number, places in enumerate(needs) for place in places):
        return
    readers: dict[int, list[int]] = {}
    for number, places in enumerate(needs):
        for place in places:
            readers.setdefault(place, []).append(number)
    ready = [number for number, places in enumerate(needs) if not places]
    order: list[int] = []
    while ready:
        order.append(heapq.heappop(ready))
        for number in readers.get(order[-1], ()):
            needs[number].discard(order[-1])
            if not needs[number]:
                heapq.heappush(ready, number)
    if len(order) < len(graph.node):
        stuck = graph.node[min(set(range(len(graph.node))) - set(order))]
        raise ModelError(
            f"{source} has a cycle: node '{stuck.name or next(iter(stuck.output), '')}' ({stuck.op_type}) reads what "
            "depends on its own result.",
            "Export it again.",
        )
    refill(graph.node, [graph.node[number] for number in order])
