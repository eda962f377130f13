"""The cores of this machine, and work shared among them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Found = TypeVar("Found")


def default_workers() -> int:
    """One for each core."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def in_threads(work: Callable[[Item], Found], items: Iterable[Item]) -> list[Found]:
    """What each item comes to, in their order; NumPy lets other threads run while it computes."""
    with ThreadPoolExecutor(default_workers()) as pool:
        return list(pool.map(work, items))
