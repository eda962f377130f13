"""The run directory while a pipeline runs: values of stages, parts of their work, and what was found there."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from onnxcalib.cache.codec import digest
from onnxcalib.cache.folder import opened, write_about
from onnxcalib.cache.prune import BOUND, Use, prune_values
from onnxcalib.cache.store import DamagedError, Store
from onnxcalib.progress import Event, Listener


@dataclass
class RunDirectory:
    """The run directory of all graphs of a model; it is opened when the first stage begins."""

    folder: Path
    about: Callable[[], dict[str, Any]]
    listener: Listener
    stack: contextlib.ExitStack
    classes: Mapping[str, type]  # of the values, by name
    reused: dict[str, str] = field(default_factory=dict)  # in the order of the stages
    announced: bool = False

    @cached_property
    def _about(self) -> dict[str, Any]:
        return self.about()

    @cached_property
    def _store(self) -> Store:
        return self.stack.enter_context(opened(self.folder, self._about, self.listener, self.classes))

    def get(self, stage: str, key: str) -> Any | None:
        """A value; a damaged one is named, and computed again, for all that it takes is there."""
        try:
            return self._store.get(stage, key)
        except DamagedError as error:
            self.listener(Event("warning", {"message": f"{error.message} It is computed again."}))
            return None

    def put(self, stage: str, key: str, value: Any, **more: Any) -> None:
        """Keeps a value."""
        self._store.put(stage, key, value, about=self._about["about"], **more)

    def announce(self) -> None:
        """Says once what need not be computed."""
        if self.reused and not self.announced:
            self.listener(Event("resumed", {"reused": list(self.reused.values()), "run_dir": str(self.folder)}))
        self.announced = True

    def finish(self) -> None:
        """Says that the run came to its end."""
        self.announce()
        assert self._store  # opened, even where no stage had anything to keep
        write_about(self.folder, {**self._about, "finished": time.strftime("%Y-%m-%d %H:%M:%S")})
        if sum(path.stat().st_size for path in self._store.folder.iterdir()) > BOUND:
            pruned = prune_values(self.folder, self._about["about"], BOUND, uses=Use.PARTS)
            if pruned.count:
                message = (
                    f"{self.folder} held more than {BOUND / 2**30:g} GB: {pruned.count} values that this run does not "
                    f"need were removed, {pruned.freed:,} bytes."
                )
                self.listener(Event("warning", {"message": message}))

    @property
    def scratch(self) -> Path:
        """Temporary files lie in the run directory: the next run clears what a killed one left."""
        return self.folder / "scratch"


@dataclass(frozen=True)
class StageCheckpoint:
    """Parts of one stage's work in the run directory."""

    directory: RunDirectory
    stage: str
    title: str
    prefix: str

    @property
    def scratch(self) -> Path:
        """Where temporary files lie."""
        return self.directory.scratch

    def found(self, parts: Sequence[Any]) -> list[Any | None]:
        """The cached value of each part."""
        values = [self.directory.get(self._name, self._key(part)) for part in parts]
        count = sum(value is not None for value in values)
        if count:
            share = f"{count} of {len(values)} layers" if len(values) > 1 else "the beginning"
            self.directory.reused[self.stage] = f"{share} of {self.title}"
        self.directory.announce()
        return values

    def put(self, part: Any, value: Any) -> None:
        """Keeps the value of a part."""
        self.directory.put(self._name, self._key(part), value, part_of=self.stage)

    @property
    def _name(self) -> str:
        return f"{self.stage} part"

    def _key(self, part: Any) -> str:
        return digest(self.prefix, part)
