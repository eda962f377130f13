"""Large float constants beside the weights of layers, wherever they lie, and what the nodes do that read them."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import onnx
from onnx import TensorProto

from onnxcalib.model.graph import attributes
from onnxcalib.model.walk import all_nodes, bodies

LEAST = 1024  # elements; below, scales and nodes weigh as much as int8 saves

# Inputs that are multiplied with activations and added up, or looked up row by row.
WEIGHT_INPUTS: Mapping[str, Collection[int]] = {
    "Conv": (1,), "ConvTranspose": (1,), "Gemm": (0, 1), "MatMul": (0, 1), "Einsum": (0, 1), "LSTM": (1, 2),
    "GRU": (1, 2), "RNN": (1, 2), "Gather": (0,),
}  # fmt: skip
# Ops that only move values: what reads their results reads the constant.
MOVING_OPS = (
    "Identity", "Transpose", "Reshape", "Squeeze", "Unsqueeze", "Flatten", "Slice", "Concat", "Split", "Expand", "Tile",
)  # fmt: skip
LOOPS = {"Loop": 2, "Scan": 0}  # by op: how many of its inputs its states come after


@dataclass(frozen=True)
class Use:
    """A node that computes with a constant, and the place where it reads it."""

    node: onnx.NodeProto
    place: int
    moved: bool  # past other ops: the axes of the constant may be others there


@dataclass(frozen=True)
class LargeConstant:
    """A float constant of some size."""

    tensor: onnx.TensorProto
    uses: tuple[Use, ...]

    @property
    def is_weight(self) -> bool:
        """Whether all that is done with it is what is done with weights."""
        return all(use.place in WEIGHT_INPUTS.get(use.node.op_type, ()) and not use.node.domain for use in self.uses)

    @property
    def axis(self) -> int | None:
        """The axis of output channels, or the one that rows are looked up on; None where another may be better."""
        axes = {None if use.moved else _axis(use, len(self.tensor.dims)) for use in self.uses}
        return axes.pop() if len(axes) == 1 else None

    @property
    def op(self) -> str:
        """The ops that compute with it."""
        return ", ".join(sorted({use.node.op_type for use in self.uses}))


def large_constants(graph: onnx.GraphProto, *, inner: bool = True) -> Iterator[LargeConstant]:
    """Those of a graph and of the graphs within its nodes, in their order; none that is an output."""
    uses, outputs = _Uses(graph), {value.name for value in graph.output}
    for tensor in graph.initializer:
        if tensor.data_type == TensorProto.FLOAT and math.prod(tensor.dims) >= LEAST and tensor.name not in outputs:
            found = tuple(uses.of(tensor.name))
            if found:
                yield LargeConstant(tensor, found)
    for body in (body for node in graph.node for body in bodies(node) if inner):
        yield from large_constants(body)


class _Uses:
    """Who reads a tensor in a graph, or in one within it."""

    def __init__(self, graph: onnx.GraphProto) -> None:
        self.readers: dict[str, list[tuple[onnx.NodeProto, int]]] = {}
        for node in (node for node in all_nodes(graph) if node.op_type not in ("Shape", "Size")):  # these read no value
            for place, name in enumerate(node.input):
                self.readers.setdefault(name, []).append((node, place))

    def of(self, name: str) -> Iterator[Use]:
        """The nodes that compute with the tensor, past those that only move its values, and into loops."""
        seen, todo = {name}, [(name, False)]
        while todo:
            tensor, moved = todo.pop()
            for node, place in self.readers.get(tensor, ()):
                further = dict.fromkeys(_passed_on(node, place), moved or node.op_type != "Loop")
                if not further:
                    yield Use(node, place, moved)
                todo += [(more, turned) for more, turned in further.items() if more not in seen]
                seen.update(further)


def _passed_on(node: onnx.NodeProto, place: int) -> list[str]:
    """What the tensor that a node reads there is called behind it."""
    if node.op_type in MOVING_OPS and not node.domain:
        return [name for name in node.output if name]
    states = LOOPS.get(node.op_type)
    if states is None or node.domain or place < states:
        return []
    (body,) = bodies(node)
    after = [node.output[place - states]] if place - states < len(node.output) and len(body.input) > place else []
    return [*(value.name for value in body.input[place : place + 1]), *(name for name in after if name)]


def _axis(use: Use, rank: int) -> int | None:
    node, values = use.node, attributes(use.node)
    if node.op_type == "Gather":
        axis: Any = values.get("axis", 0)
        return int(axis) % rank
    if node.op_type == "ConvTranspose":
        return 1 if values.get("group", 1) == 1 else None
    if node.op_type == "Gemm":
        return int(not values.get("transB", 0)) if use.place else int(values.get("transA", 0))
    if node.op_type == "MatMul":
        return (rank - 1 if use.place else rank - 2) if rank > 1 else None
    return 0 if node.op_type == "Conv" else None
