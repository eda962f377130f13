"""One process a run directory: a lock that the system takes back when its process dies."""

from __future__ import annotations

import contextlib
import os
import re
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

from onnxcalib.errors import OutputError


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Holds the lock, or says who does."""
    with _told(path):
        # What a link points to is not ours to write to, and a pipe would be waited for.
        handle = os.open(path, os.O_RDWR | os.O_CREAT | _flag("O_NOFOLLOW") | _flag("O_NONBLOCK"), 0o666)
    try:
        held = os.read(handle, 100).decode(errors="replace").strip() if stat.S_ISREG(os.fstat(handle).st_mode) else "?"
        if not re.fullmatch(r"(process \d*)?", held):
            raise _foreign(path)
        try:
            _take(handle)
        except OSError as error:
            raise OutputError(
                f"run directory {path.parent} is in use by {held or 'another process'}.",
                "Wait for it, or name another `run_dir`.",
            ) from error
        with _told(path):
            os.ftruncate(handle, 0)
            os.lseek(handle, 0, os.SEEK_SET)
            os.write(handle, f"process {os.getpid()}".encode())
        yield
    finally:
        os.close(handle)


@contextlib.contextmanager
def _told(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if path.is_symlink():
            raise _foreign(path) from error
        raise OutputError(
            f"run directory {path.parent} cannot be written: {error.strerror}.", "Name another `run_dir`."
        ) from error


def _foreign(path: Path) -> OutputError:
    return OutputError(f"{path} is no lock of a run directory.", "Move it away, or name another `run_dir`.")


def _flag(name: str) -> int:
    """A flag that Windows does not have."""
    return int(getattr(os, name, 0))


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
