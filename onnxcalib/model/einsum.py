"""Einsums that are matrix products, as MatMul with Transposes and Reshapes around it, which has integer kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import helper

from onnxcalib.model.graph import GraphIndex, attributes, drop_unused_initializers, fresh_name, replace_input
from onnxcalib.model.walk import refill

REST = "*"  # what stands for the axes of an ellipsis, which are the first ones of the left operand and of the result


@dataclass(frozen=True)
class _Axes:
    """The letters of two operands and their product, by what becomes of them."""

    left: str
    right: str
    result: str
    batch: str  # of both operands and of the result
    rows: str  # of the left operand and of the result
    summed: str
    columns: str  # of the right operand and of the result


def einsums_to_matmuls(graph: onnx.GraphProto) -> None:
    """Requires named nodes; rewrites an Einsum of two operands whose axes are rows, columns, summed, or in all."""
    index = GraphIndex(graph)
    nodes: list[onnx.NodeProto] = []
    for node in graph.node:
        axes = _axes(node) if node.op_type == "Einsum" and not node.domain else None
        written = None if axes is None else _Writer(index, node, axes).write()
        nodes += [node] if written is None else written
    if len(nodes) != len(graph.node) or any(a is not b for a, b in zip(nodes, graph.node, strict=False)):
        refill(graph.node, nodes)
        drop_unused_initializers(graph)


def _axes(node: onnx.NodeProto) -> _Axes | None:
    """The axes of the equation; None for what is no product of two matrices, or of stacks of them."""
    equation = attributes(node)["equation"].decode().replace(" ", "").replace("...", REST)
    operands, arrow, result = equation.partition("->")
    left, comma, right = operands.partition(",")
    if not (arrow and comma) or any(len(set(each)) != len(each) for each in (left, right, result)) or "," in right:
        return None
    if REST in right or (REST in left and not (left.startswith(REST) and result.startswith(REST))):
        return None
    both = [letter for letter in left if letter in right]
    batch = "".join(letter for letter in both if letter in result)
    summed = "".join(letter for letter in both if letter not in result)
    rows = "".join(letter for letter in left if letter not in right)
    columns = "".join(letter for letter in right if letter not in left)
    complete = set(result) == {*batch, *rows, *columns}
    return _Axes(left, right, result, batch, rows, summed, columns) if complete and summed and columns else None


class _Writer:
    """The nodes of one product."""

    def __init__(self, index: GraphIndex, node: onnx.NodeProto, axes: _Axes) -> None:
        self.index, self.node, self.axes = index, node, axes
        self.nodes: list[onnx.NodeProto] = []

    def write(self) -> list[onnx.NodeProto] | None:
        """None where sizes would be needed that the graph does not tell."""
        axes, weight = self.axes, self.index.constant(self.node.input[1])
        if weight is not None and not axes.batch:
            return self._layer(weight)
        if REST in axes.left or not (len(axes.rows) == len(axes.summed) == len(axes.columns) == 1):
            return None
        left = self._turned(self.node.input[0], axes.left, axes.batch + axes.rows + axes.summed)
        right = self._turned(self.node.input[1], axes.right, axes.batch + axes.summed + axes.columns)
        return self._finish([left, right], axes.batch + axes.rows + axes.columns)

    def _layer(self, weight: npt.NDArray[Any]) -> list[onnx.NodeProto] | None:
        """A product with a constant: its axes are put in order now, and several that are summed become one."""
        axes, sizes = self.axes, dict(zip(self.axes.right, weight.shape, strict=False))
        if weight.ndim != len(axes.right) or (REST in axes.rows and (len(axes.summed), len(axes.columns)) != (1, 1)):
            return None
        order = [axes.right.index(letter) for letter in axes.summed + axes.columns]
        inner = int(np.prod([sizes[letter] for letter in axes.summed]))
        matrix = np.ascontiguousarray(weight.transpose(order).reshape(inner, -1))
        left = self._turned(self.node.input[0], axes.left, axes.rows + axes.summed)
        if len(axes.summed) > 1:
            left = self._reshaped(left, [*[0] * len(axes.rows), inner], "flat")
        holder = onnx.NodeProto()
        replace_input(self.index, holder, 0, matrix, f"{self.node.name}_weight")
        ends = [sizes[letter] for letter in axes.columns]
        return self._finish([left, holder.input[0]], axes.rows + axes.columns, ends if len(ends) > 1 else None)

    def _finish(self, operands: Sequence[str], made: str, ends: Sequence[int] | None = None) -> list[onnx.NodeProto]:
        """The product, which keeps the name of the Einsum, with its last axes taken apart, and in their order."""
        plain = made == self.axes.result
        product = self.node.output[0] if plain and ends is None else self._new("product")
        self.nodes.append(helper.make_node("MatMul", operands, [product], self.node.name))
        if ends is not None:
            kept = [0] * len(self.axes.batch + self.axes.rows)
            product = self._reshaped(product, [*kept, *ends], "apart", self.node.output[0] if plain else None)
        if not plain:
            self._turned(product, made, self.axes.result, self.node.output[0])
        return self.nodes

    def _turned(self, tensor: str, now: str, wanted: str, output: str | None = None) -> str:
        if now == wanted and output is None:
            return tensor
        made = output or self._new("turned")
        perm = [now.index(letter) for letter in wanted]
        self.nodes.append(helper.make_node("Transpose", [tensor], [made], self._name(made), perm=perm))
        return made

    def _reshaped(self, tensor: str, sizes: Sequence[int], word: str, output: str | None = None) -> str:
        made = output or self._new(word)
        reshape = helper.make_node("Reshape", [tensor], [made], self._name(made))
        replace_input(self.index, reshape, 1, np.array(sizes, np.int64), f"{made}_shape")
        self.nodes.append(reshape)
        return made

    def _new(self, word: str) -> str:
        name = fresh_name(f"{self.node.output[0]}_{word}", self.index.names)
        self.index.names.add(name)
        return name

    def _name(self, output: str) -> str:
        return (
            f"{self.node.name}_{output.rpartition('_')[2]}"
            if output != self.node.output[0]
            else f"{self.node.name}_end"
        )
