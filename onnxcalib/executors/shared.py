"""Values that many jobs read: they move once to each process, and are known there by their content."""

from __future__ import annotations

import contextlib
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from onnxcalib.executors import wire

KEPT = 2  # values in a process that works for others: of the stage that runs, and of the one before


class MissingError(Exception):
    """A process was not given the value that its job reads."""


class Shared:
    """A value of this process; another one gets the name of a file that holds it, written when it is first asked."""

    def __init__(self, value: Any, stack: contextlib.ExitStack, scratch: Path | None) -> None:
        self.value, self._stack, self._scratch = value, stack, scratch
        self._file: tuple[Path, str] | None = None
        self._lock = threading.Lock()

    @property
    def file(self) -> tuple[Path, str]:
        """Where the value lies for others, and the name of its content."""
        with self._lock:
            if self._file is None:
                folder = tempfile.TemporaryDirectory(prefix="onnxcalib_", dir=self._scratch)
                self._file = wire.write(self.value, Path(self._stack.enter_context(folder)))
            return self._file

    def __reduce__(self) -> tuple[type[Received], tuple[str, str]]:
        path, key = self.file
        return Received, (str(path), key)


class Received:
    """The same value, seen from another process."""

    def __init__(self, path: str, key: str) -> None:
        self._path, self._key = Path(path), key

    @property
    def value(self) -> Any:
        """The value, read once."""
        return _known(self._key, self._load)

    def _load(self) -> Any:
        try:
            return wire.read(self._path)
        except OSError as error:  # this process lives on another machine
            raise MissingError(self._key) from error


class Delivered:
    """A value that comes with the job, for a process which answered that it is missing there."""

    def __init__(self, content: bytes, key: str) -> None:
        self._content, self._key = content, key

    @property
    def value(self) -> Any:
        """The value, unpacked once."""
        return _known(self._key, lambda: wire.unpacked(self._content))


_VALUES: OrderedDict[str, Any] = OrderedDict()
_LOCK = threading.Lock()


def _known(key: str, load: Callable[[], Any]) -> Any:
    with _LOCK:
        if key not in _VALUES:
            while len(_VALUES) >= KEPT:
                _VALUES.popitem(last=False)
            _VALUES[key] = load()
        _VALUES.move_to_end(key)
        return _VALUES[key]


@contextlib.contextmanager
def sharing(value: Any, scratch: Path | None) -> Iterator[Shared]:
    """The value for jobs, as long as the block runs."""
    with contextlib.ExitStack() as stack:
        yield Shared(value, stack, scratch)
