"""The loss of a whole quantized model against the float model's outputs, with what trains as parameters."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import numpy_helper

from onnxcalib.model.graph import GraphIndex, attributes
from onnxcalib.model.layers import Layer
from onnxcalib.model.loss_writer import Along, LossWriter
from onnxcalib.numerics.losses import TEMPERATURE, log_probabilities, temperature_of
from onnxcalib.numerics.output_kind import OutputKind
from onnxcalib.numerics.positions import Counts, counts_for
from onnxcalib.numerics.quant_params import spread
from onnxcalib.plan import QuantPlan

FloatArray = npt.NDArray[np.float32]

HINTED = "hinted"  # the input that says how many times the error of hints counts
SMALLEST = 1e-12  # of a probability whose logarithm is taken


@dataclass(frozen=True)
class Parameter:
    """Where a parameter starts, in its unit."""

    start: FloatArray
    unit: FloatArray


def bias_name(layer: Layer) -> str:
    """The input that takes a layer's bias."""
    return f"{layer.name}:bias"


def quantized_weight_name(layer: Layer) -> str:
    """The input that takes a layer's weight on its grid."""
    return f"{layer.name}:quantized_weight"


def input_scale_name(tensor: str) -> str:
    """The input that takes the step of the grid on which layers read a tensor."""
    return f"{tensor}:input_scale"


def reference_name(output: str) -> str:
    """The input that takes the float model's output; as `model_reference` makes it."""
    return f"{output}:reference"


def share_name(tensor: str) -> str:
    """The input that takes how much each position of a tensor counts, one on average."""
    return f"{tensor}:share"


def distillation_loss(
    quantized: onnx.ModelProto,
    layers: Sequence[Layer],
    plan: QuantPlan,
    parameters: Mapping[str, Parameter],
    kinds: Mapping[str, OutputKind],
    reference: Mapping[str, npt.NDArray[np.float32]],
    hints: Sequence[str] = (),
    padded: Collection[str] = (),
) -> onnx.ModelProto:
    """Requires the plan's written model with one byte a value; reference gives ranks and energies of outputs and hints.

    Hints are inner tensors whose mean relative error is added, as many times as the input HINTED says. Values and hints
    among the padded tensors are weighted by their shares; references of others are zero where nothing counts.
    """
    form = _FloatForm(quantized, layers, plan, parameters)
    form.write()
    writer = form.writer

    def wanted(name: str) -> str:
        # Sizes may differ from feed to feed, as lengths of sequences do.
        sizes = [f"{name}:{axis}" for axis in range(1, reference[name].ndim)]
        return writer.input(reference_name(name), sizes if reference[name].ndim else None)

    def squared_error(name: str) -> str:
        energy = float(np.mean(np.square(reference[name], dtype=np.float64)))
        share = None
        if name in padded:
            wide: list[int | str] = [1] * (reference[name].ndim - 1)
            share = writer.input(share_name(name), [f"{name}:1", *wide[1:]] if len(wide) > 1 else wide)
        return writer.squared_error(name, wanted(name), energy, share)

    def total(parts: Sequence[str]) -> str:
        return reduce(lambda added, part: writer.node("Add", [part, added]), reversed(parts))

    def error(name: str, kind: OutputKind) -> str:
        if kind is OutputKind.VALUES:
            return squared_error(name)
        if kind is OutputKind.EMBEDDING:
            return _cosine_distance(writer, name, wanted(name))
        return _cross_entropy(writer, name, wanted(name), kind)

    loss = total([error(name, kind) for name, kind in kinds.items()])
    if hints:
        each = writer.node("Div", [writer.input(HINTED, None), writer.number("hints", np.float32(len(hints)))])
        loss = writer.node("Add", [loss, writer.node("Mul", [total([squared_error(name) for name in hints]), each])])
    return writer.finish(loss)


def _cross_entropy(writer: LossWriter, name: str, wanted: str, output_kind: OutputKind) -> str:
    """The softened divergence but for the float model's own entropy, which nothing changes."""
    logits = writer.node("Log", [writer.clip(name, SMALLEST, 1.0)]) if output_kind.is_of_probabilities else name
    temperature = temperature_of(output_kind, TEMPERATURE)
    if temperature != 1:
        logits = writer.node("Div", [logits, writer.number("temperature", np.float32(temperature))])
    logarithms = writer.node("LogSoftmax", [logits], axis=-1)
    axes = writer.constant("axes", np.array([-1], np.int64))
    each = writer.node("ReduceSum", [writer.node("Mul", [wanted, logarithms]), axes], keepdims=0)
    return writer.node("Neg", [writer.mean(each)])


def _cosine_distance(writer: LossWriter, name: str, wanted: str) -> str:
    """Minus the cosine with rows of length one, and one more."""
    axes = writer.constant("axes", np.array([-1], np.int64))
    along = writer.node("ReduceSum", [writer.node("Mul", [name, wanted]), axes], keepdims=0)
    squares = writer.node("ReduceSum", [writer.node("Mul", [name, name]), axes], keepdims=0)
    length = writer.node("Sqrt", [writer.node("Add", [squares, writer.number("least", np.float32(SMALLEST))])])
    cosine = writer.mean(writer.node("Div", [along, length]))
    return writer.node("Sub", [writer.number("one", np.float32(1)), cosine])


def model_reference(
    outputs: Mapping[str, npt.NDArray[Any]],
    kinds: Mapping[str, OutputKind],
    padded: Collection[str] = (),
    counts: Counts | None = None,
) -> dict[str, FloatArray]:
    """Outputs and inner tensors of the float model as the loss takes them: probabilities, or rows of length one.

    What does not count is zero there; how much the positions of others count stands beside them.
    """
    found: dict[str, FloatArray] = {}
    for name, output in outputs.items():
        kind, own = kinds.get(name, OutputKind.VALUES), counts_for(output, counts)
        if own is None:
            own = np.ones(output.shape[: 2 if output.ndim > 2 else 1], np.bool_)
        share = np.asarray(own / max(own.mean(), 1e-9), np.float32).reshape(*own.shape, *[1] * (output.ndim - own.ndim))
        if kind is OutputKind.VALUES:
            found[reference_name(name)] = output
            if name in padded:
                found[share_name(name)] = share
            continue
        if kind is OutputKind.EMBEDDING:
            rows = output / np.maximum(np.linalg.norm(output, axis=-1, keepdims=True), SMALLEST)
        else:
            rows = np.exp(log_probabilities(output, kind, temperature_of(kind, TEMPERATURE)))
        found[reference_name(name)] = np.asarray(rows * share if name in padded else rows, np.float32)
    return found


class _FloatForm:
    """A QDQ model rewritten so that gradients pass through its quantizers."""

    def __init__(
        self,
        quantized: onnx.ModelProto,
        layers: Sequence[Layer],
        plan: QuantPlan,
        parameters: Mapping[str, Parameter],
    ) -> None:
        self.index = GraphIndex(quantized.graph)
        self.graph, self.plan = quantized.graph, plan
        self.writer = LossWriter(quantized)
        self.writer.inputs.extend(value for value in quantized.graph.input if value.name in self.index.inputs)
        self.values = {name: self.writer.parameter(name, value.start, value.unit) for name, value in parameters.items()}
        nodes = {node.name: node for node in quantized.graph.node}
        self.weights = {nodes[layer.name].input[1]: layer for layer in layers if layer.name in plan.layers}
        self.inputs = {nodes[layer.name].input[0]: layer.input for layer in layers if layer.name in plan.layers}
        # The biases that are fed from parameters, by node and place.
        trained = [layer for layer in layers if bias_name(layer) in self.values]
        self.biases = {self._bias_place(nodes, layer): self.values[bias_name(layer)] for layer in trained}

    def _bias_place(self, nodes: Mapping[str, onnx.NodeProto], layer: Layer) -> tuple[str, int]:
        if layer.bias_node is None:
            return layer.name, 2
        read = nodes[layer.bias_node].input
        return layer.bias_node, next(i for i, name in enumerate(read) if name in self.index.initializers)

    def write(self) -> None:
        """All nodes, with every quantizer in a form that can be differentiated."""
        for node in self.graph.node:
            if node.op_type in ("QuantizeLinear", "DynamicQuantizeLinear") or self._is_clip_of_codes(node):
                continue
            if node.op_type == "DequantizeLinear":
                self._dequantize(node)
                continue
            copy = self.writer.copy(node)
            for (name, place), value in self.biases.items():
                if name == node.name:
                    copy.input.extend([""] * (place + 1 - len(copy.input)))
                    copy.input[place] = value

    def _is_clip_of_codes(self, node: onnx.NodeProto) -> bool:
        maker = self.index.producers.get(node.input[0]) if node.input else None
        return node.op_type == "Clip" and maker is not None and maker.op_type == "QuantizeLinear"

    def _dequantize(self, node: onnx.NodeProto) -> None:
        maker = self.index.producers.get(node.input[0])
        if maker is not None and maker.op_type == "DynamicQuantizeLinear":
            # Eight bits of a range of its own add little noise, and no gradient passes through a maximum.
            self.writer.nodes.append(onnx.helper.make_node("Identity", [maker.input[0]], node.output, node.name))
            return
        scale = self.index.value(node.input[1])
        zero = self.index.value(node.input[2]) if len(node.input) > 2 else np.zeros(scale.shape, np.int32)
        values = attributes(node)
        axis, block = values.get("axis", 1) if scale.ndim else None, values.get("block_size") or None
        quantized = self.index.constant(node.input[0])
        if quantized is None:
            self._quantize_activation(node, scale, zero, axis)
            return
        layer = self.weights.get(node.output[0])
        if layer is not None and quantized_weight_name(layer) in self.values:
            read = [self.values[quantized_weight_name(layer)]]
            self.writer.nodes.append(onnx.helper.make_node("Identity", read, node.output, node.name))
            return
        scale, zero = (spread(each, axis, block, quantized.shape) for each in (scale, zero))
        real = ((quantized.astype(np.int32) - zero) * scale).astype(np.float32)
        self.writer.constants.append(numpy_helper.from_array(real, node.output[0]))

    def _quantize_activation(
        self, node: onnx.NodeProto, scale: FloatArray, zero: npt.NDArray[Any], axis: int | None
    ) -> None:
        maker, bounds = self.index.producers[node.input[0]], np.iinfo(zero.dtype)
        low, high = int(bounds.min), int(bounds.max)
        if maker.op_type == "Clip":
            low, high = (int(self.index.value(name)) for name in maker.input[1:3])
            maker = self.index.producers[maker.input[0]]
        trained = self.values.get(input_scale_name(self.inputs.get(node.output[0], "")))
        qparams = (trained or self.writer.number("scale", scale), self.writer.number("zero", zero.astype(np.float32)))
        self.writer.fake_quantize(maker.input[0], *qparams, (low, high), Along(axis))
        self.writer.nodes[-1].output[0] = node.output[0]
