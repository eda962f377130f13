"""Gradient rules of arithmetic, element by element, with broadcasting."""

from __future__ import annotations

import numpy as np
import onnx

from onnxcalib.autodiff.standard.step import Rule, Step, sloped
from onnxcalib.autodiff.writer import FLOATS, NoRuleError


def _pass(step: Step) -> None:
    """The gradient as it is; so rounding is straight-through."""
    step.only(0)
    step.grad_input(0, step.small_dy.name, small=step.small_dy.small)


def _add(step: Step) -> None:
    """Sub too: what it takes away gets the gradient negated, after the sum, where it is small."""
    write = step.writer
    for index in sorted(step.needs_grad):
        if write.facts.same_shape(step.input(index), step.y):
            name, small = step.small_dy.name, step.small_dy.small
        else:
            name, small = write.sum_to(step.dy, step.shape(step.y), step.input(index)), False
        negated = step.node.op_type == "Sub" and index == 1
        step.grad_input(index, write.op("Neg", name) if negated else name, small=small)


def _mul(step: Step) -> None:
    write = step.writer
    first, second = step.node.input
    if first == second:
        step.grad_input(0, write.op("Mul", write.op("Mul", step.small_dy.name, 2.0), first))
        return
    for index in sorted(step.needs_grad):
        _give_product(step, index, step.input(1 - index))


def _give_product(step: Step, index: int, other: str) -> None:
    write = step.writer
    fits = write.facts.same_shape(other, step.y)
    if fits and step.shape(step.input(index)) == () and step.known_rank(other) > 1 and not step.small_dy.small:
        step.grad_input(index, write.sum_all(write.dots(step.dy, other)))
        return
    step.grad_input_summed(index, write.op("Mul", step.small_dy.name if fits else step.dy, other))


def _div(step: Step) -> None:
    write = step.writer
    quotient = write.op("Div", step.dy, step.input(1))
    if 0 in step.needs_grad:
        step.grad_input_summed(0, quotient)
    if 1 in step.needs_grad:
        summed = write.sum_to(write.op("Mul", quotient, step.y), step.shape(step.y), step.input(1))
        step.grad_input(1, write.op("Neg", summed))


def _neg(step: Step) -> None:
    step.grad_input(0, step.writer.op("Neg", step.small_dy.name), small=step.small_dy.small)


def _sqrt(step: Step) -> None:
    half = step.writer.op("Mul", step.small_dy.name, 0.5)
    step.grad_input(0, step.writer.op("Div", half, step.y))


def _log(step: Step) -> None:
    step.grad_input(0, step.writer.op("Div", step.small_dy.name, step.x))


def _reciprocal(step: Step) -> None:
    write = step.writer
    square = write.op("Mul", step.y, step.y)
    step.grad_input(0, write.op("Mul", write.op("Neg", step.small_dy.name), square))


def _pow(step: Step) -> None:
    step.only(0)
    write, exponent = step.writer, step.input(1)
    value = write.facts.value(exponent)
    if value is not None and value.size == 1 and write.facts.same_shape(step.x, step.y):
        power = float(value.reshape(()))
        scaled = write.op("Mul", step.small_dy.name, power)
        base = step.x if power == 2 else write.op("Pow", step.x, power - 1)
        step.grad_input(0, write.op("Mul", scaled, base))
        return
    as_float = write.op("Cast", exponent, to=onnx.TensorProto.FLOAT)
    lowered = write.op("Pow", step.x, write.op("Sub", as_float, 1.0))
    step.grad_input_summed(0, write.op("Mul", step.dy, write.op("Mul", as_float, lowered)))


def _clip(step: Step) -> None:
    write = step.writer
    if 0 in step.needs_grad:
        step.grad_input(0, write.op("Mul", step.small_dy.name, write.mask("Equal", step.x, step.y)))
    for index, comparison in ((1, "Less"), (2, "Greater")):
        if index in step.needs_grad:
            outside = write.op("Mul", step.small_dy.name, write.mask(comparison, step.x, step.input(index)))
            step.grad_input(index, write.reshape_like(write.sum_all(outside), step.input(index)))


def _extreme(step: Step) -> None:
    """Max and Min: to the operands that equal the result, in equal parts."""
    write = step.writer
    masks = {index: write.mask("Equal", step.input(index), step.y) for index in step.needs_grad}
    share = step.dy
    if len(masks) > 1:
        # Where an operand without gradient is the extreme no mask is set.
        share = write.op("Div", share, write.op("Max", write.op("Sum", *masks.values()), 1.0))
    for index, mask in masks.items():
        step.grad_input_summed(index, write.op("Mul", share, mask))


def _mean(step: Step) -> None:
    part = step.writer.op("Mul", step.dy, 1.0 / len(step.node.input))
    for index in step.needs_grad:
        step.grad_input_summed(index, part)


def _where(step: Step) -> None:
    for index in step.needs_grad:
        values = (step.dy, 0.0) if index == 1 else (0.0, step.dy)
        step.grad_input_summed(index, step.writer.op("Where", step.x, *values))


def _cast(step: Step) -> None:
    kind = step.writer.facts.types.get(step.x, onnx.TensorProto.UNDEFINED)
    if kind not in FLOATS:
        raise NoRuleError(f"the type of '{step.x}' is unknown")
    step.grad_input(0, step.writer.op("Cast", step.small_dy.name, to=kind), small=step.small_dy.small)


def _dropout(step: Step) -> None:
    if step.input(2) and np.any(step.known_value(step.input(2))):
        raise NoRuleError("it is in training mode")
    _pass(step)


ELEMENTWISE: dict[str, Rule] = {
    "Abs": sloped(lambda step: step.writer.op("Sign", step.x)),
    "Add": _add,
    "Cast": _cast,
    "Clip": _clip,
    "Div": _div,
    "Dropout": _dropout,
    "Exp": sloped(lambda step: step.y),
    "Identity": _pass,
    "Log": _log,
    "Max": _extreme,
    "Mean": _mean,
    "Min": _extreme,
    "Mul": _mul,
    "Neg": _neg,
    "Pow": _pow,
    "Reciprocal": _reciprocal,
    "Round": _pass,
    "Sqrt": _sqrt,
    "Sub": _add,
    "Sum": _add,
    "Where": _where,
}
