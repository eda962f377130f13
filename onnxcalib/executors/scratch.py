"""Files that the jobs of a process make once and read many times, where those of who sent them are not at hand."""

from __future__ import annotations

import contextlib
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from pathlib import Path
from typing import Any, TypeVar

Made = TypeVar("Made")
KEPT = 2  # folders beside those in use


class _Folder:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.users = 0
        self.folder: tempfile.TemporaryDirectory[str] | None = None
        self.made: Any = None


_FOLDERS: OrderedDict[Hashable, _Folder] = OrderedDict()
_LOCK = threading.Lock()


@contextlib.contextmanager
def made_once(key: Hashable, make: Callable[[Path], Made]) -> Iterator[Made]:
    """What is made in a folder under a key, by the first job that asks for it; it stays while the block runs."""
    with _LOCK:
        entry = _FOLDERS.setdefault(key, _Folder())
        _FOLDERS.move_to_end(key)
        entry.users += 1
        _clear()
    try:
        with entry.lock:
            if entry.folder is None:
                folder = tempfile.TemporaryDirectory(prefix="onnxcalib_", dir=_place())
                entry.made = make(Path(folder.name))
                entry.folder = folder
        yield entry.made
    finally:
        with _LOCK:
            entry.users -= 1


def _clear() -> None:
    idle = [key for key, entry in _FOLDERS.items() if entry.users == 0]
    for key in idle[: max(len(idle) - KEPT + 1, 0)]:
        folder = _FOLDERS.pop(key).folder
        if folder is not None:
            folder.cleanup()


def _place() -> str | None:
    """A worker of Dask has a folder of its own, which is cleared even if the worker is killed."""
    from onnxcalib.executors.dask import worker_folder

    return worker_folder()
