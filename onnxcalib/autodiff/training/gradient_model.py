"""Gradients through ONNX Runtime training; straight-through rounding."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import onnx

from onnxcalib.autodiff.interface import NoGradientError, gradient_name
from onnxcalib.autodiff.training.decompose import MICROSOFT, Rewriter
from onnxcalib.errors import ModelError, first_line
from onnxcalib.model.external import LARGE_TENSOR, bare_inputs, is_external
from onnxcalib.model.graph import GraphIndex, attributes, drop_unused_initializers
from onnxcalib.model.io import copied, opset_of, serialized, without_weights
from onnxcalib.model.walk import bodies, refill
from onnxcalib.runtime.opening import hint_for, new_options

OLDEST_OPSET, NEWEST_OPSET, NEWEST_IR = 13, 21, 10
OTHER = "Try `engine='standard'`"

# Derivatives through these are zero, or of integers.
STOPS = {
    "And", "ArgMax", "ArgMin", "ConstantOfShape", "Equal", "Greater", "GreaterOrEqual", "IsInf", "IsNaN", "Less",
    "LessOrEqual", "NonZero", "Not", "OneHot", "Or", "Range", "Shape", "Size", "Xor",
}  # fmt: skip

# Ops whose gradients are right, and for those that give none to some of their inputs, the inputs that get one.
EVERY_INPUT = {
    "Abs", "Add", "AveragePool", "Cast", "Concat", "Conv", "Cos", "Div", "Erf", "Exp", "Flatten", "Gelu", "Gemm",
    "GlobalAveragePool", "Identity", "LayerNormalization", "LeakyRelu", "Log", "LogSoftmax", "MatMul", "Max", "MaxPool",
    "Min", "Mul", "Neg", "Reciprocal", "ReduceMean", "ReduceSum", "Relu", "Round", "Sigmoid", "Sin", "Softmax",
    "Softplus", "Split", "Sqrt", "Squeeze", "Sub", "Tanh", "Transpose", "Unsqueeze", "FakeQuant",
}  # fmt: skip
SOME_INPUTS = {
    "Clip": {0}, "Expand": {0}, "Gather": {0}, "GatherElements": {0}, "GatherND": {0}, "Pad": {0}, "Pow": {0},
    "Reshape": {0}, "Slice": {0}, "Tile": {0}, "Where": {1, 2},
}  # fmt: skip


def gradient_model(model: onnx.ModelProto, parameters: Sequence[str]) -> onnx.ModelProto:
    """The model with one more output a parameter: the gradient of its first output, the loss."""
    prepared = _versioned(model)
    _check_inputs(prepared, parameters)
    loss = prepared.graph.output[0].name
    Rewriter(prepared, active_tensors(prepared, parameters, loss)).rewrite()
    active = active_tensors(prepared, parameters, loss)
    _check_gradients(prepared.graph, active)
    reached = [name for name in parameters if name in active]
    built = _build(prepared, loss, reached, active) if reached else prepared
    return _with_gradients(built, model, parameters, reached)


def active_tensors(model: onnx.ModelProto, parameters: Sequence[str], loss: str) -> set[str]:
    """The tensors that depend on a parameter and that the loss depends on."""
    reached = set(parameters)
    for node in model.graph.node:
        if not _stops(node) and reached.intersection(GraphIndex.reads(node)):
            reached.update(node.output)
    needed = {loss}
    for node in reversed(model.graph.node):
        if not _stops(node) and needed.intersection(node.output):
            needed.update(GraphIndex.reads(node))
    return (reached & needed) - {""}


def _stops(node: onnx.NodeProto) -> bool:
    floats = (onnx.TensorProto.FLOAT, onnx.TensorProto.DOUBLE)
    return node.op_type in STOPS or (node.op_type == "Cast" and attributes(node)["to"] not in floats)


def _versioned(model: onnx.ModelProto) -> onnx.ModelProto:
    opset = opset_of(model)
    if not OLDEST_OPSET <= opset <= NEWEST_OPSET:
        raise ModelError(
            f"ONNX Runtime training differentiates opset {OLDEST_OPSET} to {NEWEST_OPSET}, not {opset}.",
            "`engine='standard'` has no such limit.",
        )
    copy = copied(model)
    copy.ir_version = min(copy.ir_version, NEWEST_IR)
    kept = [entry for entry in model.opset_import if not entry.domain]
    del copy.opset_import[:]
    copy.opset_import.extend([*kept, onnx.helper.make_opsetid(MICROSOFT, 1)])
    del copy.graph.value_info[:]  # shapes of what is rewritten would be stale
    return copy


def _check_inputs(model: onnx.ModelProto, parameters: Sequence[str]) -> None:
    known = {value.name for value in model.graph.input}
    for name in parameters:
        if name not in known:
            raise ModelError(f"'{name}' is no input of the loss.", "A parameter must be one.")


def _check_gradients(graph: onnx.GraphProto, active: set[str]) -> None:
    """Fails where the builder would fail less clearly, or give a wrong gradient without a word."""
    index = GraphIndex(graph)
    for node in graph.node:
        if any(True for _ in bodies(node)):  # the builder ends the process on some, wherever they stand
            raise NoGradientError(node.op_type, node.name or node.output[0], "ONNX Runtime training has none", OTHER)
        if active.intersection(node.output):
            wanted = {position for position, name in enumerate(node.input) if name in active}
            known = wanted <= SOME_INPUTS[node.op_type] if node.op_type in SOME_INPUTS else node.op_type in EVERY_INPUT
            if not known or _has_wrong_gradient(index, node):
                name, reason = node.name or node.output[0], "ONNX Runtime training has none"
                raise NoGradientError(node.op_type, name, reason, OTHER)


def _has_wrong_gradient(index: GraphIndex, node: onnx.NodeProto) -> bool:
    values = attributes(node)
    if node.op_type == "AveragePool":
        return any(step != 1 for step in values.get("dilations", ()))
    if node.op_type == "Pad":
        return values.get("mode", b"constant") != b"constant" or len(node.input) > 3
    if node.op_type == "Slice" and len(node.input) > 4:
        steps = index.constant(node.input[4])
        return steps is None or bool((steps < 0).any())
    return False


def _build(model: onnx.ModelProto, loss: str, parameters: Sequence[str], active: set[str]) -> onnx.ModelProto:
    from onnxruntime.capi._pybind_state import GradientGraphBuilder

    _register_gradients()
    quantizers = [node for node in model.graph.node if node.op_type == "FakeQuant" and node.output[0] in active]
    wanted = {*parameters, *(node.input[0] for node in quantizers)}
    bare, large = _without_large_weights(model)
    try:
        builder = GradientGraphBuilder(serialized(bare), {loss}, wanted, loss, new_options())
        builder.build()
        built = onnx.load_from_string(builder.get_model())
    except Exception as error:  # the runtime's exceptions share no base class but this one
        message = f"ONNX Runtime training cannot differentiate the loss: {first_line(error)}."
        raise ModelError(message, hint_for(error, f"{OTHER}.")) from error
    refill(built.graph.input, [value for value in built.graph.input if value.name not in large])
    built.graph.initializer.extend(large.values())
    return built


def _without_large_weights(model: onnx.ModelProto) -> tuple[onnx.ModelProto, dict[str, onnx.TensorProto]]:
    """A copy with inputs in place of weights that lie in files or are large, and these: the builder takes bytes."""
    given = model.graph.initializer
    large = {it.name: it for it in given if is_external(it) or it.ByteSize() >= LARGE_TENSOR}
    bare = without_weights(model)
    bare.graph.initializer.extend(tensor for tensor in given if tensor.name not in large)
    listed = {value.name for value in bare.graph.input}  # parameters have values before there are others
    bare.graph.input.extend(bare_inputs(tensor for tensor in large.values() if tensor.name not in listed))
    return bare, large


def _with_gradients(
    built: onnx.ModelProto, model: onnx.ModelProto, parameters: Sequence[str], reached: Sequence[str]
) -> onnx.ModelProto:
    """The built graph with the promised outputs, and nothing that only others would need."""
    graph = built.graph
    declared = {value.name: value for value in model.graph.input}
    del graph.output[:]
    graph.output.extend(model.graph.output)
    for name in parameters:
        gradient, shape = gradient_name(name), f"{gradient_name(name)}/shape"
        if name in reached:
            graph.node.append(onnx.helper.make_node("Identity", [f"{name}_grad"], [gradient]))
        else:
            graph.node.append(onnx.helper.make_node("Shape", [name], [shape]))
            graph.node.append(onnx.helper.make_node("ConstantOfShape", [shape], [gradient]))
        graph.output.append(onnx.ValueInfoProto(name=gradient, type=declared[name].type))
    _drop_unused_nodes(graph)
    drop_unused_initializers(graph)
    return built


def _drop_unused_nodes(graph: onnx.GraphProto) -> None:
    needed = {value.name for value in graph.output}
    for place in reversed(range(len(graph.node))):
        if needed.intersection(graph.node[place].output):
            needed.update(GraphIndex.reads(graph.node[place]))
        else:
            del graph.node[place]


@cache
def _register_gradients() -> None:
    """Gradients that the runtime lacks or cuts short; registering changes the whole process, so it happens once."""
    from onnxruntime.capi._pybind_state import register_gradient_definition

    register_gradient_definition("::Round", [_step("Identity", ["GO(0)"], "GI(0)")])  # straight through
    softplus = [_step("Sigmoid", ["I(0)"], "slope"), _step("Mul", ["GO(0)", "slope"], "GI(0)")]
    register_gradient_definition("::Softplus", softplus)
    # The quantizer's gradient takes any mask, and a third of the time of the runtime's own gradients of these.
    positive = _step("Cast", ["O(0)"], "mask", to=onnx.TensorProto.BOOL)
    unchanged = _step("Equal", ["I(0)", "O(0)"], "mask")
    for op, mask in (("Relu", positive), ("Clip", unchanged)):
        masked = _step("FakeQuantGrad", ["GO(0)", "mask"], "GI(0)", MICROSOFT)
        register_gradient_definition(f"::{op}", [mask, masked])
    register_gradient_definition(f"{MICROSOFT}::FakeQuant", _fake_quant_gradient())


def _fake_quant_gradient() -> list[Any]:
    """With y = s (q - z): dy/dx = m, dy/ds = (y - m x) / s, dy/dz = s (m - 1), where m is 1 inside the grid, else 0."""
    return [
        _step("FakeQuantGrad", ["GO(0)", "O(1)"], "GI(0)", MICROSOFT),
        _step("Shape", ["I(1)"], "shape"),
        # Differences before sums: the sums alone would cancel to noise.
        _step("FakeQuantGrad", ["I(0)", "O(1)"], "kept", MICROSOFT),
        _step("Sub", ["O(0)", "kept"], "slope"),
        _step("Mul", ["GO(0)", "slope"], "product"),
        _step("ReduceSum", ["product"], "sum"),
        _step("Div", ["sum", "I(1)"], "scaled"),
        _step("Reshape", ["scaled", "shape"], "GI(1)"),
        _step("FakeQuantGrad", ["GO(0)", "O(1)"], "inside", MICROSOFT),
        _step("Sub", ["inside", "GO(0)"], "outside"),
        _step("ReduceSum", ["outside"], "outside_sum"),
        _step("Mul", ["outside_sum", "I(1)"], "outside_scaled"),
        _step("Reshape", ["outside_scaled", "shape"], "GI(2)"),
    ]


def _step(op: str, inputs: list[str], output: str, domain: str = "", **integers: int) -> Any:
    from onnxruntime.capi._pybind_state import GradientNodeAttributeDefinition, GradientNodeDefinition

    step = GradientNodeDefinition()
    step.op_type, step.domain = op, domain
    step.inputs, step.outputs = inputs, [output]
    values = []
    for name, value in integers.items():
        values.append(GradientNodeAttributeDefinition())
        values[-1].name, values[-1].value_json, values[-1].dtype = name, str(value), "int"
        values[-1].is_tensor = False
    step.attributes = values
    return step
