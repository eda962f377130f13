"""A model cut into pieces that run one after the other, each node once, from tensor to tensor."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import onnx

from onnxcalib.model.graph import GraphIndex
from onnxcalib.model.shapes import typed
from onnxcalib.model.subgraph import Source


@dataclass(frozen=True)
class Piece:
    """What makes a tensor out of what earlier pieces made."""

    model: onnx.ModelProto
    nodes: frozenset[str]
    reads: tuple[str, ...]  # tensors of earlier pieces, and the model's inputs
    makes: tuple[str, ...]  # the tensor, and what else later pieces read


class Pieces:
    """The nodes that the wanted tensors depend on, and which of them ran already."""

    def __init__(self, model: onnx.ModelProto, wanted: Collection[str]) -> None:
        self._model = typed(model)
        self._index, self._source = GraphIndex(self._model.graph), Source(self._model)
        self._reads = {node.name: tuple(GraphIndex.reads(node)) for node in self._model.graph.node}
        # Constants that nodes compute are computed wherever they are read.
        self._varying, self._varying_nodes = self._index.downstream(self._index.inputs)
        self._ran: set[str] = set()
        self._wanted = set(wanted)  # and not asked for yet
        self._left = self._before(wanted)  # needed, and did not run

    def until(self, tensor: str) -> Piece | None:
        """What is left to run for a tensor; None if nothing is."""
        self._wanted.discard(tensor)
        nodes = self._before([tensor])
        if nodes.isdisjoint(self._varying_nodes):
            return None
        listed = [node for node in self._model.graph.node if node.name in nodes]
        made = {name for node in listed for name in node.output}
        read = dict.fromkeys(name for node in listed for name in self._reads[node.name] if name not in made)
        reads = tuple(name for name in read if name in self._varying)
        later = self._read_by(self._left - nodes) | self._wanted
        makes = tuple(name for node in listed for name in node.output if name == tensor or name in later)
        return Piece(self._source.part(listed, reads, makes), nodes, reads, makes)

    def finish(self, piece: Piece) -> set[str]:
        """Takes a piece as run; gives the tensors that later ones read."""
        self._ran |= piece.nodes & self._varying_nodes
        self._left -= self._ran
        return self._read_by(self._left) | self._wanted

    def _before(self, tensors: Collection[str]) -> frozenset[str]:
        """The nodes that the tensors depend on, but for those that ran."""
        found, todo = set[str](), list(tensors)
        while todo:
            maker = self._index.producers.get(todo.pop())
            if maker is not None and maker.name not in found and maker.name not in self._ran:
                found.add(maker.name)
                todo.extend(self._reads[maker.name])
        return frozenset(found)

    def _read_by(self, nodes: Collection[str]) -> set[str]:
        return {name for node in nodes for name in self._reads[node]} & self._varying
