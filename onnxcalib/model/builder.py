"""One way to add nodes and constants to a graph, whether it is protobuf's or the surgeon's."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt
import onnx
import onnx_graphsurgeon as gs
from onnx import numpy_helper

Array = npt.NDArray[Any]
LONGEST_NAME = 48  # some exporters write hundreds of letters, which every new node would repeat several times
Tensor = TypeVar("Tensor")  # how the graph refers to a tensor: by name, or by the surgeon's object


class NodeBuilder(ABC, Generic[Tensor]):
    """Adds nodes of one output under names that are not taken; equal constants are stored once."""

    def __init__(self, taken: Iterable[str]) -> None:
        self._taken = set(taken)
        self._counts: dict[str, int] = {}
        self._known: dict[tuple[str, tuple[int, ...], bytes], Tensor] = {}

    def node(self, op: str, inputs: Sequence[Tensor], name: str = "", **attributes: Any) -> Tensor:
        """Adds a node, and gives its output."""
        return self._append(op, inputs, self.fresh(name or op.lower()), attributes)

    def constant(self, name: str, value: npt.ArrayLike, *, shared: bool = True) -> Tensor:
        """A constant with that value, named so unless it exists already; one that is not shared never does."""
        array = np.asarray(value, order="C")  # ascontiguousarray would make a scalar a vector
        if not shared:
            return self._store(self.fresh(name), array)
        key = (array.dtype.str, array.shape, array.tobytes())
        if key not in self._known:
            self._known[key] = self._store(self.fresh(name), array)
        return self._known[key]

    def fresh(self, name: str) -> str:
        """The name, the end of it where it is long, or the next one like it that is not taken."""
        name = name[-LONGEST_NAME:]
        candidate, count = name, self._counts.get(name, 1)
        while candidate in self._taken:
            count += 1
            candidate = f"{name}_{count}"
        self._counts[name] = count
        self._taken.add(candidate)
        return candidate

    @abstractmethod
    def _append(self, op: str, inputs: Sequence[Tensor], output: str, attributes: dict[str, Any]) -> Tensor:
        """Adds a node to the graph."""

    @abstractmethod
    def _store(self, name: str, value: Array) -> Tensor:
        """Adds a constant to the graph."""


class ProtoBuilder(NodeBuilder[str]):
    """Collects nodes and initialisers of a protobuf graph."""

    def __init__(self, graph: onnx.GraphProto) -> None:
        super().__init__(value.name for value in (*graph.input, *graph.initializer))
        self._taken.update(name for node in graph.node for name in (node.name, *node.output))
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[onnx.TensorProto] = []

    def _append(self, op: str, inputs: Sequence[str], output: str, attributes: dict[str, Any]) -> str:
        self.nodes.append(onnx.helper.make_node(op, inputs, [output], name=output, **attributes))
        return output

    def _store(self, name: str, value: Array) -> str:
        self.constants.append(numpy_helper.from_array(value, name))
        return name


class SurgeonBuilder(NodeBuilder[gs.Tensor]):
    """Adds nodes to a graph that is being edited."""

    def __init__(self, graph: gs.Graph) -> None:
        # A name inside an If or Loop must not be taken outside either, and a node has the name of what it makes.
        graphs = (graph, *graph.subgraphs(recursive=True))
        super().__init__(name for each in graphs for name in (*each.tensors(), *(node.name for node in each.nodes)))
        self.graph = graph
        self._node_names = {node.name for node in graph.nodes}
        self._numbered = 0

    def into(self, output: gs.Variable, op: str, inputs: Sequence[gs.Tensor], **attributes: Any) -> gs.Variable:
        """Adds a node that makes a given tensor."""
        domain = attributes.pop("domain", None)
        name = self.fresh(output.name) if output.name in self._node_names else output.name
        self._node_names.add(name)
        self.graph.nodes.append(gs.Node(op, name, attributes, list(inputs), [output], domain=domain))
        return output

    def short(self, op: str, inputs: Sequence[gs.Tensor], **attributes: Any) -> gs.Variable:
        """Adds a node under a short name: names are a good part of a small file."""
        self._numbered += 1
        return self.node(op, inputs, f"u{self._numbered}", **attributes)

    def _append(self, op: str, inputs: Sequence[gs.Tensor], output: str, attributes: dict[str, Any]) -> gs.Variable:
        return self.into(gs.Variable(output), op, inputs, **attributes)

    def _store(self, name: str, value: Array) -> gs.Constant:
        return gs.Constant(name, value)
