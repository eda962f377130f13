"""A network cut into blocks: residual blocks, inverted bottlenecks, halves of transformer layers, short chains."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import onnx

from onnxcalib.model.graph import GraphIndex
from onnxcalib.model.layers import Layer
from onnxcalib.model.prepare import Model
from onnxcalib.model.shapes import typed
from onnxcalib.model.subgraph import model_of
from onnxcalib.plan import QuantPlan

MOST_SINGLE = 3  # layers of a chain in one block, as many as an inverted bottleneck has


@dataclass(frozen=True)
class Block:
    """The nodes between two tensors through which all passes that depends on a layer."""

    model: Model
    layers: tuple[Layer, ...]
    reads: tuple[str, ...]  # what the block before it makes, and inputs of the model
    makes: tuple[str, ...]  # what the next block reads, and outputs of the model

    @property
    def name(self) -> str:
        """The first and the last of its layers."""
        return " .. ".join(dict.fromkeys((self.layers[0].name, self.layers[-1].name)))

    def part_of(self, plan: QuantPlan) -> QuantPlan:
        """What the plan says of the block."""
        own = {layer.name for layer in self.layers}
        read = {layer.input for layer in self.layers}
        present = {name for node in self.model.proto.graph.node for name in (*node.input, *node.output)}
        return replace(
            plan,
            layers={name: params for name, params in plan.layers.items() if name in own or params.table},
            shared={name: qparams for name, qparams in plan.shared.items() if name in present},
            inputs={name: qparams for name, qparams in plan.inputs.items() if name in read},
            dynamic=tuple(name for name in plan.dynamic if name in read),
        )


def find_blocks(model: Model, layers: Sequence[Layer]) -> list[Block]:
    """Requires layers in the order of the graph; ensures that each of them is in one block, in that order."""
    graph = model.proto.graph
    spans = _merged(list(_spans(graph, layers)))
    cutter = _Cutter(model, layers)
    found, nodes = [], set[str]()
    for span in spans:
        block = cutter.block(span, nodes)
        nodes |= set(span.nodes)
        found.append(block)
    return found


@dataclass(frozen=True)
class _Span:
    """Nodes in their order, of which some are layers."""

    nodes: tuple[str, ...]
    layers: tuple[str, ...]

    def joined(self, other: _Span) -> _Span:
        return _Span((*self.nodes, *other.nodes), (*self.layers, *other.layers))


def _spans(graph: onnx.GraphProto, layers: Sequence[Layer]) -> Iterator[_Span]:
    """The nodes that depend on a layer, cut at each tensor that alone carries what later ones read."""
    index, names = GraphIndex(graph), {layer.name for layer in layers}
    moving, dependent = index.downstream([layer.output for layer in layers])
    unread = Counter(name for node, reads in index.reading for name in reads if name in moving)
    live: set[str] = set()
    nodes: list[str] = []
    for node, reads in index.reading:
        if node.name not in dependent and node.name not in names:
            continue
        nodes.append(node.name)
        for name in reads:
            unread[name] -= 1
            if not unread[name]:
                live.discard(name)
        live.update(name for name in node.output if unread.get(name, 0) > 0)
        if len(live) == 1 and live <= set(node.output):
            yield _Span(tuple(nodes), tuple(name for name in nodes if name in names))
            nodes = []
    if nodes:
        yield _Span(tuple(nodes), tuple(name for name in nodes if name in names))


def _merged(spans: Sequence[_Span]) -> list[_Span]:
    """Nodes without a layer go to the block before them, and single layers of a chain together."""
    found: list[_Span] = []
    single = False  # whether the last one is made of single layers
    for span in spans:
        fits = single and len(span.layers) == 1 and len(found[-1].layers) < MOST_SINGLE
        if found and (not span.layers or fits):
            found[-1] = found[-1].joined(span)
        else:
            found.append(span)
            single = len(span.layers) == 1
    return found


class _Cutter:
    """Cuts spans out of a model, each with what it needs beside the tensor that it reads."""

    def __init__(self, model: Model, layers: Sequence[Layer]) -> None:
        self.model, self.layers = replace(model, proto=typed(model.proto)), layers
        self.index = GraphIndex(self.model.proto.graph)
        self.moving, self.dependent = self.index.downstream([layer.output for layer in layers])
        self.dependent |= {layer.name for layer in layers}
        self.reads = {node.name: names for node, names in self.index.reading}

    def block(self, span: _Span, before: set[str]) -> Block:
        """The span with what no layer changes, which is computed where it is read."""
        own, inside, todo = set(span.nodes), set(span.nodes), list(span.nodes)
        fed: dict[str, None] = {}
        while todo:
            for name in self.reads[todo.pop()]:
                maker = self.index.producers.get(name)
                if name in self.index.inputs or (maker is not None and maker.name in before):
                    fed[name] = None
                elif maker is not None and maker.name not in inside:
                    inside.add(maker.name)
                    todo.append(maker.name)
        nodes = [node for node in self.model.proto.graph.node if node.name in inside]
        later = {name for node, names in self.index.reading if self._is_later(node, own | before) for name in names}
        later |= self.index.outputs
        makes = tuple(name for node in nodes if node.name in own for name in node.output if name in later)
        layers = tuple(layer for layer in self.layers if layer.name in own)
        proto = model_of(self.model.proto, nodes, tuple(fed), makes)
        return Block(replace(self.model, proto=proto), layers, tuple(fed), makes)

    def _is_later(self, node: onnx.NodeProto, done: set[str]) -> bool:
        return node.name in self.dependent and node.name not in done
