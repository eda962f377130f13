"""One process a run directory: a lock that the system takes back when its process dies."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from onnxcalib.errors import OutputError


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Holds the lock, or says who does."""
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise OutputError(
            f"run directory {path.parent} cannot be written: {error.strerror}.", "Name another with --run-dir."
        ) from error
    try:
        try:
            _take(handle)
        except OSError as error:
            holder = os.read(handle, 100).decode(errors="replace").strip()
            raise OutputError(
                f"run directory {path.parent} is in use by {holder or 'another process'}.",
                "Wait for it, or name another with --run-dir.",
            ) from error
        os.ftruncate(handle, 0)
        os.write(handle, f"process {os.getpid()}".encode())
        yield
    finally:
        os.close(handle)


def _take(handle: int) -> None:
    if sys.platform == "win32":
        import msvcrt

        # A byte far behind the text, which others may still read.
        os.lseek(handle, 4096, os.SEEK_SET)
        msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)
        os.lseek(handle, 0, os.SEEK_SET)
    else:
        import fcntl

        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
