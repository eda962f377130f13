"""One backward step: what a rule sees of its node, and where it leaves the gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import onnx

from onnxcalib.autodiff.writer import Array, NoRuleError, Shape, Writer
from onnxcalib.model.graph import attributes


@dataclass(frozen=True)
class Gradient:
    """A gradient tensor; a small one has the rank-aligned shape of a broadcast value instead of the full shape."""

    name: str
    small: bool = False


@dataclass
class Step:
    """A node of the forward graph, the gradients of its outputs, and the inputs that want one."""

    node: onnx.NodeProto
    writer: Writer
    grad_outputs: list[Gradient | None]
    needs_grad: frozenset[int]
    grad_inputs: dict[int, Gradient] = field(default_factory=dict)

    @property
    def x(self) -> str:
        """The first input."""
        return str(self.node.input[0])

    @property
    def y(self) -> str:
        """The first output."""
        return str(self.node.output[0])

    @property
    def small_dy(self) -> Gradient:
        """The gradient of the first output, perhaps still to be broadcast."""
        first = self.grad_outputs[0]
        if first is None:
            raise NoRuleError("only the gradient of its first output has a rule")
        return first

    @property
    def dy(self) -> str:
        """The gradient of the first output, in its full shape."""
        name = full(self.writer, self.small_dy, self.y)
        self.grad_outputs[0] = Gradient(name)
        return name

    def input(self, index: int) -> str:
        """An input's name, empty where it is left out."""
        return str(self.node.input[index]) if index < len(self.node.input) else ""

    def output(self, index: int) -> str:
        """An output's name; one that was left out is added to the node."""
        while len(self.node.output) <= index:
            self.node.output.append("")
        if not self.node.output[index]:
            self.node.output[index] = self.writer.fresh(f"{self.y}:output{index}")
        return str(self.node.output[index])

    def attribute(self, name: str, default: Any) -> Any:
        """An attribute's value, as text where it is bytes."""
        value = attributes(self.node).get(name, default)
        return value.decode() if isinstance(value, bytes) else value

    def shape(self, name: str) -> Shape:
        """What is known of a tensor's shape."""
        return self.writer.facts.shape(name)

    def known_rank(self, name: str) -> int:
        """The rank of a tensor, which the rule cannot do without."""
        shape = self.shape(name)
        if shape is None:
            raise NoRuleError(f"the rank of '{name}' is unknown")
        return len(shape)

    def known_dims(self, name: str, start: int = 0) -> tuple[int, ...]:
        """The sizes of a tensor from an axis on, which the rule cannot do without."""
        sizes = (self.shape(name) or ())[start:]
        known = tuple(dim for dim in sizes if isinstance(dim, int))
        if self.shape(name) is None or len(known) < len(sizes):
            raise NoRuleError(f"the sizes of '{name}' must be fixed")
        return known

    def known_value(self, name: str) -> Array:
        """The value of a constant input, which the rule cannot do without."""
        value = self.writer.facts.value(name)
        if value is None:
            raise NoRuleError(f"'{name}' must be a constant")
        return value

    def grad_input(self, index: int, name: str, *, small: bool = False) -> None:
        """Leaves the gradient of an input."""
        self.grad_inputs[index] = Gradient(name, small)

    def grad_input_summed(self, index: int, name: str) -> None:
        """Leaves a gradient of the output's shape after summing it to the shape of a broadcast input."""
        self.grad_input(index, self.writer.sum_to(name, self.shape(self.y), self.input(index)))

    def only(self, *indices: int) -> None:
        """Refuses gradients of other inputs than these."""
        for index in sorted(self.needs_grad - set(indices)):
            raise NoRuleError(f"there is no gradient for its input '{self.input(index)}'")


Rule = Callable[[Step], None]


def sloped(slope: Callable[[Step], str]) -> Rule:
    """A rule from a function that writes the slope, which has the shape of the input."""

    def rule(step: Step) -> None:
        step.only(0)
        step.grad_input(0, step.writer.op("Mul", step.small_dy.name, slope(step)))

    return rule


def full(writer: Writer, gradient: Gradient, tensor: str) -> str:
    """The gradient in the full shape of its tensor."""
    if not gradient.small:
        return gradient.name
    shape = writer.facts.shape(tensor)
    free = shape is None or any(not isinstance(dim, int) for dim in shape)
    return writer.op("Expand", gradient.name, writer.op("Shape", tensor) if free else writer.shape_of(tensor))
