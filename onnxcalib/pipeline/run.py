"""One run of a pipeline: who hears of it, and where the values of its stages are cached."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from onnxcalib.cache.codec import digest
from onnxcalib.cache.run_directory import RunDirectory
from onnxcalib.progress import Listener, ignore


@dataclass(frozen=True)
class Run:
    """The stages of one graph; without a run directory, nothing is cached."""

    listener: Listener = ignore
    directory: RunDirectory | None = None
    origin: Callable[[], str] = str  # names the model, the data, the target and the software

    def changed_by(self, value: Any) -> Run:
        """The run of a model that was changed by what a stage found."""
        return replace(self, origin=lambda: digest(self.origin(), value))


UNWATCHED = Run()
