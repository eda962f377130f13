"""What long work tells those who watch it, and what it keeps so that nobody does it twice."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

LOG = logging.getLogger("onnxcalib")
LOG.addHandler(logging.NullHandler())  # who wants to read it says where it goes

Progress = Callable[[str, int, int], None]  # stage, done, total


def silent(_stage: str, _done: int, _total: int) -> None:
    """Progress that nobody watches."""


@dataclass(frozen=True)
class Event:
    """Something that happened: start, stage_start, stage_end, resumed, warning."""

    name: str
    values: Mapping[str, Any]


Listener = Callable[[Event], None]


def listener_of(progress: Progress) -> Listener:
    """The method `event` of a progress that has one; others hear of warnings only. All is logged as well."""
    own: Listener = getattr(progress, "event", _warn)

    def listener(event: Event) -> None:
        _log(event)
        own(event)

    return listener


def ignore(_event: Event) -> None:
    """Nobody listens."""


def _log(event: Event) -> None:
    told = event.values
    if event.name == "warning":
        LOG.warning("%s", told["message"])
    elif event.name == "start":
        LOG.info("%s with %s samples of %s for %s", *(told[name] for name in ("model", "samples", "data", "target")))
    elif event.name == "stage_start":
        LOG.debug("%s begins", told["stage"])
    elif event.name == "stage_end":
        how = "taken from the run directory" if told["reused"] else f"{told['seconds']:.1f} s"
        LOG.info("%s: %s", told["stage"], how)
    else:
        LOG.info("%s: %s", event.name, dict(told))


def _warn(event: Event) -> None:
    if event.name == "warning":
        warnings.warn(event.values["message"], stacklevel=2)


class Checkpoint(Protocol):
    """Parts of a stage's work, by what they were computed from."""

    @property
    def scratch(self) -> Path | None:
        """Where temporary files go; None: where the system puts them."""

    def found(self, parts: Sequence[Any]) -> list[Any | None]:
        """The cached value of each part, None where there is none."""

    def put(self, part: Any, value: Any) -> None:
        """Keeps the value of a part, in place of an earlier one; may be called by several threads."""


class NullCheckpoint:
    """Keeps nothing."""

    scratch = None

    def found(self, parts: Sequence[Any]) -> list[Any | None]:
        """Nothing, for every part."""
        return [None] * len(parts)

    def put(self, part: Any, value: Any) -> None:
        """Lets go of it."""


NO_CHECKPOINT = NullCheckpoint()
