"""Writes gradient nodes: fresh names, shared constants, and what is known of the tensors of the graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import numpy_helper

from onnxcalib.model.builder import ProtoBuilder
from onnxcalib.model.external import values_of
from onnxcalib.model.graph import attributes
from onnxcalib.model.io import opset_of
from onnxcalib.model.shapes import inferred

Dim = int | str | None
Shape = tuple[Dim, ...] | None
Array = npt.NDArray[Any]
Operand = str | float

FLOATS = (onnx.TensorProto.FLOAT, onnx.TensorProto.DOUBLE, onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16)


class NoRuleError(Exception):
    """A rule does not cover a node; the text says why."""


@dataclass(frozen=True)
class Facts:
    """Shapes, element types and constant values of a graph's tensors."""

    shapes: dict[str, tuple[Dim, ...]]
    types: dict[str, int]
    constants: dict[str, onnx.TensorProto]
    opset: int

    @classmethod
    def of(cls, model: onnx.ModelProto, batch: int | None = None) -> Facts:
        """What shape inference knows, with a free batch of a size if one is given."""
        constants = {tensor.name: tensor for tensor in model.graph.initializer}
        for node in model.graph.node:
            if node.op_type == "Constant" and "value" in attributes(node):
                constants[node.output[0]] = attributes(node)["value"]
        shapes: dict[str, tuple[Dim, ...]] = {name: tuple(tensor.dims) for name, tensor in constants.items()}
        types = {name: tensor.data_type for name, tensor in constants.items()}
        for value in inferred(model, batch):
            kind = value.type.tensor_type
            types[value.name] = kind.elem_type
            if kind.HasField("shape"):
                shapes[value.name] = tuple(_dim(dim) for dim in kind.shape.dim)
        return cls(shapes, types, constants, opset_of(model))

    def shape(self, name: str) -> Shape:
        """The shape of a tensor, None where even its rank is unknown."""
        return self.shapes.get(name)

    def value(self, name: str) -> Array | None:
        """The value of a constant, None for anything else."""
        tensor = self.constants.get(name)
        return None if tensor is None else values_of(tensor)

    def same_shape(self, first: str, second: str) -> bool:
        """Whether two tensors surely have the same shape."""
        shapes = self.shape(first), self.shape(second)
        return first == second or (shapes[0] is not None and shapes[0] == shapes[1] and None not in shapes[0])

    def carries_gradient(self, name: str) -> bool:
        """Whether a tensor can have a gradient: integers and truth values have none."""
        return self.types.get(name, onnx.TensorProto.FLOAT) in (*FLOATS, onnx.TensorProto.UNDEFINED)


def _dim(dim: onnx.TensorShapeProto.Dimension) -> Dim:
    return dim.dim_value if dim.HasField("dim_value") else dim.dim_param or None


class Writer(ProtoBuilder):
    """Collects nodes and constants for a graph, with what is known of its tensors."""

    def __init__(self, graph: onnx.GraphProto, facts: Facts) -> None:
        super().__init__(graph)
        self.facts = facts

    def op(self, op_type: str, *inputs: Operand, output: str = "", **settings: Any) -> str:
        """Adds a node of one output and names that output; numbers become float constants."""
        names = [item if isinstance(item, str) else self.number(item) for item in inputs]
        return self._append(op_type, names, output or self.fresh(f"gradient:{op_type}"), settings)

    def array(self, value: Array) -> str:
        """The name of a constant."""
        return self.constant("gradient:constant", value)

    def number(self, value: float) -> str:
        """A float constant of rank 0."""
        return self.array(np.array(value, np.float32))

    def integers(self, values: Sequence[int]) -> str:
        """A list of integers, as shapes and axes are given."""
        return self.array(np.array(list(values), np.int64))

    def reshape(self, name: str, shape: Sequence[int]) -> str:
        """The tensor in another shape; 0 keeps a size, -1 takes the rest."""
        return self.op("Reshape", name, self.integers(shape))

    def shape_of(self, name: str) -> str:
        """The shape of a tensor of the graph, as a constant where at most one size is free."""
        shape = self.facts.shape(name)
        if shape is None or sum(not isinstance(dim, int) for dim in shape) > 1 or 0 in shape:
            return self.op("Shape", name)
        return self.integers([dim if isinstance(dim, int) else -1 for dim in shape])

    def reshape_like(self, name: str, tensor: str) -> str:
        """The values in the shape of a tensor of the graph."""
        return self.op("Reshape", name, self.shape_of(tensor))

    def reduce_sum(self, name: str, axes: Sequence[int], *, keep: bool = False) -> str:
        """The sum over the axes."""
        return self.op("ReduceSum", name, self.integers(axes), keepdims=int(keep))

    def reduce_mean(self, name: str, axes: Sequence[int]) -> str:
        """The mean over the axes, which stay with size one."""
        if self.facts.opset < 18:
            return self.op("ReduceMean", name, axes=list(axes), keepdims=1)
        return self.op("ReduceMean", name, self.integers(axes), keepdims=1)

    def sum_all(self, name: str) -> str:
        """The sum of all values, of rank 0."""
        return self.op("ReduceSum", name, keepdims=0)

    def transposed(self, name: str, rank: int) -> str:
        """The last two axes swapped; the runtime takes this into the product that follows."""
        return self.op("Transpose", name, perm=[*range(rank - 2), rank - 1, rank - 2])

    def dots(self, first: str, second: str, rows: int = 0) -> str:
        """The inner products of the rows of two tensors; rows is their number, 0 that of the first axis."""
        # A product with a turned row reads each tensor once; Mul and ReduceSum would write the product too.
        left, right = (self.reshape(name, (rows, 1, -1)) for name in (first, second))
        return self.op("MatMul", left, self.transposed(right, 3))

    def mask(self, comparison: str, first: Operand, second: Operand) -> str:
        """One where the comparison holds, else zero; faster than Where, whose kernel has one thread."""
        return self.op("Cast", self.op(comparison, first, second), to=onnx.TensorProto.FLOAT)

    def only_if(self, condition: str, write: Callable[[], str]) -> str:
        """The number that the function writes, computed only where the condition holds; else zero."""
        outside, branches = self.nodes, {}
        for branch, make in (("then_branch", write), ("else_branch", lambda: self.op("Identity", 0.0))):
            self.nodes = []
            output = onnx.helper.make_tensor_value_info(make(), onnx.TensorProto.FLOAT, [])
            branches[branch] = onnx.helper.make_graph(self.nodes, branch, [], [output])
        self.nodes = outside
        return self.op("If", condition, **branches)

    def sum_to(self, name: str, shape: Shape, operand: str) -> str:
        """Sums a gradient of the given shape over the axes along which the operand was broadcast."""
        target = self.facts.shape(operand)
        if shape is None or target is None or not _comparable(shape, target):
            return self._sum_at_run_time(name, operand)
        extra = len(shape) - len(target)
        inner = [axis for axis, dim in enumerate(target, extra) if dim == 1 and shape[axis] != 1]
        if not inner:
            return self.reduce_sum(name, range(extra)) if extra else name
        summed = self.reduce_sum(name, [*range(extra), *inner], keep=True)
        return self.op("Squeeze", summed, self.integers(range(extra))) if extra else summed

    def _sum_at_run_time(self, name: str, operand: str) -> str:
        shape, target, one = self.op("Shape", name), self.op("Shape", operand), self.integers([1])
        missing = self.op("Sub", self.op("Shape", shape), self.op("Shape", target))
        ones = self.op("ConstantOfShape", missing, value=numpy_helper.from_array(np.array([1], np.int64)))
        stretched = self.op("Equal", self.op("Concat", ones, target, axis=0), one)
        axes = self.reshape(self.op("NonZero", stretched), (-1,))
        summed = self.op("ReduceSum", name, axes, keepdims=1, noop_with_empty_axes=1)
        return self.op("Reshape", summed, target)


def _comparable(shape: tuple[Dim, ...], target: tuple[Dim, ...]) -> bool:
    """Whether the broadcast axes are known: a free size must meet itself, or it may stand for one."""
    pairs = zip(shape[len(shape) - len(target) :], target, strict=True)
    return all(isinstance(dim, int) or (dim is not None and dim == full) for full, dim in pairs)
