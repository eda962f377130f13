"""A graph under construction: tensors of known shapes, constants in all the forms that exporters write."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from numpy.random import Generator
from onnx import TensorProto, helper, numpy_helper

Shape = tuple[int | None, ...]  # None: the batch, which only the first axis is

ODD_NAMES = (
    "features[relu]/conv",
    "$x",
    "a b",
    "=1+1",
    "[/x]",
    "\u00fc\u4e2d",
    "a/b:0",
    "%s{}",
    "\x1b[31m",
    "'\"",
    "-",
)
TYPES = {np.dtype(np.float32): TensorProto.FLOAT, np.dtype(np.float16): TensorProto.FLOAT16}


@dataclass(frozen=True)
class Tensor:
    """A computed tensor of the graph's float type, or an integer one that a Gather may read."""

    name: str
    shape: Shape

    @property
    def rank(self) -> int:
        return len(self.shape)

    @property
    def inner(self) -> tuple[int, ...]:
        """The shape without the batch."""
        return tuple(size for size in self.shape[1:] if size is not None)


@dataclass
class Builder:
    """Nodes and constants so far, and all that can be read."""

    rng: Generator
    opset: int
    dtype: np.dtype[Any]
    tensors: list[Tensor] = field(default_factory=list)
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    initializers: list[onnx.TensorProto] = field(default_factory=list)
    inputs: list[onnx.ValueInfoProto] = field(default_factory=list)
    functions: list[onnx.FunctionProto] = field(default_factory=list)
    weights: dict[tuple[int, ...], list[str]] = field(default_factory=dict)  # to be shared
    integers: list[tuple[str, tuple[int | None, ...]]] = field(default_factory=list)  # integer tensors, for outputs
    loose: list[Tensor] = field(default_factory=list)  # for outputs: how many rows they have depends on values
    mask: tuple[str, int] | None = None  # an integer input of ones, then zeros, and how many steps it has
    noisy: bool = False  # whether an op may make much of small differences
    prefix: str = ""
    plain_names: bool = True
    twice: bool = False  # whether nodes may share a name, which only older runtimes load
    count: list[int] = field(default_factory=lambda: [0])

    @property
    def float_type(self) -> int:
        return TYPES[self.dtype]

    def chance(self, probability: float) -> bool:
        return bool(self.rng.random() < probability)

    def choose(self, items: Sequence[Any]) -> Any:
        return items[int(self.rng.integers(len(items)))]

    def between(self, low: int, high: int) -> int:
        """A number from low to high, both included."""
        return int(self.rng.integers(low, high + 1))

    def fresh(self, stem: str = "t") -> str:
        self.count[0] += 1
        odd = self.choose(ODD_NAMES) if not self.plain_names and self.chance(0.2) else ""
        return f"{self.prefix}{stem}{odd}{self.count[0]}"

    def add_input(self, name: str, kind: int, sizes: Sequence[int | str]) -> None:
        self.inputs.append(helper.make_tensor_value_info(name, kind, sizes))

    def pick(self, fits: Callable[[Tensor], bool]) -> Tensor | None:
        """A tensor that fits, later ones more often."""
        fitting = [tensor for tensor in self.tensors if fits(tensor)]
        if not fitting:
            return None
        return fitting[max(self.between(0, len(fitting) - 1) for _ in range(2))]

    def node(self, op: str, inputs: Sequence[str], outputs: int = 1, **attributes: Any) -> list[str]:
        """Adds a node; gives the names of its outputs."""
        names = [self.fresh(op.lower()[:6]) for _ in range(outputs)]
        self.append(op, inputs, names, **attributes)
        return names

    def append(self, op: str, inputs: Sequence[str], outputs: Sequence[str], **attributes: Any) -> None:
        node = helper.make_node(op, list(inputs), list(outputs), **attributes)
        node.name = self.node_name(op)
        self.nodes.append(node)

    def node_name(self, op: str) -> str:
        if self.plain_names:
            return f"{self.prefix}{op}_{len(self.nodes)}"
        kind = self.rng.random()
        if kind < 0.3:
            return ""
        if kind < 0.5 and self.twice:
            return op  # the same as others
        return f"{self.prefix}{self.choose(ODD_NAMES)}{len(self.nodes)}"

    def add(self, op: str, inputs: Sequence[str], shape: Shape, **attributes: Any) -> Tensor:
        """Adds a node with one float output, which others may read."""
        tensor = Tensor(self.node(op, inputs, **attributes)[0], shape)
        self.tensors.append(tensor)
        return tensor

    def silent(self, op: str, inputs: Sequence[str], **attributes: Any) -> str:
        """Adds a node whose output only the caller reads."""
        return self.node(op, inputs, **attributes)[0]

    def constant(self, value: np.ndarray | Sequence[int] | float, stem: str = "c") -> str:
        """A constant as an initializer, a Constant node, an initializer that is an input too, or behind an Identity."""
        array = np.asarray(value, np.int64 if isinstance(value, list | tuple) else None)
        if isinstance(value, float):
            array = np.asarray(value, self.dtype)
        name, kind = self.fresh(stem), self.rng.random()
        tensor = numpy_helper.from_array(array, name)
        if kind < 0.1 and array.dtype == np.float32 and array.size:
            tensor = helper.make_tensor(name, TensorProto.FLOAT, array.shape, array.reshape(-1).tolist())
        if kind < 0.25:
            self.append("Constant", [], [name], value=tensor)
            return name
        self.initializers.append(tensor)
        if kind < 0.35 and not self.prefix:
            self.inputs.append(helper.make_tensor_value_info(name, tensor.data_type, array.shape))
        if 0.35 <= kind < 0.4:
            return self.silent("Identity", [name])
        return name

    def fixed(self, value: float) -> str:
        """A scalar that no caller may set: of such ones onnxruntime's own fusions do not read the value."""
        self.initializers.append(numpy_helper.from_array(np.asarray(value, self.dtype), self.fresh("c")))
        return str(self.initializers[-1].name)

    def floats(self, *shape: int, scale: float = 1.0, offset: float = 0.0) -> np.ndarray:
        return (self.rng.standard_normal(shape) * scale + offset).astype(self.dtype)

    def weight(self, *shape: int, fan_in: int) -> str:
        """A weight, perhaps one that another layer has already."""
        shared = self.weights.setdefault(shape, [])
        if shared and self.chance(0.5):
            return self.choose(shared)
        value = self._odd(self.floats(*shape, scale=float(1 / np.sqrt(max(fan_in, 1)))))
        if len(shape) == 2 and self.chance(0.1):
            return self.silent("Transpose", [self.constant(np.ascontiguousarray(value.T), "w")], perm=[1, 0])
        shared.append(self.constant(value, "w"))
        return shared[-1]

    def _odd(self, value: np.ndarray) -> np.ndarray:
        """Sometimes a channel, or all, of zeros, of one value, tiny, or with an outlier."""
        kind = self.rng.random()
        if kind < 0.05:
            value[self.between(0, len(value) - 1)] = 0
        elif kind < 0.07:
            value[:] = self.choose([0, 0.25])
        elif kind < 0.09:
            value *= value.dtype.type(1e-6 if value.dtype == np.float32 else 1e-3)
        elif kind < 0.11:
            value.reshape(-1)[0] = 8
            self.noisy = True
        return value

    def axes(self, op_inputs: list[str], axes: list[int], since: int) -> dict[str, Any]:
        """Axes as an attribute before an opset, as an input from it on; gives the attributes."""
        if self.opset < since:
            return {"axes": axes}
        op_inputs.append(self.constant(axes, "axes"))
        return {}
