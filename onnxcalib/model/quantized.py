"""What a QDQ file holds: its quantized layers with their grids, what stays float and why, and where its bytes go."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx

from onnxcalib.errors import understanding
from onnxcalib.model.constants import LAYOUT_OPS, fold_constants
from onnxcalib.model.external import tensor_bytes
from onnxcalib.model.float_nodes import LAYER_OPS, FloatNode, other_float_nodes
from onnxcalib.model.folded import as_dequantizers
from onnxcalib.model.graph import GraphIndex, attributes
from onnxcalib.model.integer_products import DYNAMIC_QUANTIZER, as_float_layers
from onnxcalib.model.io import copied
from onnxcalib.model.layers import why_float
from onnxcalib.model.placement import ABSORBED_OPS, SAME_QPARAMS_OPS
from onnxcalib.model.prepare import name_nodes, real_inputs_only
from onnxcalib.model.storage import UNPACKING_OPS, shift_of
from onnxcalib.numerics.dynamic import BITS as DYNAMIC_BITS
from onnxcalib.numerics.quant_params import QuantParams
from onnxcalib.recipe import FLOAT_BITS

_FLOATS = (onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16)
_INTEGERS = (onnx.TensorProto.INT8, onnx.TensorProto.UINT8, onnx.TensorProto.INT16)
_QUANTIZERS = ("QuantizeLinear", "DequantizeLinear", DYNAMIC_QUANTIZER)
LEFT_OUT = "it could be quantized, but was left out: by --exclude or --include, or by the tool that wrote the file"


@dataclass(frozen=True)
class QuantizedLayer:
    """A layer whose weight is stored as quantized values; zero points that were taken off these are back on."""

    name: str
    op: str
    quantized: npt.NDArray[Any]
    weight: QuantParams
    input: QuantParams | None  # None: only the weight is quantized, or the grid is found at run time
    bias: str | None  # the element type of the bias
    stored: int  # bytes that the quantized values take in the file
    depthwise: bool
    dynamic: bool = False  # it reads a grid of eight bits that is found at run time
    shifted: bool = False  # the stored values have no zero points

    @property
    def activation_bits(self) -> int:
        """Of what it reads; 32 where that is float."""
        return DYNAMIC_BITS if self.dynamic else FLOAT_BITS if self.input is None else self.input.bits

    @property
    def bits(self) -> str:
        """Weight and activation bits, such as w4a8."""
        return f"w{self.weight.bits}a{self.activation_bits}"

    @property
    def told(self) -> str:
        """The same, and whether its range is found at run time."""
        return f"{self.bits} dynamic" if self.dynamic else self.bits


@dataclass(frozen=True)
class QuantizedFile:
    """A QDQ model with its weights unpacked, and what was read from it."""

    proto: onnx.ModelProto
    layers: tuple[QuantizedLayer, ...]
    floats: tuple[FloatNode, ...]


def read_quantized(model: onnx.ModelProto, source: str = "the quantized model") -> QuantizedFile:
    """Reads any QDQ model; the one given is not changed."""
    with understanding(source):
        return _read(model)


def _read(model: onnx.ModelProto) -> QuantizedFile:
    proto = copied(model)
    real_inputs_only(proto)
    name_nodes(proto.graph)
    whole = GraphIndex(proto.graph)
    as_dequantizers(proto.graph, lambda name: any(True for _ in _behind(whole, name)))
    as_float_layers(proto.graph)
    weights = [node for node in proto.graph.node if node.op_type == "DequantizeLinear"]
    stored = {node.output[0]: _stored_bytes(whole, node) for node in weights}
    shifts = {node.output[0]: shift_of(whole, node.input[0]) for node in weights}
    fold_constants(proto, (*LAYOUT_OPS, *UNPACKING_OPS))
    index = GraphIndex(proto.graph)
    layers, floats = [], []
    for node in proto.graph.node:
        if node.op_type not in LAYER_OPS or node.domain:
            floats.extend(other_float_nodes(index, node))
            continue
        weight = _weight_dequantizer(index, node)
        if weight is None and not _is_integer_product(index, node):
            floats.append(FloatNode(node.name, node.op_type, why_float(index, node) or LEFT_OUT))
        elif weight is not None:
            layers.append(_layer(index, node, weight, stored.get(weight.output[0], 0), shifts.get(weight.output[0])))
    return QuantizedFile(proto, tuple(layers), tuple(floats))


def _layer(
    index: GraphIndex, node: onnx.NodeProto, weight: onnx.NodeProto, stored: int, shift: npt.NDArray[Any] | None
) -> QuantizedLayer:
    quantized = index.value(weight.input[0]).astype(np.int32)
    shape = _weight_shape(index, node, quantized)
    bias = index.producers.get(node.input[2]) if len(node.input) > 2 and node.input[2] else None
    plain = len(node.input) > 2 and node.input[2] in index.initializers
    if shift is not None:
        quantized = quantized - shift
    qparams = _weight_qparams(index, weight, quantized)
    if shift is not None:
        qparams = replace(qparams, zero_point=np.asarray(-shift.reshape(qparams.scale.shape), np.int32))
    return QuantizedLayer(
        name=node.name,
        op=node.op_type,
        quantized=quantized,
        weight=qparams,
        input=_input_qparams(index, node.input[0]),
        bias="float" if plain else "int32" if bias is not None else None,
        stored=stored,
        depthwise=node.op_type == "Conv" and attributes(node).get("group", 1) > 1 and shape[1] == 1,
        dynamic=_is_dynamic(index, index.producers.get(node.input[0])),
        shifted=shift is not None,
    )


def _is_dynamic(index: GraphIndex, node: onnx.NodeProto | None) -> bool:
    """Whether it dequantizes what was quantized on a grid that was found at run time."""
    maker = None if node is None or node.op_type != "DequantizeLinear" else index.producers.get(node.input[0])
    return maker is not None and maker.op_type == DYNAMIC_QUANTIZER


def _is_integer_product(index: GraphIndex, node: onnx.NodeProto) -> bool:
    """Whether both operands are computed and quantized, as those of attention are."""
    makers = [index.producers.get(name) for name in node.input[:2]]
    return all(maker is not None and maker.op_type == "DequantizeLinear" for maker in makers)


def _weight_dequantizer(index: GraphIndex, node: onnx.NodeProto) -> onnx.NodeProto | None:
    """The DequantizeLinear of a constant that makes the node's weight."""
    maker: onnx.NodeProto | None = index.producers.get(node.input[1])
    while maker is not None and maker.op_type in ("Reshape", "Transpose"):
        maker = index.producers.get(maker.input[0])
    if maker is None or maker.op_type != "DequantizeLinear" or maker.input[0] not in index.initializers:
        return None
    return maker


def _weight_shape(index: GraphIndex, node: onnx.NodeProto, quantized: npt.NDArray[Any]) -> tuple[int, ...]:
    maker = index.producers[node.input[1]]
    if maker.op_type == "Reshape":
        target = index.constant(maker.input[1])
        return quantized.shape if target is None else tuple(int(size) for size in target)
    return quantized.shape


def _weight_qparams(index: GraphIndex, node: onnx.NodeProto, quantized: npt.NDArray[Any]) -> QuantParams:
    scale, zero, signed = _scale_and_zero(index, node)
    bits = _bits_for(quantized, signed)
    low = -(2 ** (bits - 1)) if signed else 0
    axis = attributes(node).get("axis", 1) if scale.ndim else None
    return QuantParams(scale, zero, bits, signed, low, low + 2**bits - 1, axis)


def _input_qparams(index: GraphIndex, tensor: str) -> QuantParams | None:
    """The narrowest of the quantizers in a row that a layer reads through."""
    node = index.producers.get(tensor)
    if node is None or node.op_type != "DequantizeLinear" or _is_dynamic(index, node):
        return None
    scale, zero, signed = _scale_and_zero(index, node)
    width = _width(index, node)
    low = -(2 ** (width - 1)) if signed else 0
    high = low + 2**width - 1
    clip = index.producers.get(node.input[0])
    while clip is not None and clip.op_type == "Reshape":
        clip = index.producers.get(clip.input[0])
    if clip is not None and clip.op_type == "Clip":
        bounds = [index.constant(name) for name in clip.input[1:3]]
        low = low if bounds[0] is None else int(bounds[0])
        high = high if bounds[1] is None else int(bounds[1])
    return QuantParams(scale, zero, math.ceil(math.log2(high - low + 1)), signed, low, high)


def _scale_and_zero(index: GraphIndex, node: onnx.NodeProto) -> tuple[npt.NDArray[Any], npt.NDArray[Any], bool]:
    scale = np.asarray(index.constant(node.input[1]), np.float32)
    zero = index.constant(node.input[2]) if len(node.input) > 2 and node.input[2] else None
    if zero is None:
        quantized = index.initializers.get(node.input[0])
        signed = quantized is not None and "UINT" not in onnx.TensorProto.DataType.Name(quantized.data_type)
        return scale, np.zeros(scale.shape, np.int32), signed
    return scale, zero.astype(np.int32), "uint" not in str(zero.dtype)


def _width(index: GraphIndex, node: onnx.NodeProto) -> int:
    zero = index.initializers.get(node.input[2]) if len(node.input) > 2 else None
    name = onnx.TensorProto.DataType.Name(zero.data_type) if zero is not None else "UINT8"
    return int("".join(letter for letter in name if letter.isdigit()) or 8)


def _bits_for(quantized: npt.NDArray[Any], signed: bool) -> int:
    """The fewest bits that hold all quantized values; a container says less than its contents."""
    low, high = int(quantized.min(initial=0)), int(quantized.max(initial=0))
    largest = max(high, -low - 1) if signed else high
    return max(largest.bit_length() + signed, 2)


def _stored_bytes(index: GraphIndex, node: onnx.NodeProto) -> int:
    """The largest constant behind a DequantizeLinear: quantized values or planes, not what unpacks them."""
    wide = (onnx.TensorProto.INT64, onnx.TensorProto.FLOAT)
    behind = _behind(index, node.input[0])
    return max((tensor_bytes(tensor) for tensor in behind if tensor.data_type not in wide), default=0)


def _behind(index: GraphIndex, name: str) -> Iterator[onnx.TensorProto]:
    """The constants that a constant tensor is computed from; none for one that depends on an input."""
    tensor, maker = index.initializers.get(name), index.producers.get(name)
    if tensor is not None:
        yield tensor
    elif maker is not None and maker.op_type in (*LAYOUT_OPS, *UNPACKING_OPS):
        for source in maker.input:
            yield from _behind(index, source)


def bytes_by_kind(model: onnx.ModelProto) -> dict[str, int]:
    """Bytes of the constants: quantized weights, biases, scales with zero points, float values, and everything else."""
    index = GraphIndex(model.graph)
    kinds = _kinds_of_integers(index)
    for node in model.graph.node:
        if node.op_type == "Mul":
            kinds |= _kinds_of_folded(index, node) | _kinds_of_unit(index, node)
    for node in model.graph.node:
        if node.op_type in _QUANTIZERS:
            kinds |= {name: "scales and zero points" for name in node.input[1:] if name not in kinds}
    totals = dict.fromkeys(
        ("quantized weights", "integer biases", "scales and zero points", "float constants", "other"), 0
    )
    for tensor in model.graph.initializer:
        left = "float constants" if tensor.data_type in _FLOATS else "other"
        totals[kinds.get(tensor.name, left)] += tensor_bytes(tensor)
    return totals


def _kinds_of_integers(index: GraphIndex) -> dict[str, str]:
    """Quantized weights and biases, by the constants that they are computed from."""
    kinds: dict[str, str] = {}
    read = {"DequantizeLinear": slice(0, 1), "MatMulInteger": slice(1, None), "ConvInteger": slice(1, None)}
    for node in index.graph.node:
        for name in node.input[read[node.op_type]] if node.op_type in read else ():
            for tensor in _behind(index, name):
                kind = "integer biases" if tensor.data_type == onnx.TensorProto.INT32 else "quantized weights"
                kinds.setdefault(tensor.name, kind)
    return kinds


def _kinds_of_unit(index: GraphIndex, product: onnx.NodeProto) -> dict[str, str]:
    """The weight's scales that are multiplied with one that is found at run time."""
    makers = [index.producers.get(name) for name in product.input]
    if not any(maker is not None and maker.op_type == DYNAMIC_QUANTIZER for maker in makers):
        return {}
    return {name: "scales and zero points" for name in product.input if name in index.initializers}


def _kinds_of_folded(index: GraphIndex, product: onnx.NodeProto) -> dict[str, str]:
    """The codes and the scales of a constant that becomes float at load, or row by row as it is looked up."""
    cast, scale = index.producers.get(product.input[0]), product.input[1]
    while cast is not None and cast.op_type == "Sub":
        cast = index.producers.get(cast.input[0])
    if cast is None or cast.op_type != "Cast":
        return {}
    codes, rows = cast.input[0], index.producers.get(cast.input[0])
    while rows is not None and rows.op_type in ("Concat", "Mod", "BitShift"):  # two values a byte
        rows = index.producers.get(rows.input[0])
    if rows is not None and rows.op_type == "Gather":
        codes, factors = rows.input[0], index.producers.get(scale)
        scale = scale if factors is None else factors.input[0]
    integers = [tensor.name for tensor in _behind(index, codes) if tensor.data_type in _INTEGERS]
    if not integers:
        return {}
    return {**dict.fromkeys(integers, "quantized weights"), scale: "scales and zero points"}


def float_constants(model: onnx.ModelProto, count: int = 5) -> list[tuple[str, int, str]]:
    """The largest float constants that are no scales: their names, bytes, and the node that reads them."""
    index = GraphIndex(model.graph)
    found = []
    for tensor in model.graph.initializer:
        readers = index.readers.get(tensor.name, [])
        quantizers = all(
            node.op_type in _QUANTIZERS or _kinds_of_folded(index, node) or _kinds_of_unit(index, node)
            for node in readers
        )
        if tensor.data_type == onnx.TensorProto.FLOAT and readers and not quantizers:
            found.append((tensor.name, tensor_bytes(tensor), readers[0].name or readers[0].op_type))
    return sorted(found, key=lambda entry: -entry[1])[:count]


def float_ops(file: QuantizedFile) -> dict[str, list[str]]:
    """Nodes beside layers that compute with unquantized values, by op; what a quantizer absorbs is left out."""
    index = GraphIndex(file.proto.graph)
    found: dict[str, list[str]] = {}
    for node in file.proto.graph.node:
        makers = [index.producers.get(name) for name in node.input]
        if node.op_type in (*LAYER_OPS, *_QUANTIZERS) or not any(makers):
            continue
        integer = any(maker is not None and maker.op_type in _QUANTIZERS for maker in makers)
        readers = index.readers.get(node.output[0], [])
        absorbed = node.op_type in ABSORBED_OPS and all(reader.op_type == "QuantizeLinear" for reader in readers)
        if not integer and not absorbed and node.op_type not in SAME_QPARAMS_OPS:
            found.setdefault(node.op_type, []).append(node.name)
    return found
