"""A MatMul of more than two axes and its bias as Reshape, Gemm and Reshape: the form whose bias runtimes take in."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import onnx_graphsurgeon as gs

from onnxcalib.model.builder import SurgeonBuilder

Shapes = Mapping[str, tuple[int | None, ...]]
SIZE_OPS = ("Shape", "Gather", "Slice", "Unsqueeze", "Squeeze", "Cast", "Identity")


class GemmForm:
    """Writes such layers; what several of them read is made a matrix once."""

    def __init__(self, build: SurgeonBuilder, shapes: Callable[[], Shapes]) -> None:
        self.build, self._shapes = build, shapes
        self._matrices: dict[str, gs.Variable] = {}
        self._sizes: dict[str, gs.Variable] = {}
        self._inferred: Shapes | None = None
        self.declared: dict[str, list[int | str]] = {}  # by tensor: what cannot be inferred from computed sizes

    def write(self, node: gs.Node, add: gs.Node, bias: gs.Tensor, sizes: tuple[int, ...]) -> None:
        """Requires a MatMul of known axes that reads a dequantizer and a weight of these sizes, and its bias's Add."""
        dequantizer, weight, summed = node.inputs[0].inputs[0], node.inputs[1], add.outputs[0]
        rows = gs.Variable(self.build.fresh(f"{summed.name}_rows"))
        add.inputs, add.outputs = [], []
        node.op, node.inputs, node.outputs = "Gemm", [self._matrix(dequantizer, sizes[0]), weight, bias], [rows]
        reader = summed.outputs[0] if len(summed.outputs) == 1 else None
        if reader is not None and reader.op == "Reshape" and summed is reader.inputs[0] and _has_no_zero(reader):
            reader.inputs[0] = rows
            return
        known = self._known(summed.name)
        assert known is not None
        if known.count(None) <= 1:
            given = np.array([-1 if size is None else size for size in known], np.int64)
            shape = self.build.constant(f"{summed.name}_shape", given)
        else:
            last = self.build.constant(f"size_{sizes[1]}", np.array([sizes[1]], np.int64))
            shape = self.build.node("Concat", [self._leading(dequantizer), last], f"{summed.name}_shape", axis=0)
            free = (f"{summed.name}_{place}" for place in range(len(known)))
            self.declared[summed.name] = [size or name for name, size in zip(free, known, strict=True)]
        self.build.into(summed, "Reshape", [rows, shape])

    def knows(self, tensor: str) -> bool:
        """Whether a tensor's axes are known; else a runtime might infer others behind a Reshape to computed sizes."""
        return self._known(tensor) is not None

    def _known(self, tensor: str) -> tuple[int | None, ...] | None:
        if self._inferred is None:
            self._inferred = self._shapes()
        return self._inferred.get(tensor)

    def _matrix(self, dequantizer: gs.Node, columns: int) -> gs.Variable:
        """The integers as a matrix, and dequantized then: a layer reads a dequantizer in this form too."""
        name = dequantizer.outputs[0].name
        if name not in self._matrices:
            shape = self.build.constant(f"rows_of_{columns}", np.array([-1, columns], np.int64))
            integers = self.build.node("Reshape", [dequantizer.inputs[0], shape], f"{name}_rows")
            self._matrices[name] = self.build.node(
                "DequantizeLinear", [integers, *dequantizer.inputs[1:]], f"{name}_2d"
            )
        return self._matrices[name]

    def _leading(self, dequantizer: gs.Node) -> gs.Variable:
        """All sizes but the last; of the integers, for a second reader of the floats would keep these float."""
        integers = dequantizer.inputs[0]
        if integers.name not in self._sizes:
            begin, end = (
                self.build.constant(name, np.array([at], np.int64)) for name, at in (("begin", 0), ("last", -1))
            )
            sizes = self.build.node("Shape", [integers], f"{integers.name}_sizes")
            self._sizes[integers.name] = self.build.node("Slice", [sizes, begin, end], f"{integers.name}_leading")
        return self._sizes[integers.name]


def _has_no_zero(reshape: gs.Node) -> bool:
    """Whether a Reshape names all sizes itself: a zero would copy one of a tensor with more axes than a matrix has."""
    shape = reshape.inputs[1]
    if isinstance(shape, gs.Constant):
        return bool(shape.values.all())
    maker = shape.inputs[0] if shape.inputs else None
    return maker is not None and maker.op == "Concat" and all(_is_size(part) for part in maker.inputs)


def _is_size(tensor: gs.Tensor) -> bool:
    """Whether sizes are constants other than zero, or taken from a Shape."""
    if isinstance(tensor, gs.Constant):
        return bool(tensor.values.all())
    while tensor.inputs and tensor.inputs[0].op in SIZE_OPS:
        if tensor.inputs[0].op == "Shape":
            return True
        tensor = tensor.inputs[0].inputs[0]
    return False
