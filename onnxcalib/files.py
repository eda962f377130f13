"""Files that appear whole or not at all."""

from __future__ import annotations

import contextlib
import os
import secrets
import tempfile
from collections.abc import Iterator
from pathlib import Path

from onnxcalib.errors import OutputError


def check_writable(path: Path) -> None:
    """Fails now rather than after an hour of work when the output cannot be written."""
    parent = path.parent
    if path.is_dir():
        raise OutputError(f"output {path} is a folder.", "Name a file.")
    if not parent.is_dir():
        raise OutputError(f"output folder {parent} does not exist.", "Create it first.")
    try:
        with tempfile.NamedTemporaryFile(dir=parent, prefix=f".{path.name}.", suffix=".part"):
            pass
    except OSError as error:
        raise OutputError(f"output {path} cannot be written: {error.strerror}.", "Choose another folder.") from error


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary name beside the path, renamed to it at the end or removed when anything goes wrong."""
    check_writable(path)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    temporary.touch(exist_ok=False)  # unlike mkstemp, with the permissions that the user gives to new files
    try:
        yield temporary
        _on_disk(temporary)
        temporary.replace(path)
        _on_disk(path.parent)
    except OSError as error:
        raise OutputError(f"output {path} cannot be written: {error.strerror}.", "Free some space.") from error
    finally:
        temporary.unlink(missing_ok=True)


def _on_disk(path: Path) -> None:
    """Waits until a file, or the names in a folder, would outlast a power failure."""
    if path.is_dir() and os.name == "nt":
        return  # Windows opens no folders
    handle = os.open(path, os.O_RDWR if path.is_file() else os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
