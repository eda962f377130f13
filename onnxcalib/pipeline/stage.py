"""A stage: a function of a job and of values that earlier stages made, whose own value is cached.

A stage declares what it reads: its parameters are its inputs, and `reads` names the recipe's fields. The key of its
value in the run directory is made of just these, and any other field is out of its reach.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, get_type_hints

from onnxcalib.cache.codec import classes_in, digest, figures
from onnxcalib.cache.run_directory import RunDirectory, StageCheckpoint
from onnxcalib.pipeline.job import Job
from onnxcalib.progress import NO_CHECKPOINT, Checkpoint, Event
from onnxcalib.recipe import GROUPS, RECIPE_FIELDS, Recipe

Inputs = ParamSpec("Inputs")
Value = TypeVar("Value")
CHECKPOINT = "checkpoint"  # the parameter of a stage that keeps parts of its work


@dataclass(frozen=True)
class Stage(Generic[Inputs, Value]):
    """What a stage is called, what it reads, and how it is computed."""

    name: str
    title: str
    reads: frozenset[str]
    compute: Callable[Concatenate[Job, Inputs], Value]
    part: type = dict  # what the parts of its work are, where it keeps any
    parts_tell_all: bool = False  # a part of its work names all that it was computed from, so inputs do not matter

    def __call__(self, job: Job, *args: Inputs.args, **kwargs: Inputs.kwargs) -> Value:
        """The value, from the run directory if it is there."""
        assert not kwargs, "inputs are given in the order of the declaration"
        run = job.run
        run.listener(Event("stage_start", {"stage": self.name}))
        begun = time.perf_counter()
        value, reused = self._found(job, args) if run.directory is not None else (self._computed(job, args), False)
        spent = {"stage": self.name, "seconds": round(time.perf_counter() - begun, 3), "reused": reused}
        run.listener(Event("stage_end", {**spent, "found": figures(value)}))
        return value

    @property
    def keeps_parts(self) -> bool:
        """Whether the stage keeps parts of its work while it runs."""
        return CHECKPOINT in inspect.signature(self.compute).parameters

    def _found(self, job: Job, inputs: tuple[Any, ...]) -> tuple[Value, bool]:
        directory, origin = job.run.directory, job.run.origin()
        assert directory is not None
        options = {name: getattr(job.recipe, name) for name in sorted(self.reads)}
        key = digest(origin, self.name, options, inputs)
        found: Value | None = directory.get(self.name, key)
        if found is not None:
            directory.reused[self.name] = self.title
            return found, True
        if not self.keeps_parts:
            directory.announce()
        prefix = digest(origin, self.name, options, () if self.parts_tell_all else inputs)
        value = self._computed(job, inputs, StageCheckpoint(directory, self.name, self.title, prefix))
        return self._stored(directory, key, value), False

    def _stored(self, directory: RunDirectory, key: str, value: Value) -> Value:
        """What goes on is what was stored, to the last bit: a resumed run sees the same."""
        directory.put(self.name, key, value)
        stored: Value | None = directory.get(self.name, key)
        return value if stored is None else stored

    def _computed(self, job: Job, inputs: tuple[Any, ...], checkpoint: Checkpoint = NO_CHECKPOINT) -> Value:
        declared = replace(job, recipe=only(job.recipe, self.reads))
        more = {CHECKPOINT: checkpoint} if self.keeps_parts else {}
        compute: Callable[..., Value] = self.compute
        return compute(declared, *inputs, **more)


def stage(
    name: str, reads: tuple[str, ...] = (), *, title: str = "", part: type = dict, parts_tell_all: bool = False
) -> Callable[[Callable[Concatenate[Job, Inputs], Value]], Stage[Inputs, Value]]:
    """Declares a function to be a stage."""
    assert RECIPE_FIELDS.issuperset(reads), f"{name} reads what no recipe has"

    def declare(compute: Callable[Concatenate[Job, Inputs], Value]) -> Stage[Inputs, Value]:
        return Stage(name, title or name, frozenset(reads), compute, part, parts_tell_all)

    return declare


def value_classes(stages: Iterable[Stage[Any, Any]]) -> dict[str, type]:
    """All that the values of stages, and the parts of their work, are made of."""
    hints = [hint for each in stages for hint in (get_type_hints(each.compute)["return"], each.part)]
    return classes_in(*hints)


def _declared(kind: type) -> type:
    """The same dataclass, of which some fields can be read."""

    class Declared(kind):  # type: ignore[misc]
        def __getattribute__(self, name: str) -> Any:
            if name in RECIPE_FIELDS and name not in object.__getattribute__(self, "__dict__")["readable"]:
                raise AssertionError(f"a stage reads the recipe's '{name}' without declaring it")
            return super().__getattribute__(name)

    return Declared


_DECLARED: Mapping[type, type] = {kind: _declared(kind) for kind in (Recipe, *GROUPS.values())}


def only(recipe: Recipe, readable: frozenset[str]) -> Recipe:
    """The recipe without what is not declared to be read, in its groups too."""
    groups = {name: _only(getattr(recipe, name), vars(getattr(recipe, name)), readable) for name in GROUPS}
    view: Recipe = _only(recipe, vars(recipe) | groups, readable)
    return view


def _only(record: Any, values: Mapping[str, Any], readable: frozenset[str]) -> Any:
    view: Any = object.__new__(_DECLARED[type(record)])
    view.__dict__.update(values, readable=readable)
    return view
