"""Weights of large models stay in files: a tensor names the file that holds its values, which are mapped when read."""

from __future__ import annotations

import math
import mmap
import os
import tempfile
import threading
from collections.abc import Iterable
from functools import cache
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, external_data_helper, helper, numpy_helper

from onnxcalib.data.arrays import mapped
from onnxcalib.files import check_regular

LARGE_MODEL = 2**28  # bytes of weights; below, they lie in memory as they always did
LARGE_TENSOR = 2**20  # bytes; smaller ones cost more as a file than they save

Array = npt.NDArray[Any]


def is_external(tensor: TensorProto) -> bool:
    """Whether the values of a tensor lie in a file."""
    return bool(tensor.data_location == TensorProto.EXTERNAL)


def has_external(model: onnx.ModelProto) -> bool:
    """Whether some weights of a model lie in files."""
    return any(map(is_external, model.graph.initializer))


def values_of(tensor: TensorProto) -> Array:
    """The values of a tensor, mapped where they lie in a file: pages that are not read take no memory."""
    if not is_external(tensor):
        return numpy_helper.to_array(tensor)
    told = external_data_helper.ExternalDataInfo(tensor)
    kind = helper.tensor_dtype_to_np_dtype(tensor.data_type)
    return np.asarray(mapped(told.location, kind, int(told.offset or 0), tuple(tensor.dims)))


def tensor_bytes(tensor: TensorProto) -> int:
    """Bytes of a tensor's values, wherever they lie."""
    if is_external(tensor):
        return _wanted_bytes(tensor)
    return len(tensor.raw_data) or int(numpy_helper.to_array(tensor).nbytes)


def model_bytes(model: onnx.ModelProto) -> int:
    """Bytes of a model with all its values in it."""
    outside: int = sum(tensor_bytes(tensor) for tensor in model.graph.initializer if is_external(tensor))
    return int(model.ByteSize()) + outside


def is_large(model: onnx.ModelProto, least: int) -> bool:
    """Whether the weights of a model take so many bytes."""
    return sum(_wanted_bytes(tensor) for tensor in model.graph.initializer if _is_plain(tensor)) >= least


def keep_outside(model: onnx.ModelProto, folder: Path) -> None:
    """Leaves large weights in the files that a model of this folder names, and reads the others.

    Raises a ValueError or an OSError where such a file does not hold them.
    """
    for tensor in model.graph.initializer:
        if not is_external(tensor):
            continue
        if not _is_plain(tensor) or _wanted_bytes(tensor) < LARGE_TENSOR:
            external_data_helper.load_external_data_for_tensor(tensor, str(folder))
            continue
        told = external_data_helper.ExternalDataInfo(tensor)
        path, offset = _inside(folder, told.location, tensor.name), int(told.offset or 0)
        length = path.stat().st_size - offset if told.length is None else int(told.length)
        if length != _wanted_bytes(tensor) or offset + length > path.stat().st_size:
            raise ValueError(f"'{tensor.name}' is not whole in {told.location}")
        point_to(tensor, path, offset, length)


def move_out(model: onnx.ModelProto) -> None:
    """Takes large weights out of memory, to a file that goes with the process."""
    for tensor in model.graph.initializer:
        if len(tensor.raw_data) >= LARGE_TENSOR and _is_plain(tensor):
            _move_out(tensor, tensor.raw_data)


def refill_tensor(tensor: TensorProto, values: Array, name: str, *, outside: bool) -> None:
    """Gives a tensor other values; they go to a file of their own where large ones belong outside."""
    values = np.asarray(values, order="C")
    if outside and values.nbytes >= LARGE_TENSOR and values.dtype.kind in "fiu":
        kind = helper.np_dtype_to_tensor_dtype(values.dtype)
        tensor.CopyFrom(TensorProto(name=name, data_type=kind, dims=values.shape))
        _move_out(tensor, values.data)
    else:
        tensor.CopyFrom(numpy_helper.from_array(values, name))


def embedded(model: onnx.ModelProto) -> onnx.ModelProto:
    """A model that needs no file: itself, or a copy with the values in it, which must take less than 2 GB."""
    if not has_external(model):
        return model
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    for tensor in filter(is_external, copy.graph.initializer):
        tensor.CopyFrom(embedded_tensor(tensor))
    return copy


def embedded_tensor(tensor: TensorProto) -> TensorProto:
    """The same tensor with its values in it."""
    if not is_external(tensor):
        return tensor
    made: TensorProto = numpy_helper.from_array(values_of(tensor), tensor.name)
    return made


def relative(model: onnx.ModelProto) -> tuple[onnx.ModelProto, str]:
    """A copy whose files are named as seen from one folder, and that folder."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    places = [entry for tensor in filter(is_external, copy.graph.initializer) for entry in tensor.external_data]
    places = [entry for entry in places if entry.key == "location"]
    folder = os.path.commonpath([Path(entry.value).parent for entry in places])
    for entry in places:
        entry.value = os.path.relpath(entry.value, folder)
    return copy, folder


def names_files(model: onnx.ModelProto) -> bool:
    """Whether some weights lie in files of the user's."""
    return any(is_external(it) and not _scratch().holds(it) for it in model.graph.initializer)


def bare_inputs(tensors: Iterable[TensorProto]) -> list[onnx.ValueInfoProto]:
    """What stands for large weights where only their shapes count."""
    return [helper.make_tensor_value_info(it.name, it.data_type, it.dims) for it in tensors]


def point_to(tensor: TensorProto, path: str | Path, offset: int, length: int) -> None:
    """Makes a tensor name the file that holds its values."""
    tensor.ClearField("raw_data")
    del tensor.external_data[:]
    for key, value in {"location": path, "offset": offset, "length": length}.items():
        tensor.external_data.add(key=key, value=str(value))
    tensor.data_location = TensorProto.EXTERNAL


def _is_plain(tensor: TensorProto) -> bool:
    """Whether a tensor's values lie one after the other, each in bytes of its own that NumPy knows."""
    try:
        return bool(helper.tensor_dtype_to_np_dtype(tensor.data_type).kind in "fiu") and min(tensor.dims, default=1) > 0
    except (KeyError, ValueError):  # unknown types are refused later
        return False


def _wanted_bytes(tensor: TensorProto) -> int:
    return int(math.prod(tensor.dims) * helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize)


def _inside(folder: Path, location: str, name: str) -> Path:
    """The file that a model names, which must lie in its folder."""
    path = folder / location
    if PurePath(location).is_absolute() or ".." in PurePath(location).parts or path.is_symlink():
        raise ValueError(f"'{name}' lies outside of the model's folder")
    check_regular(path)
    return path.resolve()


def _move_out(tensor: TensorProto, values: bytes | memoryview) -> None:
    path, offset, length = _scratch().append(values)
    point_to(tensor, path, offset, length)


class _Scratch:
    """A file of values that were computed, or taken out of a model; it goes when the process ends."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="onnxcalib-")
        self._path, self._lock = Path(self._folder.name).resolve() / "weights", threading.Lock()

    def holds(self, tensor: TensorProto) -> bool:
        return bool(external_data_helper.ExternalDataInfo(tensor).location == str(self._path))

    def append(self, values: bytes | memoryview) -> tuple[Path, int, int]:
        with self._lock, self._path.open("ab") as file:
            offset = -(-file.tell() // mmap.PAGESIZE) * mmap.PAGESIZE
            file.truncate(offset)
            length = file.write(values)
        return self._path, offset, length


@cache
def _scratch() -> _Scratch:
    return _Scratch()
