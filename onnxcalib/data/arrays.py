"""Arrays on disk that are mapped, not read: .npy files and the members of .npz files."""

from __future__ import annotations

import contextlib
import io
import math
import mmap
import re
import shutil
import struct
import tempfile
import threading
import tokenize
import weakref
import zipfile
import zlib
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np

from onnxcalib.data.spec import Array
from onnxcalib.data.spool import Spool
from onnxcalib.errors import DataError, first_line
from onnxcalib.files import check_regular

_REWRITE = "Write the file again; its copy or download may be incomplete."
_HEADER = 2**14  # bytes that a header takes at most: NumPy itself takes no more than 10,000


def natural(path: Path) -> list[tuple[int, str]]:
    """A sort key that puts 2 before 10."""
    parts = re.split(r"([0-9]+)", path.name)
    return [(int(part), "") if index % 2 else (-1, part) for index, part in enumerate(parts)]


def map_npy(path: Path, where: str, offset: int = 0, size: int | None = None) -> Array:
    """Map the array that starts `offset` bytes into a file and takes at most `size` bytes."""
    with readable(path):
        whole = check_regular(path)
        with path.open("rb") as file:
            return map_at(file, where, offset, whole if size is None else min(offset + size, whole))


def map_at(file: IO[bytes], where: str, offset: int, end: int) -> Array:
    """Map the array that lies between two places of an open file."""
    file.seek(offset)
    shape, fortran, dtype, start = _header(file, where)
    start += offset
    needed = math.prod(shape) * dtype.itemsize
    if end - start < needed:
        raise DataError(f"{where} is cut short: {max(end - start, 0)} of its {needed} bytes are there.", _REWRITE)
    if needed == 0:  # nothing cannot be mapped
        return np.empty(shape, dtype)
    return mapped(file, dtype, start, shape, "F" if fortran else "C")


def mapped(
    file: str | IO[bytes], dtype: np.dtype[Any], offset: int, shape: tuple[int, ...], order: Literal["C", "F"] = "C"
) -> Array:
    """Maps an array, and remembers it, for all of them to be given back at once."""
    array = np.memmap(file, dtype, "r", offset, shape, order)
    with _LOCK:
        _MAPS.add(array._mmap)  # type: ignore[attr-defined]
    return array


def give_back(array: Array) -> None:
    """Give mapped pages back: until then they count as this process's memory, sample after sample."""
    base: Any = array
    while isinstance(base, np.ndarray) and not hasattr(base, "_mmap"):
        base = base.base
    _give_back(getattr(base, "_mmap", None))


def give_all_back() -> None:
    """The same for all that is mapped; who reads it again gets it from the file."""
    with _LOCK:
        pages = list(_MAPS)
    for each in pages:
        _give_back(each)


def _give_back(pages: mmap.mmap | None) -> None:
    if pages is not None and hasattr(mmap, "MADV_DONTNEED"):
        pages.madvise(mmap.MADV_DONTNEED)


_LOCK = threading.Lock()
_MAPS: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()


class Npz:
    """The members of a .npz file, by name; opening it reads only the table of contents."""

    def __init__(self, path: Path, spool: Callable[[], Spool] | None = None) -> None:
        self.path = path
        self._spool = spool or cache(Spool)  # several archives may share one: every file that is open counts
        with readable(path):
            check_regular(path)
            with zipfile.ZipFile(path) as archive:
                listed = archive.infolist()
        self._members = {info.filename.removesuffix(".npy"): info for info in listed}
        self._copies: dict[str, tuple[int, int]] = {}  # where they begin and end
        self.names = list(self._members)
        if len(self.names) < len(listed):
            raise DataError(f"{path} holds two arrays of one name.", _REWRITE)

    def title(self, name: str) -> str:
        """The array in a message."""
        return f"Array '{name}' of {self.path}"

    def header(self, name: str) -> tuple[tuple[int, ...], np.dtype[Any]]:
        """The shape and element type of an array, without its data."""
        with readable(self.path), zipfile.ZipFile(self.path) as archive, archive.open(self._members[name]) as member:
            shape, _, dtype, start = _header(member, self.title(name))
        self._check_size(name, self._members[name].file_size - start, math.prod(shape) * dtype.itemsize)
        return shape, dtype

    def _check_size(self, name: str, size: int, needed: int) -> None:
        """The bytes that are there are those that the shape takes, and there is room to unpack them."""
        title = self.title(name)
        if size < needed:
            raise DataError(f"{title} is cut short: {size} of its {needed} bytes are there.", _REWRITE)
        if self.is_plain(name):
            return
        if size > needed:
            raise DataError(f"{title} holds more bytes than its shape takes: {size}, not {needed}.", _REWRITE)
        if size > shutil.disk_usage(tempfile.gettempdir()).free:
            hint = "Free some space, set TMPDIR to a folder on a larger disk, or save it with np.savez."
            raise DataError(f"{title} takes {size:,} bytes when it is unpacked.", hint)

    def empty(self, name: str) -> Array:
        """An array of the same shape and type that takes no memory, to see whether it fits before it is unpacked."""
        shape, dtype = self.header(name)
        return np.broadcast_to(np.zeros((), dtype), shape)

    def __getitem__(self, name: str) -> Array:
        """Map an array: where it lies if it is stored plain, else in a temporary copy, unpacked once."""
        info, title = self._members[name], self.title(name)
        if self.is_plain(name):
            with readable(self.path):
                offset = self._data_offset(info)
            return map_npy(self.path, title, offset, info.file_size)
        with readable(self.path):
            if name not in self._copies:
                self._copies[name] = self._unpack(name)
            return map_at(self._spool().file, title, *self._copies[name])

    def is_plain(self, name: str) -> bool:
        """Whether an array lies in the file as it is: neither compressed nor encrypted."""
        info = self._members[name]
        return info.compress_type == zipfile.ZIP_STORED and not info.flag_bits & 1

    def _data_offset(self, info: zipfile.ZipInfo) -> int:
        with self.path.open("rb") as file:
            file.seek(info.header_offset)
            header = file.read(30)
        # The local header repeats the name and has an extra field of its own; their lengths are at byte 26.
        name, extra = struct.unpack("<HH", header[26:30])
        return int(info.header_offset + 30 + name + extra)

    def _unpack(self, name: str) -> tuple[int, int]:
        """Copies what the header promises."""
        self.header(name)  # which is checked first
        with (
            zipfile.ZipFile(self.path) as archive,
            archive.open(self._members[name]) as member,
            self._spool().adding() as copy,
        ):
            start = copy.tell()
            shutil.copyfileobj(member, copy, 1 << 20)
            return start, copy.tell()


def _header(file: IO[bytes], where: str) -> tuple[tuple[int, ...], bool, np.dtype[Any], int]:
    """The shape, the order, the element type, and how many bytes the header takes."""
    text = io.BytesIO(file.read(_HEADER))  # so much and no more, whatever length it claims
    try:
        version = np.lib.format.read_magic(text)
        if version == (1, 0):
            shape, fortran, dtype = np.lib.format.read_array_header_1_0(text)
        else:  # (3, 0) exists only for structured arrays, which no model reads
            shape, fortran, dtype = np.lib.format.read_array_header_2_0(text)
        if min(shape, default=0) < 0 or dtype.itemsize == 0:
            raise ValueError(f"its shape is {shape}, its type {dtype}")
        np.broadcast_shapes(shape)  # more axes than NumPy has
    except (ValueError, TypeError, SyntaxError, tokenize.TokenError, MemoryError, RecursionError) as error:
        # NumPy parses the header as Python.
        raise DataError(f"{where} is not a readable NumPy array: {first_line(error)[:200]}.", _REWRITE) from error
    if dtype.hasobject:
        hint = "Save it as an array of numbers; pickled objects are never loaded."
        raise DataError(f"{where} holds Python objects, not numbers.", hint)
    return shape, fortran, dtype, text.tell()


@contextlib.contextmanager
def readable(path: Path) -> Iterator[None]:
    """Whatever the file is or holds, an error of it is one of the data."""
    try:
        yield
    except (zipfile.BadZipFile, zlib.error, EOFError, struct.error) as error:
        raise DataError(f"{path} is damaged or not a .npz file: {first_line(error)}.", _REWRITE) from error
    except (OSError, RuntimeError, NotImplementedError, ValueError, LookupError, MemoryError) as error:
        # Unreadable, encrypted, compressed in an unknown way, or with places outside of the file.
        told = error.strerror if isinstance(error, OSError) and error.strerror else first_line(error)
        raise DataError(f"{path} cannot be read: {told}.", "Check the file, and the free disk space.") from error
