"""Sessions of losses that several trainings read, one after another or at the same time."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import TypeVar, cast

Opened = TypeVar("Opened")

# Each keeps the pool of memory that its runs took.
KEPT = 16


class OpenedSessions:
    """What was opened for each key; of many, those that were asked for last. Who takes one binds a twin of it."""

    def __init__(self, most: int = KEPT) -> None:
        self._most = most
        self._opened: OrderedDict[Hashable, object] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Hashable, make: Callable[[], Opened]) -> Opened:
        """What the key stands for, made if it is not there: by two threads at once rather than one waiting."""
        with self._lock:
            found = self._opened.pop(key, None)
        if found is None:
            found = make()
        with self._lock:
            self._opened[key] = found
            while len(self._opened) > self._most:
                self._opened.popitem(last=False)
        return cast("Opened", found)

    def close(self) -> None:
        """Lets go of all of them."""
        with self._lock:
            self._opened.clear()
