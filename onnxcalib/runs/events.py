"""What a run tells those who watch it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from onnxcalib.stages.calibrate import Progress


@dataclass(frozen=True)
class Event:
    """Something that happened: start, stage_start, stage_end, resumed, warning."""

    name: str
    values: Mapping[str, Any]


Tell = Callable[[Event], None]


def teller(progress: Progress) -> Tell:
    """The method `tell` of a progress that has one; others hear of warnings only."""
    tell: Tell = getattr(progress, "tell", _warn)
    return tell


def _warn(event: Event) -> None:
    if event.name == "warning":
        warnings.warn(event.values["message"], stacklevel=2)
