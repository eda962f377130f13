"""One run of a pipeline: its stages are computed, or taken from the run directory, and told of."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from onnxcalib.recipe import Recipe
from onnxcalib.runs.events import Event, Tell
from onnxcalib.runs.folder import opened, write_about
from onnxcalib.runs.keys import options_of
from onnxcalib.runs.store import DamagedError, Store
from onnxcalib.runs.values import digest, figures
from onnxcalib.stages.memo import FORGETFUL, Memo

Value = TypeVar("Value")

# Stages that keep parts of their work; of the first, a part says itself all that it was computed from.
PARALLEL = "parallel"
IN_PARTS = {PARALLEL, "sensitivity", "allocation", "sequential", "joint", "biases"}

WORDS = {
    "parallel": "parallel training",
    "sequential": "sequential training",
    "joint": "joint training",
    "biases": "bias tuning",
}


@dataclass
class RunDirectory:
    """The run directory of all graphs of a model; it is opened when the first stage begins."""

    folder: Path
    about: Callable[[], dict[str, Any]]
    tell: Tell
    stack: contextlib.ExitStack
    reused: dict[str, str] = field(default_factory=dict)  # in the order of the stages
    announced: bool = False

    @cached_property
    def _about(self) -> dict[str, Any]:
        return self.about()

    @cached_property
    def _store(self) -> Store:
        return self.stack.enter_context(opened(self.folder, self._about, self.tell))

    def get(self, stage: str, key: str) -> Any | None:
        """A value; a damaged one is named, and computed again, for all that it takes is there."""
        try:
            return self._store.get(stage, key)
        except DamagedError as error:
            self.tell(Event("warning", {"message": f"{error.message} It is computed again."}))
            return None

    def put(self, stage: str, key: str, value: Any, **more: Any) -> None:
        """Keeps a value."""
        self._store.put(stage, key, value, about=self._about["about"], **more)

    def announce(self) -> None:
        """Says once what need not be computed."""
        if self.reused and not self.announced:
            self.tell(Event("resumed", {"reused": list(self.reused.values()), "run_dir": str(self.folder)}))
        self.announced = True

    def finish(self) -> None:
        """Says that the run came to its end."""
        self.announce()
        write_about(self.folder, {**self._about, "finished": time.strftime("%Y-%m-%d %H:%M:%S")})


def _quiet(_event: Event) -> None:
    """Nobody listens."""


@dataclass(frozen=True)
class Run:
    """The stages of one graph; without a run directory, nothing is kept."""

    tell: Tell = _quiet
    directory: RunDirectory | None = None
    origin: Callable[[], str] = str  # names the model, the data, the target and the software

    def kept(self, stage: str, recipe: Recipe, inputs: tuple[Any, ...], compute: Callable[[Memo], Value]) -> Value:
        """The stage's value, computed from the inputs and from those options that matter to it."""
        self.tell(Event("stage_start", {"stage": stage}))
        begun = time.perf_counter()
        value, reused = self._found_or_computed(stage, options_of(stage, recipe), inputs, compute)
        spent = {"stage": stage, "seconds": round(time.perf_counter() - begun, 3), "reused": reused}
        self.tell(Event("stage_end", {**spent, "found": figures(value)}))
        return value

    def _found_or_computed(
        self, stage: str, options: Mapping[str, Any], inputs: tuple[Any, ...], compute: Callable[[Memo], Value]
    ) -> tuple[Value, bool]:
        directory = self.directory
        if directory is None:
            return compute(FORGETFUL), False
        origin = self.origin()
        key = digest(origin, stage, options, inputs)
        found = directory.get(stage, key)
        if found is not None:
            directory.reused[stage] = WORDS.get(stage, stage)
            return found, True
        if stage not in IN_PARTS:
            directory.announce()
        prefix = digest(origin, stage, options, () if stage == PARALLEL else inputs)
        value = compute(Parts(directory, stage, prefix))
        directory.put(stage, key, value)
        # What goes on is what was stored, to the last bit: a resumed run sees the same.
        stored = directory.get(stage, key)
        return value if stored is None else stored, False


UNWATCHED = Run()


@dataclass(frozen=True)
class Parts:
    """Parts of one stage's work in the run directory."""

    directory: RunDirectory
    stage: str
    prefix: str

    @property
    def scratch(self) -> Path:
        """Temporary files lie in the run directory: the next run clears what a killed one left."""
        return self.directory.folder / "scratch"

    def found(self, parts: Sequence[Any]) -> list[Any | None]:
        """The kept value of each part."""
        values = [self.directory.get(self._name, self._key(part)) for part in parts]
        count = sum(value is not None for value in values)
        if count:
            share = f"{count} of {len(values)} layers" if len(values) > 1 else "the beginning"
            self.directory.reused[self.stage] = f"{share} of {WORDS.get(self.stage, self.stage)}"
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
