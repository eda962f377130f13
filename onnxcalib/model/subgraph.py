"""Sub-models: one layer, everything after a tensor, or a model that shows inner tensors."""

from __future__ import annotations

from collections.abc import Collection, Container, Sequence
from dataclasses import dataclass, replace

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
    index = GraphIndex(model.proto.graph)
    nodes, name = [], layer.activated
    while name != layer.input:
        nodes.append(index.producers[name])
        name = layer.input if nodes[-1].name == layer.name else _data_input(index, nodes[-1])
    proto = model_of(model.proto, nodes[::-1], [layer.input], [layer.activated])
    return replace(model, proto=proto)


def after(model: onnx.ModelProto, tensor: str) -> tuple[onnx.ModelProto | None, tuple[str, ...]]:
    """What depends on a tensor, as a model, and the other tensors that it must be fed; None where nothing does."""
    return Cutter(model).after(tensor)


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
        self.model, self.index = model, GraphIndex(model.graph)
        self._varying, _ = self.index.downstream(self.index.inputs)  # all others are constants that a runtime folds

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
        nodes = [node for node in self.model.graph.node if node.name in inside]
        fed = dict.fromkeys(name for part in parts for name in part.fed)
        names = dict.fromkeys(name for part in parts for name in part.names)
        return model_of(self.model, nodes, tuple(fed), tuple(names))

    def after(self, tensor: str, until: str | None = None) -> tuple[onnx.ModelProto | None, tuple[str, ...]]:
        """What depends on a tensor, as a model, and the other tensors that it must be fed; None if nothing does.

        It may end at a tensor through which everything passes, which is an output then, if it depends on the first.
        """
        nodes, fed = self._after(tensor, until)
        made = {name for node in nodes for name in node.output}
        ends = dict.fromkeys((*(value.name for value in self.model.graph.output), *([until] if until else ())))
        outputs = [name for name in ends if name in made]
        return (model_of(self.model, nodes, [tensor, *fed], outputs) if nodes else None), fed

    def fed_after(self, tensor: str) -> tuple[str, ...]:
        """The other tensors that what depends on a tensor must be fed."""
        return self._after(tensor)[1]

    def _after(self, tensor: str, until: str | None = None) -> tuple[list[onnx.NodeProto], tuple[str, ...]]:
        _, inside = self.index.downstream([tensor])
        if until is not None:
            last = self.index.producers[until].name
            names = [node.name for node, _ in self.index.reading]
            inside &= set(names[: names.index(last) + 1])
        if not inside:
            return [], ()
        _pull_in(self.index, inside, tensor, self._varying)
        kept = [(node, names) for node, names in self.index.reading if node.name in inside]
        nodes = [node for node, _ in kept]
        made = {name for node in nodes for name in node.output}
        reads = dict.fromkeys(name for _, names in kept for name in names if name not in made)
        return nodes, tuple(name for name in reads if name in self._varying and name != tensor)


def _data_input(index: GraphIndex, node: onnx.NodeProto) -> str:
    return str(next(name for name in node.input if name in index.producers))


def _pull_in(index: GraphIndex, inside: set[str], tensor: str, varying: Collection[str]) -> None:
    """Adds what makes the constants, and whole quantizers: half a QDQ pair would keep its reader from fusing."""
    todo = [(node, names) for node, names in index.reading if node.name in inside]
    while todo:
        reader, names = todo.pop()
        for name in names:
            maker = index.producers.get(name)
            if maker is None or maker.name in inside or name == tensor:
                continue
            # A Clip of quantized values is part of a quantizer, one of values is not.
            half = maker.op_type in QUANTIZER_OPS and (maker.op_type != "Clip" or reader.op_type == QUANTIZER_OPS[0])
            if name not in varying or half:
                inside.add(maker.name)
                todo.append((maker, tuple(GraphIndex.reads(maker))))


def model_of(
    model: onnx.ModelProto, nodes: Sequence[onnx.NodeProto], inputs: Sequence[str], outputs: Sequence[str]
) -> onnx.ModelProto:
    """Some nodes as a model of their own; tensors of unknown type are floats."""
    part = onnx.ModelProto(ir_version=model.ir_version, opset_import=model.opset_import)
    part.graph.MergeFrom(onnx.GraphProto(name=model.graph.name, node=nodes))
    used = {name for node in nodes for name in GraphIndex.reads(node)}
    part.graph.initializer.extend(tensor for tensor in model.graph.initializer if tensor.name in used)
    part.graph.sparse_initializer.extend(it for it in model.graph.sparse_initializer if it.values.name in used)
    known = {value.name: value for value in (*model.graph.input, *model.graph.output, *model.graph.value_info)}
    part.graph.input.extend(known.get(name) or _float_value(name) for name in inputs)
    part.graph.output.extend(_without_shape(known[name]) if name in known else _float_value(name) for name in outputs)
    return part


def _without_shape(value: onnx.ValueInfoProto) -> onnx.ValueInfoProto:
    bare = onnx.ValueInfoProto()
    bare.CopyFrom(value)
    if bare.type.HasField("tensor_type"):
        bare.type.tensor_type.ClearField("shape")
    return bare


def _float_value(name: str) -> onnx.ValueInfoProto:
    return onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None)
