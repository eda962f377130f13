"""The cores of this machine, and work shared among them."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
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


def ahead(work: Callable[[Item], Found], items: Iterable[Item], threads: int) -> Iterator[Found]:
    """What each item comes to, in their order; so many are worked on at once, and no more wait in memory."""
    with ThreadPoolExecutor(threads) as pool:
        running: deque[Future[Found]] = deque()
        for item in items:
            running.append(pool.submit(work, item))
            if len(running) == threads:
                yield running.popleft().result()
        while running:
            yield running.popleft().result()
