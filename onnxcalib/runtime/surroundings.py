"""What a call chose for all that it computes, wherever that is: the provider of its sessions and its memory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

from onnxcalib.runtime.memory import allowed, bounded
from onnxcalib.runtime.providers import chosen, using


class Surroundings(NamedTuple):
    """What goes along with a job."""

    provider: str
    memory: int | None


def surroundings() -> Surroundings:
    """Those of the call at hand."""
    return Surroundings(chosen(), allowed())


@contextlib.contextmanager
def within(given: Surroundings) -> Iterator[None]:
    """A job in the surroundings of the call that sent it."""
    with using(given.provider), bounded(given.memory):
        yield
