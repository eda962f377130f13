"""How integer weights lie in the file: plain bytes, int4, or bit planes that the runtime unpacks once, at load."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx_graphsurgeon as gs
from onnx.helper import np_dtype_to_tensor_dtype

from onnxcalib.model.builder import SurgeonBuilder
from onnxcalib.model.graph import GraphIndex
from onnxcalib.targets import Storage

QuantizedArray = npt.NDArray[Any]
FLOAT_TYPE = 1

# The ops of unpacking_nodes, and what joins the halves of four-bit rows.
UNPACKING_OPS = ("BitShift", "Mod", "Cast", "Reshape", "MatMul", "Slice", "Add", "Concat")


@dataclass(frozen=True)
class Packed:
    """Codes as planes: byte j of plane i holds bit i of eight neighbouring quantized values."""

    planes: npt.NDArray[np.uint8]  # [bits, bytes]
    low: int  # the code that is stored as zero
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    shift: npt.NDArray[np.int8] | None = None  # what is added to the codes of each channel


def pack(quantized: QuantizedArray, bits: int, low: int) -> Packed:
    """Packs quantized values low .. low + 2^bits - 1."""
    flat = quantized.astype(np.int32).reshape(-1) - low
    padded = np.zeros(-(-flat.size // 8) * 8, np.uint8)
    padded[: flat.size] = flat
    planes = np.stack([np.packbits((padded >> bit) & 1, bitorder="little") for bit in range(bits)])
    return Packed(planes, low, quantized.shape, quantized.dtype)


def stored_bytes(shape: Sequence[int], bits: int, storage: Storage) -> int:
    """What a weight's quantized values take in the file; planes with the constants that unpack them to its shape."""
    size = math.prod(shape)
    if storage is Storage.BIT_PLANES and bits < 8:
        return bits * math.ceil(size / 8) + 8 * len(shape) + 8
    four = storage in (Storage.INT4, Storage.INT4_CAST) and bits == 4
    return math.ceil(size / 2) if four else size


def store_int4(graph: onnx.GraphProto, quantized: Mapping[str, QuantizedArray]) -> None:
    """Replaces initialisers by int4 tensors; the surgeon's graph can hold none."""
    for tensor in graph.initializer:
        if tensor.name in quantized:
            flat = quantized[tensor.name].astype(np.int8).reshape(-1)
            nibbles = np.zeros(-(-flat.size // 2) * 2, np.uint8)
            nibbles[: flat.size] = flat.view(np.uint8) & 15
            tensor.data_type = onnx.TensorProto.INT4
            tensor.raw_data = (nibbles[0::2] | nibbles[1::2] << 4).tobytes()


def shared_plane_bytes(widths: Collection[int]) -> int:
    """What weights of these widths share to be unpacked: shifts, slice bounds, and for each width its powers of two."""
    narrow = [bits for bits in widths if bits < 8]
    return sum(20 + 4 * bits for bits in narrow) + (25 if narrow else 0)


def unpacking_nodes(build: SurgeonBuilder, packed: Packed, name: str) -> gs.Variable:
    """Standard ops of opset 13 that rebuild the integers; runtimes fold them, for all their inputs are constant."""
    bits, length = packed.planes.shape
    node, constant = build.short, build.constant
    planes = constant(f"{name}_planes", packed.planes.reshape(bits, length, 1))
    shifts = constant("bit_shifts", np.arange(8, dtype=np.uint8).reshape(1, 1, 8))
    shifted = node("BitShift", [planes, shifts], direction="RIGHT")
    ones = node("Mod", [shifted, constant("two", np.array(2, np.uint8))])
    rows = node("Reshape", [node("Cast", [ones], to=FLOAT_TYPE), constant("bit_rows", np.array([bits, -1], np.int64))])
    powers = constant(f"powers_of_{bits}_bits", (2.0 ** np.arange(bits, dtype=np.float32)).reshape(1, bits))
    sums = node("MatMul", [powers, rows])
    size = int(np.prod(packed.shape))
    if size != length * 8:
        begin, axes = constant("begin", np.array([0], np.int64)), constant("axis_one", np.array([1], np.int64))
        sums = node("Slice", [sums, begin, constant("size", np.array([size], np.int64)), axes])
    shape, dtype = constant("shape", np.array(packed.shape, np.int64)), np_dtype_to_tensor_dtype(packed.dtype)
    if packed.shift is not None:
        lowest = node("Cast", [constant(f"{name}_lowest", packed.shift + np.int8(packed.low))], to=FLOAT_TYPE)
        return node("Cast", [node("Add", [node("Reshape", [sums, shape]), lowest])], to=dtype)
    quantized = node("Add", [sums, constant(f"low_{bits}_bits", np.array(packed.low, np.float32))])
    return node("Reshape", [node("Cast", [quantized], to=dtype), shape])


def shift_of(index: GraphIndex, name: str) -> npt.NDArray[Any] | None:
    """What unpacking_nodes added to the values of each channel to make this tensor; None where it added nothing."""
    last = index.producers.get(name)
    adding = None if last is None or last.op_type != "Cast" else index.producers.get(last.input[0])
    if adding is None or adding.op_type != "Add":
        return None
    sums, lowest = (index.producers.get(each) for each in adding.input)
    while sums is not None and sums.op_type in ("Reshape", "Slice"):
        sums = index.producers.get(sums.input[0])
    added = None if lowest is None or lowest.op_type != "Cast" else index.constant(lowest.input[0])
    powers = None if sums is None or sums.op_type != "MatMul" else index.constant(sums.input[0])
    return None if added is None or powers is None else added.astype(np.int32) + 2 ** (powers.size - 1)
