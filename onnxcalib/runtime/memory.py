"""How much memory a call may take: its buffers are a part of that, and its sessions give back what they do not use."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path

from onnxcalib.errors import RecipeError

UNITS = {"": 1, "B": 1, "KB": 2**10, "MB": 2**20, "GB": 2**30, "TB": 2**40}
LEAST = 256 * 2**20  # the interpreter and a runtime alone take half of it
ROOMY = 4 * 2**30  # from which on sessions keep pools of memory, which makes them faster and larger
SHARE = 24  # of what is allowed, that one buffer takes at most

# Of one call of ours, and of the jobs that it sends; no other call sees it.
_ALLOWED: ContextVar[int | None] = ContextVar("memory", default=None)


def parse_size(text: str) -> int | None:
    """Bytes, of text such as 500MB or 2GB; None if it is no size."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?B?)", text.strip().upper())
    return None if found is None or found[2] not in UNITS else int(float(found[1]) * UNITS[found[2]])


def allowed() -> int | None:
    """The bytes that the call may take, None where nobody said."""
    return _ALLOWED.get()


@contextlib.contextmanager
def bounded(memory: str | int | None) -> Iterator[None]:
    """What is computed in the block keeps to so much memory as far as it can; None changes nothing."""
    before = _ALLOWED.set(allowed() if memory is None else check_memory(memory))
    try:
        yield
    finally:
        _ALLOWED.reset(before)


def check_memory(memory: str | int) -> int:
    """The bytes, or an error that says how they are written."""
    found = memory if isinstance(memory, int) else parse_size(memory)
    if found is None:
        raise RecipeError(f"`memory={memory!r}` is no size.", "Write 2GB or 500MB.")
    if found < LEAST:
        raise RecipeError(f"`memory={memory!r}` is less than anything takes.", f"Give {LEAST // 2**20}MB or more.")
    return found


def buffer_bytes(usual: int) -> int:
    """What a buffer takes: the usual, or less where little is allowed."""
    most = allowed()
    return usual if most is None else min(usual, most // SHARE)


def has_room_for_pools() -> bool:
    """Whether sessions may keep memory for their next run."""
    most = allowed()
    return most is None or most >= ROOMY


def peak_bytes() -> int | None:
    """The most that this process took so far, None where the system does not tell."""
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) * 2**10 for line in status if line.startswith("VmHWM"))
    except (OSError, StopIteration, ValueError):
        return None
