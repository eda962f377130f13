"""Gradient rules of matrix products."""

from __future__ import annotations

from onnxcalib.autodiff.standard.step import Rule, Step
from onnxcalib.autodiff.writer import NoRuleError, Shape


def _matmul(step: Step) -> None:
    first, second = step.node.input
    ranks = step.known_rank(first), step.known_rank(second)
    if min(ranks) < 2:
        raise NoRuleError("a vector as an operand is not covered")
    if 0 in step.needs_grad:
        product = step.writer.op("MatMul", step.dy, step.writer.transposed(second, ranks[1]))
        step.grad_input(0, step.writer.sum_to(product, _unsummed(step, first), first))
    if 1 in step.needs_grad and ranks[1] == 2:
        # All leading axes in one inner dimension.
        left, right = (step.writer.op("Flatten", name, axis=ranks[0] - 1) for name in (first, step.dy))
        step.grad_input(1, step.writer.op("MatMul", step.writer.transposed(left, 2), right))
    elif 1 in step.needs_grad:
        product = step.writer.op("MatMul", step.writer.transposed(first, ranks[0]), step.dy)
        step.grad_input(1, step.writer.sum_to(product, _unsummed(step, second), second))


def _unsummed(step: Step, operand: str) -> Shape:
    """The shape of an operand's gradient before the sum over broadcast axes."""
    result, shape = step.shape(step.y), step.shape(operand)
    return None if result is None or shape is None else (*result[:-2], *shape[-2:])


def _gemm(step: Step) -> None:
    write, (first, second) = step.writer, step.node.input[:2]
    transposed = step.attribute("transA", 0), step.attribute("transB", 0)
    alpha, beta = step.attribute("alpha", 1.0), step.attribute("beta", 1.0)
    if 0 in step.needs_grad and transposed[0]:
        step.grad_input(0, write.op("Gemm", second, step.dy, transA=transposed[1], transB=1, alpha=alpha))
    elif 0 in step.needs_grad:
        step.grad_input(0, write.op("Gemm", step.dy, second, transB=1 - transposed[1], alpha=alpha))
    if 1 in step.needs_grad and transposed[1]:
        step.grad_input(1, write.op("Gemm", step.dy, first, transA=1, transB=transposed[0], alpha=alpha))
    elif 1 in step.needs_grad:
        step.grad_input(1, write.op("Gemm", first, step.dy, transA=1 - transposed[0], alpha=alpha))
    if 2 in step.needs_grad:
        summed = write.sum_to(step.dy, step.shape(step.y), step.input(2))
        step.grad_input(2, summed if beta == 1.0 else write.op("Mul", summed, beta))


PRODUCTS: dict[str, Rule] = {"Gemm": _gemm, "MatMul": _matmul}
