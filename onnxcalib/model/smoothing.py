"""Where channels can be scaled before products of matrices, so that outliers lie in weights and not in activations.

What makes the channels is divided by factors, and the rows of the weights that read them are multiplied: the function
stays. Three makers are linear in their channels: a norm, the up projection of a gated product, and the values of
attention, which mixes positions and leaves channels where they are.
"""

from __future__ import annotations

import enum
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import onnx
from onnx import numpy_helper

from onnxcalib.model.attention import is_product
from onnxcalib.model.external import values_of
from onnxcalib.model.graph import GraphIndex
from onnxcalib.model.io import copied
from onnxcalib.model.layers import Layer, find_layers
from onnxcalib.model.patterns import Norm, find_norms
from onnxcalib.model.prepare import Model

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]
Smoothing = Mapping[str, IntArray]  # by the node that makes the channels, in quarters of a factor of two

QUARTERS = 4
DIGITS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"  # one tells an exponent
MOST = len(DIGITS) // 2 - 1  # quarters, up or down
METADATA = "onnxcalib.smoothing"
# What moves heads about, between values and their product with the shares, and after it.
MOVING_OPS = ("Reshape", "Transpose", "Squeeze", "Unsqueeze", "Expand", "Identity", "Flatten")


class SiteKind(enum.StrEnum):
    """What makes the channels."""

    NORM = "norms"
    UP = "up projections"
    VALUES = "value projections"


@dataclass(frozen=True)
class Site:
    """Channels that only products of matrices read, and the constants that make them."""

    name: str  # of the node that makes them
    kind: SiteKind
    tensor: str  # what the layers read, channels last
    made_by: tuple[str, ...]  # initialisers that are divided, along their last axis or that of output channels
    readers: tuple[Layer, ...]
    channels: int  # that are made
    places: IntArray  # for each channel that is read, the one that was made
    transposed: bool = False  # the first of them has its output channels first

    def read(self, factors: FloatArray) -> FloatArray:
        """The factors of what is read."""
        return factors[self.places]


def find_sites(model: Model, layers: Sequence[Layer] | None = None) -> list[Site]:
    """Requires a prepared model; the sites of which some layer is among these, or of all its layers."""
    everything = find_layers(model).layers
    index = GraphIndex(model.proto.graph)
    readers: dict[str, list[Layer]] = {}
    for layer in everything:
        readers.setdefault(layer.input, []).append(layer)
    wanted = {layer.name for layer in (everything if layers is None else layers)}
    norms = {norm.output: norm for norm in find_norms(model.proto.graph)}
    made = {layer.summed: layer for layer in everything if layer.has_sums and layer.activation is None}
    found = []
    for tensor, reading in readers.items():
        if not _only_products(index, tensor, reading) or wanted.isdisjoint(layer.name for layer in reading):
            continue
        makers = (
            (_after_norm(index, norms[tensor], tuple(reading)),)
            if tensor in norms
            else (
                _after_product(index, tensor, made, tuple(reading)),
                _after_values(index, tensor, made, tuple(reading)),
            )
        )
        site = next((each for each in makers if each is not None), None)
        if site is not None and _own_constants(index, site):
            found.append(site)
    return found


def _only_products(index: GraphIndex, tensor: str, reading: Sequence[Layer]) -> bool:
    return (
        tensor not in index.outputs
        and len(_readers(index, tensor)) == len(reading)
        and all(layer.has_sums for layer in reading)
    )


def _readers(index: GraphIndex, tensor: str) -> list[onnx.NodeProto]:
    """Who reads values; a Shape reads none."""
    return [node for node in index.readers.get(tensor, []) if node.op_type not in ("Shape", "Size")]


def _only_reader(index: GraphIndex, tensor: str) -> onnx.NodeProto | None:
    readers = _readers(index, tensor)
    return readers[0] if len(readers) == 1 and tensor not in index.outputs else None


def _own_constants(index: GraphIndex, site: Site) -> bool:
    """Whether nobody else reads what is scaled; a table of embeddings must stay as its twin is."""
    own = [*site.made_by, *(layer.weight for layer in site.readers)]
    tables = [
        node.input[0] for node in index.graph.node if node.op_type == "Gather" and node.input[0] in index.initializers
    ]
    return all(len(index.readers[name]) == 1 and name not in index.outputs for name in own) and not any(
        _is_twin(index, name, table) for name in own for table in tables
    )


def _is_twin(index: GraphIndex, name: str, other: str) -> bool:
    shapes = [tuple(index.initializers[each].dims) for each in (name, other)]
    if shapes[0] not in (shapes[1], shapes[1][::-1]) or len(shapes[0]) != 2:
        return False
    first, second = index.value(name), index.value(other)
    return any(first.shape == each.shape and np.array_equal(first, each) for each in (second, second.T))


def _after_norm(index: GraphIndex, norm: Norm, reading: tuple[Layer, ...]) -> Site | None:
    channels = _rows(reading[0])
    made_by = [name for name in (norm.scale, norm.bias) if name]
    vectors = [index.initializers.get(name) for name in made_by]
    if norm.scale is None or any(each is None or math.prod(each.dims) != channels for each in vectors):
        return None
    return Site(norm.name, SiteKind.NORM, norm.output, tuple(made_by), reading, channels, np.arange(channels))


def _after_product(
    index: GraphIndex, tensor: str, made: Mapping[str, Layer], reading: tuple[Layer, ...]
) -> Site | None:
    """The factor of a gate, or the gate itself where it has no activation."""
    node = index.producers.get(tensor)
    if node is None or node.op_type != "Mul":
        return None
    for name in node.input:
        layer = made.get(name)
        if layer is not None and _only_reader(index, name) is node and layer.channels == _rows(reading[0]):
            return _from_layer(SiteKind.UP, tensor, layer, reading, np.arange(layer.channels))
    return None


def _after_values(index: GraphIndex, tensor: str, made: Mapping[str, Layer], reading: tuple[Layer, ...]) -> Site | None:
    """Back past the heads to the product with the shares, and to the layer that made its values."""
    product = index.producers.get(_past_moves(index, tensor) or "")
    if product is None or product.op_type != "MatMul" or not is_product(index, product):
        return None
    if _only_reader(index, product.output[0]) is None or _only_reader(index, product.input[1]) is None:
        return None
    layer = made.get(_past_moves(index, product.input[1]) or "")
    if layer is None or _only_reader(index, layer.summed) is None:
        return None
    places = _heads(index, layer, _rows(reading[0]))
    return None if places is None else _from_layer(SiteKind.VALUES, tensor, layer, reading, places)


def _past_moves(index: GraphIndex, tensor: str) -> str | None:
    """The tensor before all that only moves its values; None where others read it on the way."""
    while (node := index.producers.get(tensor)) is not None and node.op_type in MOVING_OPS:
        tensor = node.input[0]
        if _only_reader(index, tensor) is None:
            return None
    return tensor


def _heads(index: GraphIndex, layer: Layer, rows: int) -> IntArray | None:
    """Which channel of the values each channel that is read is: several heads may share theirs."""
    if rows == layer.channels:
        return np.arange(rows)
    split = _only_reader(index, layer.summed)
    shape = index.constant(split.input[1]) if split is not None and split.op_type == "Reshape" else None
    width = 0 if shape is None else int(shape.reshape(-1)[-1])
    if width <= 0 or rows % layer.channels or layer.channels % width:
        return None
    shared = np.repeat(np.arange(layer.channels).reshape(-1, width), rows // layer.channels, axis=0)
    return np.asarray(shared.reshape(-1), np.int64)


def _from_layer(kind: SiteKind, tensor: str, layer: Layer, reading: tuple[Layer, ...], places: IntArray) -> Site:
    made_by = (layer.weight, *([layer.bias] if layer.bias else []))
    return Site(layer.name, kind, tensor, made_by, reading, layer.channels, places, layer.transposed)


def _rows(layer: Layer) -> int:
    return layer.weight_shape[1 - layer.channel_axis]


def smoothed(model: Model, smoothing: Smoothing) -> Model:
    """The same function, but for the rounding of float32, with scaled channels; its metadata says which."""
    sites = [site for site in find_sites(model) if len(smoothing.get(site.name, ())) == site.channels]
    if not sites:
        return model
    scales: dict[str, FloatArray] = {}  # of initialisers, in a shape that broadcasts

    def scale(name: str, rank: int, axis: int, by: FloatArray) -> None:
        shape = [len(by) if place == axis % rank else 1 for place in range(rank)]
        scales[name] = scales.get(name, np.ones(1)) * by.reshape(shape)

    index = GraphIndex(model.proto.graph)
    for site in sites:
        factors = factors_of(smoothing[site.name])
        for name in site.made_by:
            rank = len(index.initializers[name].dims)
            scale(name, rank, 0 if site.transposed and rank == 2 else rank - 1, 1 / factors)
        for layer in site.readers:
            scale(layer.weight, 2, 1 - layer.channel_axis, site.read(factors))
    proto = copied(model.proto)
    for tensor in proto.graph.initializer:
        if tensor.name in scales:
            value = values_of(tensor)
            changed = (value * scales[tensor.name]).astype(value.dtype)
            tensor.CopyFrom(numpy_helper.from_array(changed, tensor.name))
    told = {site.name: _digits(smoothing[site.name]) for site in sites}
    known = {entry.key: entry.value for entry in proto.metadata_props}
    onnx.helper.set_model_props(proto, {**known, METADATA: json.dumps(told)})
    return replace(model, proto=proto)


def factors_of(exponents: IntArray) -> FloatArray:
    """What channels are divided by."""
    return np.exp2(exponents / QUARTERS)


def exponents_for(factors: FloatArray) -> IntArray:
    """The nearest that can be told."""
    return np.asarray(np.clip(np.rint(QUARTERS * np.log2(factors)), -MOST, MOST), np.int64)


def smoothing_of(proto: onnx.ModelProto) -> dict[str, IntArray]:
    """What a file says of its channels; nothing where another tool wrote it."""
    try:
        known = {entry.key: entry.value for entry in proto.metadata_props}
        told = json.loads(known.get(METADATA, "{}"))
        return {
            name: np.array([DIGITS.index(digit) - MOST for digit in digits], np.int64) for name, digits in told.items()
        }
    except (ValueError, AttributeError, TypeError):  # somebody else's use of our name
        return {}


def _digits(exponents: IntArray) -> str:
    return "".join(DIGITS[int(value) + MOST] for value in exponents)
