"""The loss of one layer against its float output, through its quantizers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import onnx

from onnxcalib.model.layers import Layer
from onnxcalib.model.loss_writer import LossWriter, Quantizer, scale_of
from onnxcalib.model.prepare import Model
from onnxcalib.model.subgraph import layer_model

FloatArray = npt.NDArray[np.float32]

TARGET = "target"
# The parameters of a layer's loss; each is a multiple of its unit, so that one learning rate suits all channels.
WEIGHT, BIAS, ROUNDING = "weight", "bias", "rounding"
WEIGHT_RANGE, WEIGHT_LOW = "weight_range", "weight_low"
INPUT_RANGE, INPUT_LOW = "input_range", "input_low"
# How hard AdaRound's roundings are pushed to 0 or 1, and how sharply.
STRENGTH, SHARPNESS = "strength", "sharpness"
STRETCH = (-0.1, 1.1)


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
    return values if quantizer.scheme.symmetric else {**values, low_name: quantizer.low}


def _rounding_start(loss: LayerLoss) -> FloatArray:
    """Where the stretched sigmoid gives the weights' own fractions."""
    steps = loss.weight / loss.weights.spread(scale_of(loss.weights), loss.weight.shape)
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
        grid = own.get(WEIGHT_RANGE), own.get(WEIGHT_LOW)
        weight = writer.quantized(own[WEIGHT], loss.weights, *grid, loss.weight.shape)
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
        error = writer.node("Add", [error, _undecided(writer, own[ROUNDING])])
    return writer.finish(error)


def _rounded(writer: LossWriter, loss: LayerLoss, rounding: str) -> str:
    """The weight between the grid's points below and above, as far up as the stretched sigmoid says."""
    quantizer = loss.weights
    scale = quantizer.spread(scale_of(quantizer), loss.weight.shape)
    low, high = step_bounds(quantizer, loss.weight.shape)
    floor = writer.own_number("floor", np.floor(loss.weight / scale))
    quantized = writer.node("Add", [floor, _share(writer, rounding)])
    quantized = writer.node(
        "Min", [writer.node("Max", [quantized, writer.own_number("low", low)]), writer.own_number("high", high)]
    )
    # The runtime takes a single constant into the product of matrices that follows, which then rounds otherwise.
    write = writer.number if scale.size == 1 else writer.own_number
    return writer.node("Mul", [quantized, write("scale", scale)])


def step_bounds(quantizer: Quantizer, shape: tuple[int, ...]) -> tuple[FloatArray, FloatArray]:
    """The lowest and the highest step from zero of a fixed grid."""
    first, last = quantizer.scheme.limits
    if quantizer.scheme.symmetric:
        zero = np.full(quantizer.range.shape, quantizer.scheme.zero, np.float32)
    else:
        zero = np.clip(np.rint(first - quantizer.low / scale_of(quantizer)), first, last)
    zero = quantizer.spread(np.asarray(zero, np.float32), shape)
    return np.asarray(first - zero, np.float32), np.asarray(last - zero, np.float32)


def _share(writer: LossWriter, rounding: str) -> str:
    low, high = (np.float32(value) for value in STRETCH)
    stretched = writer.node("Mul", [writer.node("Sigmoid", [rounding]), writer.number("stretch", high - low)])
    moved = writer.node("Add", [stretched, writer.number("start", low)])
    return writer.clip(moved, 0.0, 1.0)


def _undecided(writer: LossWriter, rounding: str) -> str:
    """AdaRound's regulariser: zero once every rounding is 0 or 1."""
    strength, sharpness = writer.input(STRENGTH, None), writer.input(SHARPNESS, None)
    centred = writer.node("Sub", [_share(writer, rounding), writer.number("half", np.float32(0.5))])
    spread = writer.node("Mul", [writer.node("Abs", [centred]), writer.number("two", np.float32(2))])
    # A power's slope is not finite at zero.
    decided = writer.node("Pow", [writer.clip(spread, 1e-6, 1.0), sharpness])
    left = writer.node("Sub", [writer.number("one", np.float32(1)), decided])
    return writer.node("Mul", [writer.mean(left), strength])
