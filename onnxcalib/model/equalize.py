"""Channels of a tensor brought nearer to one range: layers that make them are scaled, and layers that read them.

Before a depthwise layer that costs nothing: the layer that makes a channel and the one that reads it both have a weight
scale for it. Other layers that read it take quiet channels over into their weights.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import onnx
from onnx import numpy_helper

from onnxcalib.model.channel_groups import ChannelGroup, find_channel_groups, inputs_of
from onnxcalib.model.external import values_of
from onnxcalib.model.fold import BatchNorm
from onnxcalib.model.io import copied
from onnxcalib.model.layers import Layer, find_layers
from onnxcalib.model.prepare import Model
from onnxcalib.model.smoothing import smoothed, smoothing_of
from onnxcalib.targets import Target

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float32]
Exponents = Mapping[str, IntArray]  # by layer that makes channels, in quarters

QUARTERS = 4  # to a factor of two
DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"  # one tells an exponent
MOST = len(DIGITS) - 1  # quarters
METADATA = "onnxcalib.channel_exponents"
LONGEST = 2**26  # of that, unpacked
ONE = np.ones(1, np.float32)


def find_equalization_groups(model: Model, layers: Sequence[Layer], target: Target) -> list[ChannelGroup]:
    """The groups that can be equalized, given the layers that are quantized."""
    if target.float_activations or not target.has_channels("Conv"):
        return []
    names = {layer.name for layer in layers}
    groups = find_channel_groups(model, find_layers(model).layers)
    return [
        group
        for group in groups
        if all(layer.name in names for layer in (*group.makers, *group.readers))
        and all(target.has_channels(layer.op) for layer in group.makers)
    ]


def factors_of(exponents: IntArray) -> FloatArray:
    """What channels are multiplied by."""
    return np.exp2(exponents / QUARTERS).astype(np.float32)


def equalized(model: Model, exponents: Exponents) -> Model:
    """The same function, but for the rounding of float32, with scaled channels; its metadata says which."""
    if not exponents:
        return model
    groups = find_channel_groups(model, find_layers(model).layers)
    groups = [group for group in groups if _fits(group, exponents)]
    made: dict[str, FloatArray] = {}
    scales: dict[str, FloatArray] = {}  # of initialisers, in a shape that broadcasts
    for group in groups:
        factors = factors_of(exponents[group.makers[0].name])
        for layer in group.makers:
            made[layer.name] = factors
            scales[layer.weight] = scales.get(layer.weight, ONE) * _of_outputs(layer, factors)
            if layer.bias is not None:
                scales[layer.bias] = factors
        for layer in group.readers:
            scales[layer.weight] = scales.get(layer.weight, ONE) / _of_inputs(layer, factors)
    proto = copied(model.proto)
    for tensor in proto.graph.initializer:
        if tensor.name in scales and (scales[tensor.name] != 1).any():
            value = values_of(tensor)
            tensor.CopyFrom(numpy_helper.from_array((value * scales[tensor.name]).astype(value.dtype), tensor.name))
    told = {name: "".join(DIGITS[value] for value in exponents[name]) for name in made}
    packed = base64.b85encode(zlib.compress(json.dumps(told).encode(), 9)).decode()  # digits take a third of it
    onnx.helper.set_model_props(proto, {**properties(proto), METADATA: packed})
    norms = {
        name: BatchNorm(norm.gamma * made[name], norm.beta * made[name], norm.eps) if name in made else norm
        for name, norm in model.batch_norms.items()
    }
    return replace(model, proto=proto, batch_norms=norms)


def _fits(group: ChannelGroup, exponents: Exponents) -> bool:
    """Whether there is an exponent for each channel, of all layers that make it the same."""
    told = [exponents.get(maker.name) for maker in group.makers]
    wanted = told[0]
    if wanted is None or len(wanted) != group.channels:
        return False
    return all(each is not None and np.array_equal(each, wanted) for each in told)


def _of_outputs(layer: Layer, factors: FloatArray) -> FloatArray:
    """Factors of what a layer makes, in a shape that its weight takes."""
    shape = [1] * len(layer.weight_shape)
    shape[layer.channel_axis] = len(factors)
    return factors.reshape(shape)


def _of_inputs(layer: Layer, factors: FloatArray) -> FloatArray:
    """The same of what it reads: a flattened map has several values of a channel, a group of a Conv some channels."""
    if layer.op == "Gemm":
        spread = np.repeat(factors, inputs_of(layer) // len(factors))
        return spread[None, :] if layer.channel_axis == 0 else spread[:, None]
    rows = np.repeat(factors.reshape(layer.groups, -1), layer.channels // layer.groups, axis=0)
    return rows.reshape(*rows.shape, *[1] * (len(layer.weight_shape) - 2))


def equalization_in_words(proto: onnx.ModelProto) -> list[str]:
    """Whose channels a file has scaled."""
    words = []
    if scaled := exponents_of(proto):
        words.append(f"channels of {len(scaled)} layers")
    if sites := smoothing_of(proto):
        words.append(f"{len(sites)} norms and projections before products that read outliers")
    return words


def equalized_as(model: Model, file: onnx.ModelProto) -> Model:
    """The float model with its channels scaled as they are in a file that was made from it."""
    return smoothed(equalized(model, exponents_of(file)), smoothing_of(file))


def exponents_of(proto: onnx.ModelProto) -> dict[str, IntArray]:
    """What a file says of its channels; nothing where another tool wrote it."""
    try:
        packed = properties(proto).get(METADATA)
        if packed is None:
            return {}
        told = json.loads(zlib.decompressobj().decompress(base64.b85decode(packed), LONGEST))
        return {name: np.array([DIGITS.index(digit) for digit in digits], np.int64) for name, digits in told.items()}
    except (ValueError, AttributeError, TypeError, RecursionError, zlib.error):  # somebody else's use of our name
        return {}


def properties(proto: onnx.ModelProto) -> dict[str, str]:
    """The metadata of a file."""
    return {entry.key: entry.value for entry in proto.metadata_props}
