"""Sub-models: one layer, everything after a tensor, or a model that shows inner tensors."""

from __future__ import annotations

from collections.abc import Collection, Container, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import onnx

from onnxcalib.model.graph import GraphIndex
from onnxcalib.model.io import copied
from onnxcalib.model.layers import Layer
from onnxcalib.model.prepare import Model
from onnxcalib.model.walk import refill

QUANTIZER_OPS = ("DequantizeLinear", "Clip", "QuantizeLinear")


def with_outputs(model: onnx.ModelProto, names: Sequence[str]) -> onnx.ModelProto:
    """A copy whose outputs are exactly the named float tensors."""
    shown = copied(model)
    known = {value.name: value for value in (*model.graph.output, *model.graph.value_info)}
    refill(shown.graph.output, [known.get(name) or _float_value(name) for name in names])
    return shown


def upstream(
    model: onnx.ModelProto, names: Sequence[str], known: Collection[str] = ()
) -> tuple[onnx.ModelProto, tuple[str, ...]]:
    """What makes the named float tensors out of known ones and the model's inputs, and which of these it reads."""
    return Cutter(model).upstream(names, known)


def layer_model(model: Model, layer: Layer) -> Model:
    """The layer alone: from the tensor that it reads to the one after its bias and activation."""
    return replace(model, proto=Cutter(model.proto).layer(layer))


@dataclass(frozen=True)
class Part:
    """Some nodes of a model: what makes the named tensors out of those that it is fed."""

    names: tuple[str, ...]
    fed: tuple[str, ...]
    nodes: frozenset[str]
    made: frozenset[str]


class Cutter:
    """Cuts many parts out of one model, which is indexed once."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self.model, self.index, self._source = model, GraphIndex(model.graph), Source(model)
        self._places = {node.name: place for place, node in enumerate(model.graph.node)}

    @cached_property
    def _varying(self) -> set[str]:
        """All other tensors are constants that a runtime folds."""
        return self.index.downstream(self.index.inputs)[0]

    def place(self, tensor: str) -> int:
        """The place of the node that makes a tensor, in the order of the graph; -1 for an input."""
        maker = self.index.producers.get(tensor)
        return -1 if maker is None else self._places[maker.name]

    def layer(self, layer: Layer) -> onnx.ModelProto:
        """The layer alone: from the tensor that it reads to the one after its bias and activation."""
        nodes, name = [], layer.activated
        while name != layer.input:
            nodes.append(self.index.producers[name])
            name = layer.input if nodes[-1].name == layer.name else _data_input(self.index, nodes[-1])
        return self._source.part(nodes[::-1], [layer.input], [layer.activated])

    def upstream(self, names: Sequence[str], known: Container[str] = ()) -> tuple[onnx.ModelProto, tuple[str, ...]]:
        """What makes the named float tensors out of known ones and the model's inputs, and which of these it reads."""
        part = self.part(names, known)
        return self.together([part]), part.fed

    def part(self, names: Sequence[str], known: Container[str] = (), through: Collection[str] = ()) -> Part:
        """The same, to be cut out later; of known tensors it goes through some."""
        inside, fed, todo = set[str](), dict[str, None](), list(names)
        made = set[str]()
        while todo:
            name = todo.pop()
            maker = self.index.producers.get(name)
            if name in self.index.inputs or (name in known and name not in names and name not in through):
                fed[name] = None
            elif maker is not None and maker.name not in inside:
                inside.add(maker.name)
                made.update(maker.output)
                todo.extend(GraphIndex.reads(maker))
        return Part(tuple(names), tuple(fed), frozenset(inside), frozenset(made))

    def together(self, parts: Sequence[Part]) -> onnx.ModelProto:
        """Several parts as one model; none may make what another is fed."""
        inside = frozenset[str]().union(*(part.nodes for part in parts))
        fed = dict.fromkeys(name for part in parts for name in part.fed)
        names = dict.fromkeys(name for part in parts for name in part.names)
        return self._source.part(self._in_order(inside), tuple(fed), tuple(names))

    def after(self, tensor: str, until: str | None = None) -> tuple[onnx.ModelProto | None, tuple[str, ...]]:
        """What depends on a tensor, as a model, and the other tensors that it must be fed; None if nothing does.

        It may end at a tensor through which everything passes, which is an output then, if it depends on the first.
        """
        nodes, fed = self._after(tensor, until)
        made = {name for node in nodes for name in node.output}
        ends = dict.fromkeys((*(value.name for value in self.model.graph.output), *([until] if until else ())))
        outputs = [name for name in ends if name in made]
        return (self._source.part(nodes, [tensor, *fed], outputs) if nodes else None), fed

    def fed_after(self, tensor: str, until: str | None = None) -> tuple[str, ...]:
        """The other tensors that what depends on a tensor must be fed."""
        return self._after(tensor, until)[1]

    def _after(self, tensor: str, until: str | None = None) -> tuple[list[onnx.NodeProto], tuple[str, ...]]:
        last = len(self.index.reading) if until is None else self.place(until) + 1
        _, inside = self.index.downstream([tensor], range(self.place(tensor) + 1, last))
        if not inside:
            return [], ()
        self._pull_in(inside, tensor)
        nodes = self._in_order(inside)
        made = {name for node in nodes for name in node.output}
        reads = dict.fromkeys(name for node in nodes for name in self._reads(node) if name not in made)
        return nodes, tuple(name for name in reads if name in self._varying and name != tensor)

    def _pull_in(self, inside: set[str], tensor: str) -> None:
        """Adds what makes the constants, and whole quantizers: half a QDQ pair would keep its reader from fusing."""
        todo = self._in_order(inside)
        while todo:
            reader = todo.pop()
            for name in self._reads(reader):
                maker = self.index.producers.get(name)
                if maker is None or maker.name in inside or name == tensor:
                    continue
                # A Clip of quantized values is part of a quantizer, one of values is not.
                half = maker.op_type in QUANTIZER_OPS
                half = half and (maker.op_type != "Clip" or reader.op_type == QUANTIZER_OPS[0])
                if name not in self._varying or half:
                    inside.add(maker.name)
                    todo.append(maker)

    def _in_order(self, names: Collection[str]) -> list[onnx.NodeProto]:
        return [self.index.reading[place][0] for place in sorted(self._places[name] for name in names)]

    def _reads(self, node: onnx.NodeProto) -> tuple[str, ...]:
        return self.index.reading[self._places[node.name]][1]


def _data_input(index: GraphIndex, node: onnx.NodeProto) -> str:
    return str(next(name for name in node.input if name in index.producers))


class Source:
    """A model of which many parts are copied: what it has of tensors is looked up by name."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self._model, graph = model, model.graph
        self._initializers = {tensor.name: place for place, tensor in enumerate(graph.initializer)}
        self._known = {value.name: value for value in (*graph.input, *graph.output, *graph.value_info)}

    def part(self, nodes: Sequence[onnx.NodeProto], inputs: Sequence[str], outputs: Sequence[str]) -> onnx.ModelProto:
        """Some nodes as a model of their own; tensors of unknown type are floats."""
        model, known = self._model, self._known
        part = onnx.ModelProto(ir_version=model.ir_version, opset_import=model.opset_import)
        part.graph.MergeFrom(onnx.GraphProto(name=model.graph.name, node=nodes))
        used = {name for node in nodes for name in GraphIndex.reads(node)}
        places = sorted(self._initializers[name] for name in used if name in self._initializers)
        part.graph.initializer.extend(model.graph.initializer[place] for place in places)
        sparse = (it for it in model.graph.sparse_initializer if it.values.name in used)
        part.graph.sparse_initializer.extend(sparse)
        part.graph.input.extend(known.get(name) or _float_value(name) for name in inputs)
        ends = (_without_shape(known[name]) if name in known else _float_value(name) for name in outputs)
        part.graph.output.extend(ends)
        return part


def _without_shape(value: onnx.ValueInfoProto) -> onnx.ValueInfoProto:
    bare = onnx.ValueInfoProto()
    bare.CopyFrom(value)
    if bare.type.HasField("tensor_type"):
        bare.type.tensor_type.ClearField("shape")
    return bare


def _float_value(name: str) -> onnx.ValueInfoProto:
    return onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None)
