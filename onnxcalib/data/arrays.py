"""Arrays on disk that are mapped, not read: .npy files and the members of .npz files."""

from __future__ import annotations

import contextlib
import math
import mmap
import re
import shutil
import struct
import tempfile
import tokenize
import weakref
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np

from onnxcalib.data.spec import Array
from onnxcalib.errors import DataError

_REWRITE = "Write the file again; its copy or download may be incomplete."


def natural(path: Path) -> list[tuple[int, str]]:
    """A sort key that puts 2 before 10."""
    parts = re.split(r"([0-9]+)", path.name)
    return [(int(part), "") if index % 2 else (-1, part) for index, part in enumerate(parts)]


def map_npy(path: Path, where: str, offset: int = 0, size: int | None = None) -> Array:
    """Map the array that starts `offset` bytes into a file and takes at most `size` bytes."""
    with _readable(path), path.open("rb") as file:
        file.seek(offset)
        shape, fortran, dtype = _header(file, where)
        start = file.tell()
        end = path.stat().st_size if size is None else min(offset + size, path.stat().st_size)
    needed = math.prod(shape) * dtype.itemsize
    if end - start < needed:
        raise DataError(f"{where} is cut short: {end - start} of its {needed} bytes are there.", _REWRITE)
    if needed == 0:  # nothing cannot be mapped
        return np.empty(shape, dtype)
    return np.memmap(path, dtype, "r", start, shape, "F" if fortran else "C")


def give_back(array: Array) -> None:
    """Give mapped pages back: until then they count as this process's memory, sample after sample."""
    mapped = getattr(array, "_mmap", None)
    if mapped is not None and hasattr(mmap, "MADV_DONTNEED"):
        mapped.madvise(mmap.MADV_DONTNEED)


class Npz:
    """The members of a .npz file, by name; opening it reads only the table of contents."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with _readable(path), zipfile.ZipFile(path) as archive:
            self._members = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
        self._copies: dict[str, Path] = {}
        self.names = list(self._members)

    def title(self, name: str) -> str:
        """The array in a message."""
        return f"Array '{name}' of {self.path}"

    def header(self, name: str) -> tuple[tuple[int, ...], np.dtype[Any]]:
        """The shape and element type of an array, without its data."""
        with _readable(self.path), zipfile.ZipFile(self.path) as archive, archive.open(self._members[name]) as member:
            shape, _, dtype = _header(member, self.title(name))
        return shape, dtype

    def __getitem__(self, name: str) -> Array:
        """Map an array: where it lies if it is stored plain, else in a temporary copy, unpacked once."""
        info = self._members[name]
        with _readable(self.path):
            if info.compress_type == zipfile.ZIP_STORED and not info.flag_bits & 1:
                return map_npy(self.path, self.title(name), self._data_offset(info), info.file_size)
            if name not in self._copies:
                self._copies[name] = self._unpack(info)
            array = map_npy(self._copies[name], self.title(name))
        weakref.finalize(array, id, self)  # the copies go with this object, which stays while one is mapped
        return array

    def _data_offset(self, info: zipfile.ZipInfo) -> int:
        with self.path.open("rb") as file:
            file.seek(info.header_offset)
            header = file.read(30)
        # The local header repeats the name and has an extra field of its own; their lengths are at byte 26.
        name, extra = struct.unpack("<HH", header[26:30])
        return int(info.header_offset + 30 + name + extra)

    def _unpack(self, info: zipfile.ZipInfo) -> Path:
        with tempfile.NamedTemporaryFile(prefix="onnxcalib-", suffix=".npy", delete=False) as copy:
            path = Path(copy.name)
            weakref.finalize(self, _remove, path)
            with zipfile.ZipFile(self.path) as archive, archive.open(info) as member:
                shutil.copyfileobj(member, copy, 1 << 20)
        return path


def _header(file: IO[bytes], where: str) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    try:
        version = np.lib.format.read_magic(file)
        if version == (1, 0):
            shape, fortran, dtype = np.lib.format.read_array_header_1_0(file)
        else:  # (3, 0) exists only for structured arrays, which no model reads
            shape, fortran, dtype = np.lib.format.read_array_header_2_0(file)
        if min(shape, default=0) < 0:
            raise ValueError(f"its shape is {shape}")
    except (ValueError, TypeError, SyntaxError, tokenize.TokenError) as error:  # NumPy parses the header as Python
        raise DataError(f"{where} is not a readable NumPy array: {error}.", _REWRITE) from error
    if dtype.hasobject:
        hint = "Save it as an array of numbers; pickled objects are never loaded."
        raise DataError(f"{where} holds Python objects, not numbers.", hint)
    return shape, fortran, dtype


@contextlib.contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except (zipfile.BadZipFile, zlib.error, EOFError, struct.error) as error:
        raise DataError(f"{path} is damaged or not a .npz file: {error}.", _REWRITE) from error
    except (OSError, RuntimeError, NotImplementedError) as error:  # unreadable, encrypted, unknown compression
        raise DataError(f"{path} cannot be read: {error}.", "Check its permissions and the free disk space.") from error


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()
