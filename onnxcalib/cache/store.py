"""Values in files, each whole and with a checksum, or not there at all."""

from __future__ import annotations

import contextlib
import json
import threading
import time
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from onnxcalib.cache.codec import UnpackError, checksum, pack, unpack
from onnxcalib.data.arrays import Npz, give_back
from onnxcalib.errors import DataError, OutputError, first_line
from onnxcalib.files import check_regular, replacing
from onnxcalib.numerics.quant_params import Array

FORMAT = "onnxcalib value 1"
TOLD = ("format", "stage", "key", "when", "about")  # of every value
SUFFIX = ".npz"
LARGE_VALUE, LARGE_ARRAY = 2**28, 2**16  # bytes of a file, and of an array in it that is worth mapping


class DamagedError(OutputError):
    """A stored value is not what was written."""


@dataclass(frozen=True)
class Entry:
    """One stored value; what it says of itself, None where it is damaged."""

    path: Path
    bytes: int
    header: dict[str, Any] | None


class Store:
    """A folder of values by key."""

    def __init__(self, folder: Path, classes: Mapping[str, type] = {}, large: int = LARGE_VALUE) -> None:
        self.folder, self.classes = folder, classes  # of the values, by name
        self.large = large  # bytes of a file from which on its arrays are mapped, not read
        self._one_writer = threading.Lock()

    def put(self, stage: str, key: str, value: Any, **more: Any) -> None:
        """Writes the value under a temporary name, makes sure that it lies on the disk, and renames it."""
        arrays: list[Array] = []
        tree = json.dumps(pack(value, arrays))
        when = time.strftime("%Y-%m-%d %H:%M:%S")
        header = json.dumps({"format": FORMAT, "stage": stage, "key": key, "when": when, "about": "", **more})
        named = {f"a{number}": array for number, array in enumerate(arrays)}
        texts = {"header": header, "tree": tree, "checksum": checksum(header + tree, arrays)}
        with self._one_writer, replacing(self.path(stage, key)) as temporary:
            _write(temporary, {name: _as_bytes(text) for name, text in texts.items()} | named)

    def get(self, stage: str, key: str) -> Any | None:
        """The value, None where there is none."""
        path = self.path(stage, key)
        if not path.exists() and not path.is_symlink():
            return None
        header, tree, arrays = _read(path, self.large)
        if header["key"] != key:
            raise DamagedError(f"{path} holds the value of another key.")
        try:
            return unpack(json.loads(tree), arrays, self.classes)
        except (UnpackError, ValueError, RecursionError) as error:
            raise DamagedError(f"{path} is damaged: {first_line(error)}.") from error

    def path(self, stage: str, key: str) -> Path:
        """The file of a value."""
        return self.folder / f"{stage.replace(' ', '_')}-{key}{SUFFIX}"

    def entries(self) -> Iterator[Entry]:
        """All values, each read and checked."""
        for path in sorted(self.folder.glob(f"*{SUFFIX}")):
            try:
                header = _read(path, self.large)[0]
            except DamagedError:
                header = None
            yield Entry(path, path.stat().st_size, header)


def _read(path: Path, least: int) -> tuple[dict[str, Any], str, list[Array]]:
    try:
        file = Npz(path)
        if not all(map(file.is_plain, file.names)):  # as it was written; what is packed may be larger than all memory
            raise DamagedError(f"{path} is damaged: it is compressed.")
        header, tree, wanted = (file[name].tobytes().decode() for name in ("header", "tree", "checksum"))
        mapped = (file[f"a{number}"] for number in range(len(file.names) - 3))
        large = check_regular(path) >= least
        arrays = [np.asarray(array) if large and array.nbytes >= LARGE_ARRAY else np.array(array) for array in mapped]
    except DataError as error:
        if isinstance(error.__cause__, PermissionError):
            raise OutputError(error.message, "Check its permissions.") from error
        raise DamagedError(f"{path} is damaged: it cannot be read.") from error
    except (ValueError, KeyError, MemoryError) as error:
        raise DamagedError(f"{path} is damaged: it cannot be read.") from error
    if checksum(header + tree, arrays) != wanted:
        raise DamagedError(f"{path} is damaged: its checksum differs.")
    return _told(path, header), tree, arrays


def _told(path: Path, header: str) -> dict[str, Any]:
    """What a value says of itself; what has a good checksum may still be of somebody else."""
    with contextlib.suppress(ValueError, RecursionError):
        told = json.loads(header)
        if isinstance(told, dict) and all(isinstance(told.get(name), str) for name in TOLD):
            return told
    raise DamagedError(f"{path} is damaged: it does not say what it is.")


def _write(path: Path, arrays: Mapping[str, Array]) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                np.lib.format.write_array(file, array, allow_pickle=False)
            give_back(array)


def _as_bytes(text: str) -> Array:
    return np.frombuffer(text.encode(), np.uint8)
