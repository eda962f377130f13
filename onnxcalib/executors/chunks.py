"""Jobs on tensors that are captured first, as many at a time as fit on disk."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

from onnxcalib.executors.jobs import Stop
from onnxcalib.executors.scratch import made_once
from onnxcalib.executors.workers import Workers

Key = TypeVar("Key")


class Captures(Protocol):
    """What such jobs share."""

    @property
    def token(self) -> str:
        """Names this work among others."""

    def capture(self, chunk: int, folder: Path) -> Any:
        """Puts what a chunk's jobs read into a folder; the same wherever that is done."""


class _Submitted(NamedTuple):
    folder: tempfile.TemporaryDirectory[str]
    jobs: dict[Future[Any], Any]


def in_chunks(
    workers: Workers,
    work: Captures,
    job: Callable[[Any, Key, Any, Stop], Any],
    chunks: Sequence[Sequence[Key]],
    scratch: Path | None,
) -> Generator[tuple[Key, Any], None, None]:
    """`job(work, key, captured, stop)` for the keys of every chunk, as they end; an empty chunk is left out.

    While a chunk is captured, the workers do the jobs of the one before; those without our disk capture for themselves.
    """
    with contextlib.ExitStack() as stack:
        shared = stack.enter_context(workers.sharing(work, scratch))
        running: list[_Submitted] = []
        stack.enter_context(workers.abandoning(future for each in running for future in each.jobs))
        for chunk, keys in enumerate(chunks):
            if not keys:
                continue
            folder = tempfile.TemporaryDirectory(prefix="onnxcalib_", dir=scratch)
            stack.enter_context(folder)
            captured = work.capture(chunk, Path(folder.name)) if workers.shares_disk else None
            submit = partial(workers.submit, _captured_job, shared)
            running.append(_Submitted(folder, {submit(job, key, chunk, captured, workers.stop): key for key in keys}))
            if len(running) == 2 and workers.shares_disk:
                yield from _collected(workers, running)
        while running:
            yield from _collected(workers, running)


def _collected(workers: Workers, running: list[_Submitted]) -> Iterator[tuple[Any, Any]]:
    """What the first chunk's jobs come to; then its tensors are removed."""
    yield from workers.results(running[0].jobs)
    running.pop(0).folder.cleanup()


def _captured_job(work: Captures, job: Callable[..., Any], key: Any, chunk: int, captured: Any, stop: Stop) -> Any:
    if captured is not None:
        return job(work, key, captured, stop)
    with made_once((work.token, chunk), partial(work.capture, chunk)) as own:
        return job(work, key, own, stop)
