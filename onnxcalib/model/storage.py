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

from onnxcalib.model.builder import SurgeonBuilder
from onnxcalib.targets import Storage

QuantizedArray = npt.NDArray[Any]

# The ops of unpacking_nodes, and what joins the halves of four-bit rows.
UNPACKING_OPS = ("BitShift", "Mod", "Cast", "Reshape", "MatMul", "Slice", "Add", "Concat")


@dataclass(frozen=True)
class Packed:
    """Codes as planes: byte j of plane i holds bit i of eight neighbouring quantized values."""

    planes: npt.NDArray[np.uint8]  # [bits, bytes]
    low: int  # the code that is stored as zero
    shape: tuple[int, ...]
    dtype: np.dtype[Any]


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
    rows = node("Reshape", [node("Cast", [ones], to=1), constant("bit_rows", np.array([bits, -1], np.int64))])
    powers = constant(f"powers_of_{bits}_bits", (2.0 ** np.arange(bits, dtype=np.float32)).reshape(1, bits))
    sums = node("MatMul", [powers, rows])
    size = int(np.prod(packed.shape))
    if size != length * 8:
        begin, axes = constant("begin", np.array([0], np.int64)), constant("axis_one", np.array([1], np.int64))
        sums = node("Slice", [sums, begin, constant("size", np.array([size], np.int64)), axes])
    quantized = node("Add", [sums, constant(f"low_{bits}_bits", np.array(packed.low, np.float32))])
    shape = constant("shape", np.array(packed.shape, np.int64))
    return node("Reshape", [node("Cast", [quantized], to=onnx.helper.np_dtype_to_tensor_dtype(packed.dtype)), shape])
