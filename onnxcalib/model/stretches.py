"""A model cut into stretches of so many layers that run one after the other, each node in one of them."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import onnx

from onnxcalib.model.graph import GraphIndex
from onnxcalib.model.layers import Layer
from onnxcalib.model.shapes import inferred
from onnxcalib.model.subgraph import Source


@dataclass(frozen=True)
class Stretch:
    """Some consecutive layers, and what lies between them."""

    layers: tuple[Layer, ...]
    nodes: tuple[int, ...]  # places in the graph; constants that nodes compute are computed wherever they are read
    reads: tuple[str, ...]  # tensors of earlier stretches, and the model's inputs
    makes: tuple[str, ...]  # what later stretches read
    ends: tuple[str, ...] = ()  # sums of layers that no other layer depends on


class Stretches:
    """The layers and what they depend on; nothing is cut where there are no more layers than one stretch may have."""

    def __init__(self, model: onnx.ModelProto, layers: Sequence[Layer], most: int) -> None:
        self._model, self._parts = model, list[Stretch]()
        self._types: dict[str, int] = {}
        if len(layers) > most:
            cutting = _Cutting(model, layers)
            self._parts, self._types = cutting.parts(most), cutting.types
        if len(self._parts) < 2:
            reads = tuple(value.name for value in model.graph.input)
            self._parts = [Stretch(tuple(layers), tuple(range(len(model.graph.node))), reads, ())]

    def __len__(self) -> int:
        return len(self._parts)

    def __iter__(self) -> Iterator[tuple[Stretch, onnx.ModelProto]]:
        """Each with its model, cut out when its turn comes: together they are as large as the whole."""
        if len(self) == 1:
            yield self._parts[0], self._model
            return
        source = Source(self._model)
        for part in self._parts:
            nodes = [self._model.graph.node[place] for place in part.nodes]
            model = source.part(nodes, part.reads, (*part.makes, *part.ends))
            for value in (*model.graph.input, *model.graph.output):
                if not value.type.tensor_type.shape.dim:  # inputs of the model keep the sizes that they declare
                    value.type.tensor_type.elem_type = self._types.get(value.name, onnx.TensorProto.FLOAT)
            yield part, model


class _Cutting:
    """Where a graph can be cut, and how many tensors cross each place."""

    def __init__(self, model: onnx.ModelProto, layers: Sequence[Layer]) -> None:
        index = GraphIndex(model.graph)
        self._reading, self._inputs = index.reading, index.inputs
        self._varying, _ = index.downstream(index.inputs)
        self._made = {name: place for place, (node, _) in enumerate(index.reading) for name in node.output if name}
        found = (value for value in inferred(model) if value.type.tensor_type.elem_type)
        self.types = {value.name: int(value.type.tensor_type.elem_type) for value in found}
        places = {node.name: place for place, (node, _) in enumerate(index.reading)}
        self._layers = sorted(layers, key=lambda layer: places[layer.name])
        self._starts = [places[layer.name] for layer in self._layers]
        self._ends = [places[layer.bias_node or layer.name] for layer in self._layers]
        self._needed = sorted(self._before(self._ends))
        self._last = {name: place for place in self._needed for name in self._reading[place][1]}  # that reads it

    def parts(self, most: int) -> list[Stretch]:
        """Stretches of at most so many layers, and half of that at least, between places that few tensors cross."""
        crossing, cuts = self._crossing(), [0]
        while len(self._layers) - cuts[-1] > most:
            near = range(cuts[-1] + most, cuts[-1] + most // 2, -1)
            further = (cut for cut in range(near[0] + 1, len(self._layers)) if crossing[cut] is not None)
            costs = {cut: cost for cut in near if (cost := crossing[cut]) is not None}
            cut = min(costs, key=costs.__getitem__) if costs else next(further, None)
            if cut is None:
                break
            cuts.append(cut)
        starts = [0, *(self._starts[cut] for cut in cuts[1:]), len(self._reading)]
        spans = zip(itertools.pairwise([*cuts, len(self._layers)]), itertools.pairwise(starts), strict=True)
        return [self._stretch(self._layers[slice(*layers)], *places) for layers, places in spans]

    def _crossing(self) -> list[int | None]:
        """How many tensors cross the place before each layer; None where a cut would part a layer from its bias."""
        counts: list[int | None] = [0] * len(self._layers)
        for name, last in self._last.items():
            if name in self._varying and name not in self._inputs:
                for cut in self._between(self._made[name], last):
                    # Nobody knows how to keep what is no tensor.
                    known = counts[cut] if name in self.types else None
                    counts[cut] = None if known is None else known + 1
        for start, end in zip(self._starts, self._ends, strict=True):
            for cut in self._between(start, end):
                counts[cut] = None
        return counts

    def _between(self, made: int, read: int) -> Iterable[int]:
        """The layers before which a cut lies between two nodes."""
        return range(bisect_right(self._starts, made), bisect_right(self._starts, read))

    def _stretch(self, layers: Sequence[Layer], start: int, end: int) -> Stretch:
        inside = [place for place in self._needed if start <= place < end and self._varies(place)]
        read = dict.fromkeys(name for place in inside for name in self._reading[place][1])
        made = [name for place in inside for name in self._reading[place][0].output]
        constants = self._before([self._made[name] for name in read if name in self._made.keys() - self._varying])
        reads = tuple(name for name in read if name in self._varying and name not in made)
        makes = tuple(name for name in made if self._last.get(name, -1) >= end)
        ends = tuple(layer.summed for layer in layers if layer.summed not in self._last)
        return Stretch(tuple(layers), tuple(sorted({*inside, *constants})), reads, makes, ends)

    def _varies(self, place: int) -> bool:
        return not self._varying.isdisjoint(self._reading[place][0].output)

    def _before(self, places: Iterable[int]) -> set[int]:
        """These nodes, and all that they depend on."""
        found, todo = set[int](), list(places)
        while todo:
            place = todo.pop()
            if place not in found:
                found.add(place)
                todo.extend(self._made[name] for name in self._reading[place][1] if name in self._made)
        return found
