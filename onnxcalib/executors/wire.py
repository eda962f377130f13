"""Values on their way to other processes: pickled, with arrays beside the text, so that a reader can map them."""

from __future__ import annotations

import hashlib
import io
import mmap
import pickle
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import onnx

from onnxcalib.model.external import embedded_tensor, has_external
from onnxcalib.model.io import PROTOBUF_LIMIT, without_weights

ALIGNED = 64  # bytes, as arrays in files are


class UnsendableError(Exception):
    """A value holds something that only this process has."""


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        """Models of any size; what the user's own script defines is unknown to a process that does not run it."""
        if isinstance(value, onnx.ModelProto) and (has_external(value) or value.ByteSize() >= PROTOBUF_LIMIT):
            weights = (embedded_tensor(tensor).SerializeToString() for tensor in value.graph.initializer)
            return _model, (without_weights(value).SerializeToString(), *weights)
        if getattr(value, "__module__", None) == "__main__" and (isinstance(value, type) or callable(value)):
            raise UnsendableError(f"{value!r} is defined in the script itself")
        return NotImplemented


def _model(bare: bytes, *weights: bytes) -> onnx.ModelProto:
    """A model whose weights are more than protobuf serializes at once."""
    model = onnx.ModelProto()
    model.ParseFromString(bare)
    for weight in weights:
        model.graph.initializer.add().ParseFromString(weight)
    return model


def packed(value: Any, buffers: list[pickle.PickleBuffer] | None = None) -> bytes:
    """The value as bytes; arrays go to the buffers, where there are any."""
    file = io.BytesIO()
    try:
        _Pickler(file, protocol=5, buffer_callback=None if buffers is None else buffers.append).dump(value)
    except (pickle.PicklingError, TypeError, AttributeError, UnsendableError) as error:
        raise UnsendableError(str(error)) from error
    return file.getvalue()


def unpacked(content: bytes, buffers: Iterable[Any] = ()) -> Any:
    """The value of bytes, and of the buffers beside them."""
    return pickle.loads(content, buffers=buffers)


def write(value: Any, folder: Path) -> tuple[Path, str]:
    """Writes a value to a file that is named after its content."""
    buffers: list[pickle.PickleBuffer] = []
    text = packed(value, buffers)
    raw = [buffer.raw() for buffer in buffers]
    total = hashlib.blake2b(text, digest_size=16)
    for part in raw:
        total.update(part)
    key = total.hexdigest()
    path = folder / key
    with path.open("wb") as file:
        pickle.dump((len(text), [part.nbytes for part in raw]), file)
        for content in (memoryview(text), *raw):
            file.seek(-(-file.tell() // ALIGNED) * ALIGNED)
            file.write(content)
    return path, key


def read(path: Path) -> Any:
    """The value of a file; its arrays are mapped, so that all processes of a machine hold them once."""
    with path.open("rb") as file:
        sizes = pickle.load(file)
        place = file.tell()
        mapped = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    parts = []
    for size in (sizes[0], *sizes[1]):
        place = -(-place // ALIGNED) * ALIGNED
        parts.append(mapped[place : place + size])
        place += size
    return pickle.loads(parts[0], buffers=parts[1:])
