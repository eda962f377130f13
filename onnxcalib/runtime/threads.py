"""The cores of this machine, and work shared among them."""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextvars import copy_context
from functools import partial
from typing import TypeVar

Item = TypeVar("Item")
Found = TypeVar("Found")


def default_workers() -> int:
    """One for each core."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def in_threads(work: Callable[[Item], Found], items: Iterable[Item]) -> list[Found]:
    """What each item comes to, in their order; NumPy lets other threads run while it computes."""
    with contextlib.closing(_Gate()) as gate, ThreadPoolExecutor(default_workers()) as pool:
        return list(pool.map(partial(gate.through, work), items))


def ahead(work: Callable[[Item], Found], items: Iterable[Item], threads: int) -> Iterator[Found]:
    """What each item comes to, in their order; so many are worked on at once, and no more wait in memory."""
    with contextlib.closing(_Gate()) as gate, ThreadPoolExecutor(threads) as pool:
        running: deque[Future[Found]] = deque()
        for item in items:
            running.append(pool.submit(gate.through, work, item))
            if len(running) == threads:
                yield running.popleft().result()
        while running:
            yield running.popleft().result()


class _Gate:
    """Work goes through until it is closed, which waits for what is under way.

    An interrupt can strike inside the pool, which then forgets a thread that may write to a folder that goes next.
    """

    def __init__(self) -> None:
        self._changed, self._context = threading.Condition(), copy_context()
        self._inside, self._closed = 0, False

    def through(self, work: Callable[[Item], Found], item: Item) -> Found:
        """The work, unless it comes too late."""
        with self._changed:
            if self._closed:
                raise CancelledError
            self._inside += 1
        try:
            # In the caller's context, with the provider that it chose; no context can be entered twice at a time.
            return self._context.copy().run(work, item)
        finally:
            with self._changed:
                self._inside -= 1
                self._changed.notify_all()

    def close(self) -> None:
        """Nothing goes through any more."""
        with self._changed:
            self._closed = True
            self._changed.wait_for(lambda: self._inside == 0)
