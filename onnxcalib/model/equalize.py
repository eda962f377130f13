"""Channels brought to one range before a depthwise layer.

That costs nothing: the layer that makes a channel and the one that reads it both have a weight scale for it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import onnx
from onnx import numpy_helper

from onnxcalib.model.external import values_of
from onnxcalib.model.fold import BatchNorm
from onnxcalib.model.graph import GraphIndex, activation_bounds
from onnxcalib.model.io import copied
from onnxcalib.model.layers import Layer, find_layers
from onnxcalib.model.prepare import Model
from onnxcalib.model.smoothing import smoothed, smoothing_of
from onnxcalib.targets import Target

IntArray = npt.NDArray[np.int64]
Exponents = Mapping[str, IntArray]  # by the layer that makes the channels, in quarters

QUARTERS = 4  # to a factor of two
DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"  # one tells an exponent
METADATA = "onnxcalib.channel_exponents"


@dataclass(frozen=True)
class EqualizationPair:
    """A layer whose channels only depthwise layers read."""

    maker: Layer
    readers: tuple[Layer, ...]
    limit: float  # where its activation cuts; a channel must not be brought above it


def find_equalization_pairs(model: Model, layers: Sequence[Layer], target: Target) -> list[EqualizationPair]:
    """The layers that can be equalized, given those that are quantized."""
    if target.float_activations or not target.has_channels("Conv"):
        return []
    index, by_name = GraphIndex(model.proto.graph), {layer.name: layer for layer in layers}
    found = []
    for layer in layers:
        limit = _limit(index, layer)
        nodes = index.readers.get(layer.activated, [])
        readers = [by_name[node.name] for node in nodes if node.name in by_name]
        own = [name for each in (layer, *readers) for name in (each.weight, each.bias) if name]
        if (
            layer.op == "Conv"
            and limit is not None
            and readers
            and len(readers) == len(nodes)
            and layer.activated not in index.outputs
            and all(reader.is_depthwise and reader.input == layer.activated for reader in readers)
            and all(len(index.readers[name]) == 1 for name in own)
        ):
            found.append(EqualizationPair(layer, tuple(readers), limit))
    return found


def _limit(index: GraphIndex, layer: Layer) -> float | None:
    """Where the activation cuts; None where a factor does not pass through it."""
    if layer.activation in (None, "LeakyRelu"):
        return np.inf
    bounds = activation_bounds(index.producers[layer.activated], index.constant)
    return bounds[1] if bounds is not None and bounds[0] == 0 else None


def factors_of(exponents: IntArray) -> npt.NDArray[np.float32]:
    """What channels are multiplied by."""
    return np.exp2(exponents / QUARTERS).astype(np.float32)


def equalized(model: Model, exponents: Exponents) -> Model:
    """The same function, but for the rounding of float32, with scaled channels; its metadata says which."""
    if not exponents:
        return model
    layers = find_layers(model).layers
    made = {layer.activated: layer for layer in layers if len(exponents.get(layer.name, ())) == layer.channels}
    factors = {layer.name: factors_of(exponents[layer.name]) for layer in made.values()}
    scales: dict[str, npt.NDArray[np.float32]] = {}  # of initialisers, along their first axis
    for layer in layers:
        own = factors.get(layer.name, np.ones(1, np.float32))
        read = np.ones(1, np.float32)
        if layer.input in made:
            before = made[layer.input]
            read = np.repeat(factors[before.name], layer.channels // before.channels)
        scales[layer.weight] = own / read
        if layer.bias is not None:
            scales[layer.bias] = own
    proto = copied(model.proto)
    for tensor in proto.graph.initializer:
        if tensor.name in scales and (scales[tensor.name] != 1).any():
            value = values_of(tensor)
            scale = scales[tensor.name].reshape(-1, *[1] * (value.ndim - 1))
            tensor.CopyFrom(numpy_helper.from_array((value * scale).astype(value.dtype), tensor.name))
    told = {name: "".join(DIGITS[value] for value in exponents[name]) for name in factors}
    onnx.helper.set_model_props(proto, {**properties(proto), METADATA: json.dumps(told)})
    norms = {
        name: BatchNorm(norm.gamma * factors[name], norm.beta * factors[name], norm.eps) if name in factors else norm
        for name, norm in model.batch_norms.items()
    }
    return replace(model, proto=proto, batch_norms=norms)


def equalization_in_words(proto: onnx.ModelProto) -> list[str]:
    """Whose channels a file has scaled."""
    words = []
    if scaled := exponents_of(proto):
        words.append(f"{len(scaled)} layers before depthwise ones")
    if sites := smoothing_of(proto):
        words.append(f"{len(sites)} norms and projections before products that read outliers")
    return words


def equalized_as(model: Model, file: onnx.ModelProto) -> Model:
    """The float model with its channels scaled as they are in a file that was made from it."""
    return smoothed(equalized(model, exponents_of(file)), smoothing_of(file))


def exponents_of(proto: onnx.ModelProto) -> dict[str, IntArray]:
    """What a file says of its channels; nothing where another tool wrote it."""
    try:
        told = json.loads(properties(proto).get(METADATA, "{}"))
        return {name: np.array([DIGITS.index(digit) for digit in digits], np.int64) for name, digits in told.items()}
    except (ValueError, AttributeError, TypeError):  # somebody else's use of our name
        return {}


def properties(proto: onnx.ModelProto) -> dict[str, str]:
    """The metadata of a file."""
    return {entry.key: entry.value for entry in proto.metadata_props}
