"""Small questions to a graph: who makes a tensor, who reads it, what is constant; and surgery without the weights."""

from __future__ import annotations

import gc
from collections.abc import Callable, Container, Iterable
from functools import cached_property
from typing import Any

import numpy as np
import onnx
import onnx_graphsurgeon as gs

from onnxcalib.model.external import has_external, is_external, refill_tensor, values_of
from onnxcalib.model.io import copy_identity, without_weights
from onnxcalib.model.walk import all_nodes, bodies, refill
from onnxcalib.numerics.quant_params import Bounds

SURGEON_TYPES = ("tensor_type", "sequence_type", "sparse_tensor_type")  # that it can write again


class GraphIndex:
    """An index of one graph; build it anew after an edit."""

    def __init__(self, graph: onnx.GraphProto) -> None:
        self.graph = graph
        self.initializers = {tensor.name: tensor for tensor in graph.initializer}
        self.producers = {name: node for node in graph.node for name in node.output if name}
        self.outside = any(map(is_external, graph.initializer))  # where large weights belong
        self.outputs = {value.name for value in graph.output}
        self.inputs = {value.name for value in graph.input} - set(self.initializers)
        self.readers: dict[str, list[onnx.NodeProto]] = {}
        self.reading = [(node, tuple(self.reads(node))) for node in graph.node]  # nodes in order, with what they read
        for node, names in self.reading:
            for name in names:
                self.readers.setdefault(name, []).append(node)

    @cached_property
    def names(self) -> set[str]:
        """The names that a new tensor must not have."""
        made = {name for node in all_nodes(self.graph) for name in node.output}
        return made | {tensor.name for tensor in (*self.graph.initializer, *self.graph.input)}

    def constant(self, name: str) -> np.ndarray[Any, Any] | None:
        """The value of an initialiser, None for anything else."""
        return self.value(name) if name in self.initializers else None

    def value(self, name: str) -> np.ndarray[Any, Any]:
        """The value of what is known to be an initialiser."""
        return values_of(self.initializers[name])

    def only_reader(self, name: str) -> onnx.NodeProto | None:
        """The node that alone reads the tensor, None when several do or the outside does."""
        readers = self.readers.get(name, [])
        return readers[0] if len(readers) == 1 and name not in self.outputs else None

    def downstream(self, tensors: Iterable[str], places: range | None = None) -> tuple[set[str], set[str]]:
        """The tensors and all that depend on them, and the names of the nodes that make these; of some places alone."""
        reached, nodes = set(tensors), set()
        for node, names in self.reading if places is None else self.reading[places.start : places.stop]:
            if not reached.isdisjoint(names):
                nodes.add(node.name)
                reached.update(node.output)
        return reached, nodes

    @staticmethod
    def reads(node: onnx.NodeProto) -> Iterable[str]:
        """Every tensor that the node or one of its subgraphs reads, once."""
        return dict.fromkeys((*(name for name in node.input if name), *GraphIndex.captures(node)))

    @staticmethod
    def captures(node: onnx.NodeProto) -> Iterable[str]:
        """Every tensor that a subgraph of the node reads, those of its own included, once."""
        names: dict[str, None] = {}
        for body in bodies(node):
            names |= dict.fromkeys(name for inner in all_nodes(body) for name in inner.input if name)
            names |= dict.fromkeys(value.name for value in body.output)
        return names


def attributes(node: onnx.NodeProto) -> dict[str, Any]:
    """The node's attributes as Python values."""
    return {attribute.name: onnx.helper.get_attribute_value(attribute) for attribute in node.attribute}


def fresh_name(stem: str, used: Container[str]) -> str:
    """The stem, with a number where something is called that already."""
    name, count = stem, 1
    while name in used:
        count += 1
        name = f"{stem}_{count}"
    return name


def replace_input(
    index: GraphIndex, node: onnx.NodeProto, position: int, value: np.ndarray[Any, Any], stem: str
) -> None:
    """Gives a node a new constant, which the index knows too; the old one may be shared with another node."""
    name = fresh_name(stem, index.names)
    index.names.add(name)
    index.initializers[name] = index.graph.initializer.add()
    refill_tensor(index.initializers[name], value, name, outside=index.outside)
    if len(node.input) > position:
        node.input[position] = name
    else:
        node.input.append(name)


def take_over(index: GraphIndex, node: onnx.NodeProto, follower: onnx.NodeProto) -> None:
    """Makes the result of a node's only reader its own; the reader is still to be dropped."""
    node.output[0] = follower.output[0]
    index.producers[node.output[0]] = node


def drop_nodes(graph: onnx.GraphProto, names: Container[str]) -> None:
    """Requires named nodes; removes those that are called so."""
    for place in reversed(range(len(graph.node))):
        if graph.node[place].name in names:
            del graph.node[place]


def activation_bounds(
    node: onnx.NodeProto | None, value: Callable[[str], np.ndarray[Any, Any] | None]
) -> Bounds | None:
    """The least and the most that a Relu or Clip lets through; None for others, and where a bound is computed."""
    if node is None or node.op_type not in ("Relu", "Clip"):
        return None
    if node.op_type == "Relu":
        return 0.0, np.inf
    least, most = (*node.input, "", "")[1:3]
    low, high = (value(name) if name else np.array(end) for name, end in ((least, -np.inf), (most, np.inf)))
    if low is None or high is None or not low.size == high.size == 1 or low.item() >= high.item():
        return None
    return low.item(), high.item()


def drop_unused_initializers(graph: onnx.GraphProto) -> None:
    """Removes initialisers that nothing reads any more."""
    used = {name for node in graph.node for name in GraphIndex.reads(node)} | {value.name for value in graph.output}
    for place in reversed(range(len(graph.initializer))):  # those that stay are not copied
        if graph.initializer[place].name not in used:
            del graph.initializer[place]


def drop_dead_nodes(graph: onnx.GraphProto) -> None:
    """Removes nodes whose results no output needs."""
    needed, kept = {value.name for value in graph.output}, []
    for node in reversed(graph.node):
        if not needed.isdisjoint(node.output):
            needed.update(GraphIndex.reads(node))
            kept.append(node)
    if len(kept) < len(graph.node):
        refill(graph.node, reversed(kept))


def edit(model: onnx.ModelProto, change: Callable[[gs.Graph], None], *, cleanup: bool = True) -> onnx.ModelProto:
    """A changed copy of the model; its weights never enter the surgeon's graph, whatever their size or type."""
    kept = {tensor.name: tensor for tensor in model.graph.initializer}
    bare = without_weights(model)
    _forget_odd_types(bare.graph)
    graph = gs.import_onnx(bare)
    change(graph)
    if cleanup:
        # Inputs stay, read or not; the surgeon would look for each among all tensors.
        inputs, graph.inputs = graph.inputs, []
        graph.cleanup()
        graph.inputs = inputs
    graph.toposort()
    edited: onnx.ModelProto = gs.export_onnx(graph, do_type_check=False)
    if has_external(model):
        del graph
        gc.collect()  # nodes and tensors name each other, and hold values that are large by now
    _restore(edited, model)
    present = {tensor.name for tensor in edited.graph.initializer}
    for name in sorted(_used(edited) - present):
        if name in kept:
            edited.graph.initializer.add().CopyFrom(kept[name])
    return edited


def _forget_odd_types(graph: onnx.GraphProto) -> None:
    """Types of values in bodies that the surgeon cannot write again, such as optionals, are left to be inferred."""
    for body in (body for node in all_nodes(graph) for body in bodies(node)):
        for value in (*body.input, *body.output, *body.value_info):
            if value.HasField("type") and value.type.WhichOneof("value") not in SURGEON_TYPES:
                value.ClearField("type")


def _used(model: onnx.ModelProto) -> set[str]:
    names = {name for node in all_nodes(model.graph) for name in node.input if name}
    return names | {value.name for value in model.graph.output}


def _restore(edited: onnx.ModelProto, model: onnx.ModelProto) -> None:
    """Puts back what the surgeon's graph does not carry: metadata, versions, exact input and output types."""
    copy_identity(model, edited)
    edited.ir_version = model.ir_version
    refill(edited.opset_import, model.opset_import)
    for values, declared in ((edited.graph.input, model.graph.input), (edited.graph.output, model.graph.output)):
        original = {value.name: value for value in declared}
        for value in values:
            if value.name in original:
                value.CopyFrom(original[value.name])
    edited.graph.name = model.graph.name
    edited.graph.doc_string = model.graph.doc_string
    del edited.graph.value_info[:]  # shapes of what was rewired may be stale
