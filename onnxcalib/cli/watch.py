"""What a command shows while it runs: bars on a terminal, a log for bug reports, or events for programs."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import platform
import time
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import click
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TaskID, TimeRemainingColumn
from rich.text import Text

from onnxcalib.cli.doctor import PACKAGES
from onnxcalib.cli.ending import last_words
from onnxcalib.cli.options import PlainConsole
from onnxcalib.cli.wording import as_typed
from onnxcalib.errors import OnnxcalibWarning
from onnxcalib.progress import Event
from onnxcalib.runtime.installed import version_of

EVERY = 0.5  # seconds between two events of progress


class RateColumn(ProgressColumn):
    """How fast it goes: so many a second, or so long each."""

    def render(self, task: Task) -> Text:
        """The rate, once it is known."""
        speed = task.speed
        return Text("" if not speed else f"{speed:.1f}/s" if speed >= 1 else f"{1 / speed:.1f} s each")


class Watch:
    """Hears of progress and of events."""

    def __init__(self, bar: Progress, *, verbose: bool = False, as_json: bool = False) -> None:
        self._bar, self._verbose, self._as_json = bar, verbose, as_json
        self._tasks: dict[str, TaskID] = {}
        self._current: str | None = None  # the stage that has begun, until its own progress takes its place
        self._shown: TaskID | None = None  # the bar that moved last
        self._last = -math.inf

    def __call__(self, stage: str, done: int, total: int) -> None:
        """So much of a stage is done."""
        if self._as_json:
            now = time.monotonic()
            if done >= total or now - self._last >= EVERY:
                self._last = now
                self.event(Event("progress", {"stage": stage, "done": done, "total": total}))
            return
        if self._current is not None and self._current != stage:
            self._bar.remove_task(self._tasks.pop(self._current))
        self._current = None
        task = self._tasks.get(stage)
        if task is None:
            self._shown = self._tasks[stage] = self._bar.add_task(stage, total=total, completed=done)
            return
        self._shown = task
        if done < self._bar.tasks[self._bar.task_ids.index(task)].completed:
            self._bar.reset(task)  # the same stage of the next model
        self._bar.update(task, completed=done, total=total)

    def event(self, event: Event) -> None:
        """Something happened."""
        if self._as_json:
            click.echo(json.dumps(_finite({"event": event.name, **event.values})))
            return
        if event.name == "stage_start":
            self._begin(event.values["stage"])
        elif event.name == "stage_end":
            self._end()
        elif event.name == "resumed":
            self.say(f"resumed: {', '.join(event.values['reused'])}")
        elif event.name == "warning":
            self.say(f"Warning: {as_typed(event.values['message'])}")
        if self._verbose and event.name != "warning":
            self._log(event)

    def say(self, line: str) -> None:
        """A line above the bars."""
        self._bar.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def _begin(self, stage: str) -> None:
        if stage not in self._tasks:
            self._shown = self._tasks[stage] = self._bar.add_task(stage, total=None)
            self._current = stage

    def _end(self) -> None:
        """A stage may end before its time, or without any progress of its own."""
        if self._shown is not None:
            done = self._bar.tasks[self._bar.task_ids.index(self._shown)].completed or 1
            self._bar.update(self._shown, total=done, completed=done)
        self._current = self._shown = None

    def _log(self, event: Event) -> None:
        now = time.strftime("%H:%M:%S")
        if event.name == "start":
            software = {"python": f"{platform.python_version()} on {platform.platform()}"}
            software |= {name: version_of(name) for name in PACKAGES}
            for name, value in {**software, **event.values}.items():
                self.say(f"{now} {name}: {_words(value)}")
        elif event.name == "stage_start":
            self.say(f"{now} {event.values['stage']} begins")
        elif event.name == "stage_end":
            found = ", ".join(f"{name} {value}" for name, value in event.values["found"].items())
            how = "taken from the run directory" if event.values["reused"] else f"{event.values['seconds']:.1f} s"
            self.say(f"{now} {event.values['stage']}: {how}; {found}")


@contextlib.contextmanager
def watching(*, verbose: bool = False, as_json: bool = False) -> Iterator[Watch]:
    """Shows what happens inside the block; errors become events too where a program listens."""
    screen = PlainConsole(stderr=True)
    columns = ("{task.description}", BarColumn(), MofNCompleteColumn(), RateColumn(), TimeRemainingColumn())
    quiet = as_json or not screen.is_terminal
    with Progress(*columns, console=screen, disable=quiet, transient=True) as bar:
        watch = Watch(bar, verbose=verbose, as_json=as_json)
        try:
            with _warnings_told_by(watch):
                yield watch
        except (Exception, KeyboardInterrupt) as error:
            if as_json:
                message, code = last_words(error)
                watch.event(Event("error", {"message": message, "exit_code": code}))
            raise


@contextlib.contextmanager
def _warnings_told_by(watch: Watch) -> Iterator[None]:
    """Our own warnings become events inside the block; those of libraries stay what they are."""
    before, logger = warnings.showwarning, logging.getLogger("onnxcalib")
    passed_on, logger.propagate = logger.propagate, False  # a library that logs to the screen would say it again

    def show(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
        if issubclass(category, OnnxcalibWarning):
            watch.event(Event("warning", {"message": str(message)}))
        else:
            before(message, category, *where, **more)

    with warnings.catch_warnings():
        warnings.simplefilter("always", OnnxcalibWarning)
        warnings.showwarning = show
        try:
            yield
        finally:
            logger.propagate = passed_on


def _words(value: Any) -> str:
    """A value on one line of a log."""
    if isinstance(value, list):
        return f"{len(value)}: {', '.join(map(str, value))}"
    return "; ".join(str(value).strip().splitlines())


def _finite(value: Any) -> Any:
    """JSON has no infinity."""
    if isinstance(value, Mapping):
        return {name: _finite(inner) for name, inner in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
