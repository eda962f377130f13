"""Gradient rules of activation functions: the slope of each, times what arrives."""

from __future__ import annotations

import math

import onnx

from onnxcalib.autodiff.standard.step import Rule, Step, sloped


def _leaky_relu(step: Step) -> str:
    alpha = step.attribute("alpha", 0.01)
    positive = step.writer.mask("Greater", step.x, 0.0)
    return step.writer.op("Add", step.writer.op("Mul", positive, 1.0 - alpha), alpha)


def _prelu(step: Step) -> None:
    write, slope = step.writer, step.input(1)
    if 0 in step.needs_grad:
        positive = write.op("Greater", step.x, 0.0)
        step.grad_input(0, write.op("Mul", step.dy, write.op("Where", positive, 1.0, slope)))
    if 1 in step.needs_grad:
        step.grad_input_summed(1, write.op("Mul", step.dy, write.op("Min", step.x, 0.0)))


def _elu(step: Step) -> str:
    below = step.writer.op("Add", step.y, step.attribute("alpha", 1.0))
    return step.writer.op("Where", step.writer.op("Greater", step.x, 0.0), 1.0, below)


def _selu(step: Step) -> str:
    gamma = step.attribute("gamma", 1.05070102214813232421875)
    below = step.writer.op("Add", step.y, step.attribute("alpha", 1.67326319217681884765625) * gamma)
    return step.writer.op("Where", step.writer.op("Greater", step.x, 0.0), gamma, below)


def _hard_sigmoid(step: Step) -> str:
    write = step.writer
    inside = write.op("And", write.op("Greater", step.y, 0.0), write.op("Less", step.y, 1.0))
    return write.op("Mul", write.op("Cast", inside, to=onnx.TensorProto.FLOAT), step.attribute("alpha", 0.2))


def _hard_swish(step: Step) -> str:
    write = step.writer
    gate = write.op("HardSigmoid", step.x, alpha=1.0 / 6.0, beta=0.5)
    bend = write.op("Mul", write.mask("Less", write.op("Abs", step.x), 3.0), step.x)
    return write.op("Add", gate, write.op("Mul", bend, 1.0 / 6.0))


def _bell(step: Step, factor: float, width: float) -> str:
    """The factor times exp of minus the squared input over the width."""
    write = step.writer
    exponent = write.op("Mul", write.op("Mul", step.x, step.x), -1.0 / width)
    return write.op("Mul", write.op("Exp", exponent), factor)


def _gelu(step: Step) -> str:
    if step.attribute("approximate", "none") == "tanh":
        return _gelu_tanh(step)
    write = step.writer
    half = write.op("Mul", write.op("Erf", write.op("Mul", step.x, math.sqrt(0.5))), 0.5)
    bend = write.op("Mul", step.x, _bell(step, 1.0 / math.sqrt(2.0 * math.pi), 2.0))
    return write.op("Add", write.op("Add", half, 0.5), bend)


def _gelu_tanh(step: Step) -> str:
    write, outer, cubic = step.writer, math.sqrt(2.0 / math.pi), 0.044715
    square = write.op("Mul", step.x, step.x)
    inner = write.op("Mul", step.x, write.op("Add", write.op("Mul", square, outer * cubic), outer))
    bent = write.op("Tanh", inner)
    steep = write.op("Add", write.op("Mul", square, 3.0 * outer * cubic), outer)
    rest = write.op("Sub", 1.0, write.op("Mul", bent, bent))
    tail = write.op("Mul", write.op("Mul", step.x, rest), steep)
    return write.op("Mul", write.op("Add", write.op("Add", bent, 1.0), tail), 0.5)


def _mish(step: Step) -> str:
    write = step.writer
    bent = write.op("Tanh", write.op("Softplus", step.x))
    rest = write.op("Sub", 1.0, write.op("Mul", bent, bent))
    tail = write.op("Mul", write.op("Mul", step.x, rest), write.op("Sigmoid", step.x))
    return write.op("Add", bent, tail)


def _softmax(step: Step) -> None:
    write, axis = step.writer, step.attribute("axis", -1)
    product = write.op("Mul", step.dy, step.y)
    share = write.op("Mul", step.y, write.reduce_sum(product, [axis], keep=True))
    step.grad_input(0, write.op("Sub", product, share))


def _log_softmax(step: Step) -> None:
    write, axis = step.writer, step.attribute("axis", -1)
    share = write.op("Mul", write.op("Exp", step.y), write.reduce_sum(step.dy, [axis], keep=True))
    step.grad_input(0, write.op("Sub", step.dy, share))


ACTIVATIONS: dict[str, Rule] = {
    "Elu": sloped(_elu),
    "Erf": sloped(lambda step: _bell(step, 2.0 / math.sqrt(math.pi), 1.0)),
    "Gelu": sloped(_gelu),
    "HardSigmoid": sloped(_hard_sigmoid),
    "HardSwish": sloped(_hard_swish),
    "LeakyRelu": sloped(_leaky_relu),
    "LogSoftmax": _log_softmax,
    "Mish": sloped(_mish),
    "PRelu": _prelu,
    "Relu": sloped(lambda step: step.writer.mask("Greater", step.y, 0.0)),
    "Selu": sloped(_selu),
    "Sigmoid": sloped(lambda step: step.writer.op("Sub", step.y, step.writer.op("Mul", step.y, step.y))),
    "Softmax": _softmax,
    "Softplus": sloped(lambda step: step.writer.op("Sigmoid", step.x)),
    "Tanh": sloped(lambda step: step.writer.op("Sub", 1.0, step.writer.op("Mul", step.y, step.y))),
}
