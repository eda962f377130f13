"""Losses that can be differentiated: one layer against its float output, and a whole quantized model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper

from onnxcalib.model.io import opset_of
from onnxcalib.model.layers import Layer
from onnxcalib.model.prepare import Model
from onnxcalib.model.subgraph import layer_model
from onnxcalib.numerics.quant_params import TINY, GridKind, along

FloatArray = npt.NDArray[np.float32]

DOMAIN = "onnxcalib"
LOSS, TARGET = "loss", "target"
# The parameters of a layer's loss; each is a multiple of its unit, so that one learning rate suits all channels.
WEIGHT, BIAS, ROUNDING = "weight", "bias", "rounding"
WEIGHT_RANGE, WEIGHT_LOW = "weight_range", "weight_low"
INPUT_RANGE, INPUT_LOW = "input_range", "input_low"
# How hard AdaRound's roundings are pushed to 0 or 1, and how sharply.
STRENGTH, SHARPNESS = "strength", "sharpness"
STRETCH = (-0.1, 1.1)


@dataclass(frozen=True)
class Quantizer:
    """A grid whose range is trained, or stays as it is."""

    kind: GridKind
    axis: int | None
    low: FloatArray
    range: FloatArray  # high - low; for a symmetric grid the largest magnitude
    trained: bool


@dataclass(frozen=True)
class LayerLoss:
    """What the loss of a layer is made of."""

    weight: FloatArray
    weights: Quantizer
    inputs: Quantizer | None  # None: the inputs come quantized
    bias: FloatArray | None
    units: Mapping[str, FloatArray | float]
    energy: float  # mean square of the targets: the loss is relative to it
    adaround: bool


def starts(loss: LayerLoss) -> dict[str, FloatArray]:
    """The trained parameters at the start, in their units."""
    values: dict[str, FloatArray] = {}
    if loss.adaround:
        values[ROUNDING] = _rounding_start(loss)
    else:
        values[WEIGHT] = loss.weight
        if loss.weights.trained:
            values |= ranges(loss.weights, WEIGHT_RANGE, WEIGHT_LOW)
    if loss.inputs is not None and loss.inputs.trained:
        values |= ranges(loss.inputs, INPUT_RANGE, INPUT_LOW)
    if loss.bias is not None:
        values[BIAS] = loss.bias
    return {name: np.asarray(value / loss.units.get(name, 1.0), np.float32) for name, value in values.items()}


def ranges(quantizer: Quantizer, range_name: str, low_name: str) -> dict[str, FloatArray]:
    """The trained parameters of a quantizer, by the names that its loss has for them."""
    values = {range_name: quantizer.range}
    return values if quantizer.kind.symmetric else {**values, low_name: quantizer.low}


def scale_of(quantizer: Quantizer) -> FloatArray:
    """The step of a quantizer's grid at the start."""
    return np.asarray(np.maximum(quantizer.range, TINY) / _steps(quantizer.kind), np.float32)


def _steps(kind: GridKind) -> int:
    first, last = kind.codes
    return last - kind.zero if kind.symmetric else last - first


def _rounding_start(loss: LayerLoss) -> FloatArray:
    """Where the stretched sigmoid gives the weights' own fractions."""
    steps = loss.weight / along(scale_of(loss.weights), loss.weights.axis, loss.weight.ndim)
    share = (np.clip(steps - np.floor(steps), 0.01, 0.99) - STRETCH[0]) / (STRETCH[1] - STRETCH[0])
    return np.asarray(-np.log(1 / share - 1), np.float32)


def layer_loss(
    model: Model, layer: Layer, loss: LayerLoss, shapes: tuple[Sequence[int], Sequence[int]]
) -> onnx.ModelProto:
    """The relative squared error of the layer's activated output; shapes are those of a sample's input and output."""
    proto = layer_model(model, layer).proto
    writer = LossWriter(proto)
    values = starts(loss)
    own = {name: writer.parameter(name, value, loss.units.get(name, 1.0)) for name, value in values.items()}
    read, weight = writer.input(layer.input, shapes[0]), ""
    if loss.inputs is not None:
        read = writer.quantized(layer.input, loss.inputs, own.get(INPUT_RANGE), own.get(INPUT_LOW))
    if loss.adaround:
        weight = _rounded(writer, loss, own[ROUNDING])
    else:
        weight = writer.quantized(own[WEIGHT], loss.weights, own.get(WEIGHT_RANGE), own.get(WEIGHT_LOW))
    for node in proto.graph.node:
        copy = writer.copy(node)
        if node.name == layer.name:
            copy.input[0], copy.input[1] = read, weight
            if BIAS in own and layer.bias_node is None:
                del copy.input[2:]
                copy.input.append(own[BIAS])
        elif node.name == layer.bias_node and BIAS in own:
            place = list(copy.input).index(layer.bias)
            copy.input[place] = own[BIAS]
    error = writer.squared_error(layer.activated, writer.input(TARGET, shapes[1]), loss.energy)
    if loss.adaround:
        error = writer.add("Add", [error, _undecided(writer, own[ROUNDING])])
    return writer.finish(error)


def _rounded(writer: LossWriter, loss: LayerLoss, rounding: str) -> str:
    """The weight between the grid's points below and above, as far up as the stretched sigmoid says."""
    quantizer = loss.weights
    scale = along(scale_of(quantizer), quantizer.axis, loss.weight.ndim)
    low, high = code_bounds(quantizer, loss.weight.ndim)
    floor = writer.constant("floor", np.floor(loss.weight / scale))
    codes = writer.add("Add", [floor, _share(writer, rounding)])
    codes = writer.add("Min", [writer.add("Max", [codes, writer.constant("low", low)]), writer.constant("high", high)])
    return writer.add("Mul", [codes, writer.constant("scale", scale)])


def code_bounds(quantizer: Quantizer, ndim: int) -> tuple[FloatArray, FloatArray]:
    """The lowest and the highest step from zero of a fixed grid."""
    first, last = quantizer.kind.codes
    if quantizer.kind.symmetric:
        zero = np.full(quantizer.range.shape, quantizer.kind.zero, np.float32)
    else:
        zero = np.clip(np.rint(first - quantizer.low / scale_of(quantizer)), first, last)
    zero = along(np.asarray(zero, np.float32), quantizer.axis, ndim)
    return np.asarray(first - zero, np.float32), np.asarray(last - zero, np.float32)


def _share(writer: LossWriter, rounding: str) -> str:
    low, high = (np.float32(value) for value in STRETCH)
    stretched = writer.add("Mul", [writer.add("Sigmoid", [rounding]), writer.constant("stretch", high - low)])
    moved = writer.add("Add", [stretched, writer.constant("start", low)])
    return writer.clip(moved, 0.0, 1.0)


def _undecided(writer: LossWriter, rounding: str) -> str:
    """AdaRound's regulariser: zero once every rounding is 0 or 1."""
    strength, sharpness = writer.input(STRENGTH, None), writer.input(SHARPNESS, None)
    centred = writer.add("Sub", [_share(writer, rounding), writer.constant("half", np.float32(0.5))])
    spread = writer.add("Mul", [writer.add("Abs", [centred]), writer.constant("two", np.float32(2))])
    # A power's slope is not finite at zero.
    decided = writer.add("Pow", [writer.clip(spread, 1e-6, 1.0), sharpness])
    left = writer.add("Sub", [writer.constant("one", np.float32(1)), decided])
    return writer.add("Mul", [writer.mean(left), strength])


class LossWriter:
    """A graph that grows towards its loss."""

    def __init__(self, source: onnx.ModelProto) -> None:
        self.opset = opset_of(source)
        self.source = source
        self.nodes: list[onnx.NodeProto] = []
        self.inputs: list[onnx.ValueInfoProto] = []
        self.constants = list(source.graph.initializer)
        self._count = 0

    def copy(self, node: onnx.NodeProto) -> onnx.NodeProto:
        """A node of the source, at this place."""
        copied = onnx.NodeProto()
        copied.CopyFrom(node)
        self.nodes.append(copied)
        return copied

    def add(self, op: str, inputs: Sequence[str], domain: str = "", **attributes: Any) -> str:
        """A node with one output, whose name comes back."""
        name = self._fresh(op.lower())
        self.nodes.append(helper.make_node(op, list(inputs), [name], name=name, domain=domain, **attributes))
        return name

    def constant(self, name: str, value: npt.ArrayLike, dtype: npt.DTypeLike = np.float32) -> str:
        """An initialiser."""
        name = self._fresh(name)
        self.constants.append(numpy_helper.from_array(np.asarray(value, dtype), name))
        return name

    def input(self, name: str, sample: Sequence[int | str] | None) -> str:
        """A data input of samples of a shape, or a number."""
        shape: list[Any] = [] if sample is None else ["samples", *sample]
        self.inputs.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, shape))
        return name

    def parameter(self, name: str, value: FloatArray, unit: FloatArray | float = 1.0) -> str:
        """A trained input; what comes back is its real value."""
        self.inputs.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, value.shape))
        if np.ndim(unit) == 0 and float(unit) == 1.0:
            return name
        return self.add("Mul", [name, self.constant(f"{name}_unit", unit)])

    def quantized(self, tensor: str, quantizer: Quantizer, range_: str | None, low: str | None) -> str:
        """The tensor on the quantizer's grid, with its range from parameters if they are given."""
        kind = quantizer.kind
        first, last = kind.codes
        wide = range_ or self.constant("range", quantizer.range)
        tiny = self.constant("tiny", np.float32(TINY))
        positive = self.add("Clip", [wide, tiny])
        scale = self.add("Div", [positive, self.constant("steps", np.float32(_steps(kind)))])
        if kind.symmetric:
            zero = self.constant("zero", np.full(quantizer.range.shape, kind.zero, np.float32))
        else:
            below = self.add("Div", [low or self.constant("lowest", quantizer.low), scale])
            place = self.add("Round", [self.add("Sub", [self.constant("first", np.float32(first)), below])])
            zero = self.clip(place, first, last)
        return self.fake_quantize(tensor, scale, zero, (first, last), quantizer.axis)

    def fake_quantize(self, tensor: str, scale: str, zero: str, codes: tuple[int, int], axis: int | None) -> str:
        """The tensor on a grid, differentiable straight through the rounding."""
        extra = {} if axis is None else {"axis": axis}
        return self.add("FakeQuantize", [tensor, scale, zero], DOMAIN, low=codes[0], high=codes[1], **extra)

    def clip(self, tensor: str, low: float, high: float) -> str:
        """The tensor within bounds."""
        bounds = [self.constant("bound", np.float32(value)) for value in (low, high)]
        return self.add("Clip", [tensor, *bounds])

    def mean(self, tensor: str) -> str:
        """The mean of all elements."""
        return self.add("ReduceMean", [tensor], keepdims=0)

    def squared_error(self, tensor: str, target: str, energy: float) -> str:
        """The mean squared difference, relative to an energy."""
        gap = self.add("Sub", [tensor, target])
        whole = self.mean(self.add("Mul", [gap, gap]))
        return self.add("Mul", [whole, self.constant("share", np.float32(1 / max(energy, 1e-30)))])

    def finish(self, loss: str) -> onnx.ModelProto:
        """The model with this loss as its output."""
        self.nodes.append(helper.make_node("Identity", [loss], [LOSS], name=LOSS))
        output = helper.make_tensor_value_info(LOSS, TensorProto.FLOAT, [])
        used = {name for node in self.nodes for name in node.input}
        constants = [tensor for tensor in self.constants if tensor.name in used]
        graph = helper.make_graph(self.nodes, "loss", self.inputs, [output], constants)
        opsets = [helper.make_opsetid("", self.opset), helper.make_opsetid(DOMAIN, 1)]
        model: onnx.ModelProto = helper.make_model(graph, opset_imports=opsets)
        model.ir_version = min(self.source.ir_version, 10)
        return model

    def _fresh(self, name: str) -> str:
        self._count += 1
        return f"{name}:{self._count}"
