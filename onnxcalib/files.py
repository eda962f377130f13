"""Files: what cannot be read as one, and outputs that appear whole or not at all, never in place of an input."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import secrets
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from onnxcalib.errors import OutputError

MOST_TEXT = 256 * 2**20  # bytes of a text that is read at once; recipes and tables are far smaller
KINDS = {
    stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}  # fmt: skip
Inputs = Iterable[tuple[str, Callable[[], Iterable[Path]]]]  # what is read, by its name in a message, and its files


def check_regular(path: Path) -> int:
    """The size of a file; an OSError where it is something else: a pipe would be waited for, a device never ends."""
    try:
        found = path.stat()
    except ValueError as error:
        raise OSError(errno.EINVAL, "its name holds a null character", str(path)) from error
    if not stat.S_ISREG(found.st_mode):
        code = errno.EISDIR if stat.S_ISDIR(found.st_mode) else errno.EINVAL
        raise OSError(code, f"it is {_kind(found.st_mode)}, not a file", str(path))
    return found.st_size


def read_text(path: Path) -> str:
    """The text of a file, without the byte order mark that spreadsheets put first; OSError and UnicodeDecodeError."""
    if check_regular(path) > MOST_TEXT:
        raise OSError(errno.EFBIG, f"it is larger than {MOST_TEXT:,} bytes", str(path))
    return path.read_bytes().decode("utf-8-sig")


def check_writable(path: Path) -> None:
    """Fails now rather than after an hour of work when the output cannot be written."""
    parent = path.parent
    try:
        mode = path.stat().st_mode if path.exists() else stat.S_IFREG
        if not stat.S_ISREG(mode):
            raise OutputError(f"output {path} is {_kind(mode)}.", "Name a file.")
        if not parent.is_dir():
            raise OutputError(f"output folder {parent} does not exist.", "Create it first.")
        with tempfile.NamedTemporaryFile(dir=parent, prefix=_hidden(path), suffix=".part"):
            pass
    except (OSError, ValueError) as error:
        raise OutputError(f"output {path} cannot be written: {_reason(error)}.", "Choose another place.") from error


def check_outputs(outputs: Mapping[str, Path], inputs: Inputs, claimed: Mapping[str, Path] = {}) -> None:
    """Refuses an output that cannot be written, is an input, or is in the way of another.

    Outputs are files by option or argument; claimed are other files, and folders with all that is in them, that come
    along with these. A link counts both as itself and as what it points to.
    """
    for path in outputs.values():
        check_writable(path)
    written = {**outputs, **claimed}
    for (name, path), (other, there) in itertools.combinations(written.items(), 2):
        if _lies_in(path, there) or _lies_in(there, path):
            raise OutputError(f"{name} {path} and {other} {there} are in each other's way.", "Name another file.")
    # What is not there yet holds no input.
    standing = [(name, path, found) for name, path in written.items() if (found := _identity(path)) is not None]
    for what, files in inputs if standing else ():
        for file in files():
            own = _identity(file)
            for name, path, found in standing:
                if own == found or (name in claimed and _lies_in(file, path)):
                    raise OutputError(f"{name} {path} would overwrite {file}, which is {what}.", "Name another file.")


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary name beside the path, renamed to it at the end or removed when anything goes wrong.

    Where the path is a link, the link gives way to the file, and what it pointed to stays as it is.
    """
    check_writable(path)
    temporary = path.with_name(f"{_hidden(path)}{secrets.token_hex(4)}.part")
    try:
        temporary.touch(exist_ok=False)  # unlike mkstemp, with the permissions that the user gives to new files
        yield temporary
        _on_disk(temporary)
        temporary.replace(path)
        _on_disk(path.parent)
    except OSError as error:
        raise OutputError(f"output {path} cannot be written: {_reason(error)}.", "Free some space.") from error
    finally:
        temporary.unlink(missing_ok=True)


def _hidden(path: Path) -> str:
    """How temporary names begin; a long name has no room for more."""
    return f".{path.name[:40]}."


def _reason(error: OSError | ValueError) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def _kind(mode: int) -> str:
    return KINDS.get(stat.S_IFMT(mode), "no regular file")


def _identity(path: Path) -> tuple[int, int] | None:
    """What all names of one file share; None where there is no file."""
    try:
        found = path.stat()
    except (OSError, ValueError):
        return None
    return found.st_dev, found.st_ino


def _lies_in(path: Path, other: Path) -> bool:
    """Whether a path is another or lies in it, itself or what it points to."""
    return any(there in (here, *here.parents) for here in _places(path) for there in _places(other))


def _places(path: Path) -> set[Path]:
    return {Path(os.path.realpath(path.parent)) / path.name, Path(os.path.realpath(path))}


def _on_disk(path: Path) -> None:
    """Waits until a file, or the names in a folder, would outlast a power failure."""
    if path.is_dir() and os.name == "nt":
        return  # Windows opens no folders
    handle = os.open(path, os.O_RDWR if path.is_file() else os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
