"""Gradients from standard ops: a loss graph becomes one that gives the gradient of each parameter too."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import onnx

from onnxcalib.autodiff.interface import NoGradientError, gradient_name
from onnxcalib.autodiff.standard.absorb import with_absorbed
from onnxcalib.autodiff.standard.rules import RULES
from onnxcalib.autodiff.standard.rules.quantize import FakeQuantizer, lower_all, quantizer_gradient
from onnxcalib.autodiff.standard.step import Gradient, Step, full
from onnxcalib.autodiff.writer import Facts, NoRuleError, Writer
from onnxcalib.errors import ModelError
from onnxcalib.model.graph import GraphIndex


def lower_fake_quantize(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy in which every quantizer op is written in standard ops."""
    facts = Facts.of(model)
    return _lowered(with_absorbed(model, facts), facts)[0]


def gradient_model(model: onnx.ModelProto, parameters: Sequence[str]) -> onnx.ModelProto:
    """A copy whose outputs are followed by the gradient of the first output for each parameter, a graph input."""
    facts = Facts.of(model)
    _check(model, parameters, facts)
    model = with_absorbed(model, facts)
    result, quantizers = _lowered(model, facts)
    writer = Writer(result.graph, facts)
    gradients = _propagate(model, result, writer, quantizers, parameters)
    for name in parameters:
        _give_output(result, writer, name, gradients.get(name))
    result.graph.node.extend(writer.nodes)
    result.graph.initializer.extend(writer.constants)
    return result


def _check(model: onnx.ModelProto, parameters: Iterable[str], facts: Facts) -> None:
    inputs = {value.name for value in model.graph.input}
    for name in parameters:
        shape = facts.shape(name) if name in inputs else None
        if shape is None or any(not isinstance(dim, int) for dim in shape):
            raise ModelError(
                f"The parameter '{name}' is not an input of fixed shape.",
                "A gradient is made for graph inputs whose sizes are all numbers.",
            )


def _lowered(model: onnx.ModelProto, facts: Facts) -> tuple[onnx.ModelProto, dict[str, FakeQuantizer]]:
    try:
        return lower_all(model, facts)
    except NoRuleError as error:
        raise ModelError(
            f"A quantizer cannot be written in standard ops: {error}.", "Give the model's inputs a known rank."
        ) from error


def _propagate(
    model: onnx.ModelProto,
    result: onnx.ModelProto,
    writer: Writer,
    quantizers: dict[str, FakeQuantizer],
    parameters: Sequence[str],
) -> dict[str, Gradient]:
    """Walks back from the loss; gives the gradient of every tensor that depends on a parameter."""
    moving = _dependents(model.graph, parameters, writer.facts)
    arrived = {model.graph.output[0].name: Gradient(writer.number(1.0), small=True)}
    makers = {name: node for node in result.graph.node for name in node.output if name}
    for original in reversed(model.graph.node):
        needs_grad = frozenset(index for index, name in enumerate(original.input) if name in moving)
        grad_outputs = [arrived.get(name) for name in original.output]
        if not any(grad_outputs) or not any(name in moving for name in GraphIndex.reads(original)):
            continue
        quantizer = quantizers.get(original.output[0])
        node = original if quantizer else makers[next(name for name in original.output if name)]
        step = Step(node, writer, grad_outputs, needs_grad)
        _apply(step, quantizer)
        for index, gradient in sorted(step.grad_inputs.items()):
            name = node.input[index]
            arrived[name] = _added(writer, arrived.get(name), gradient, name)
    return arrived


def _dependents(graph: onnx.GraphProto, parameters: Iterable[str], facts: Facts) -> set[str]:
    """Tensors that move, by more than whole numbers, with a parameter."""
    moving = set(parameters)
    for node in graph.node:
        if any(name in moving for name in GraphIndex.reads(node)):
            moving.update(name for name in node.output if name and facts.carries_gradient(name))
    return moving


def _apply(step: Step, quantizer: FakeQuantizer | None) -> None:
    node = step.node
    rule = RULES.get(node.op_type) if not node.domain else None
    try:
        if quantizer is not None:
            quantizer_gradient(step, quantizer)
        elif rule is None:
            raise NoRuleError("")
        else:
            rule(step)
    except NoRuleError as error:
        name = node.name or next(output for output in node.output if output)
        raise NoGradientError(node.op_type, name, str(error)) from error


def _added(writer: Writer, before: Gradient | None, gradient: Gradient, tensor: str) -> Gradient:
    """The sum of the gradients of a tensor that is read several times."""
    if before is None:
        return gradient
    if before.small and gradient.small:
        before = Gradient(full(writer, before, tensor))
    return Gradient(writer.op("Add", before.name, gradient.name))


def _give_output(result: onnx.ModelProto, writer: Writer, parameter: str, gradient: Gradient | None) -> None:
    shape, name = writer.shape_of(parameter), gradient_name(parameter)
    if gradient is None:
        writer.nodes.append(onnx.helper.make_node("ConstantOfShape", [shape], [name], name=name))
    else:
        op = ("Expand", [gradient.name, shape]) if gradient.small else ("Identity", [gradient.name])
        writer.nodes.append(onnx.helper.make_node(*op, [name], name=name))
    dims = [int(dim) for dim in writer.facts.shapes[parameter] if isinstance(dim, int)]
    result.graph.output.append(onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, dims))
