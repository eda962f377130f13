"""The workers of a run: where its independent jobs go, and how what they read gets there."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import (
    BrokenExecutor,
    CancelledError,
    Executor,
    Future,
    ProcessPoolExecutor,
    ThreadPoolExecutor,
    as_completed,
)
from pathlib import Path
from typing import Any, TypeVar

from onnxcalib.errors import OnnxcalibError, RecipeError, first_line
from onnxcalib.executors.jobs import Stop, WorkerError, carry_out
from onnxcalib.executors.local import LocalExecutor
from onnxcalib.executors.relay import Relay
from onnxcalib.executors.shared import Delivered, MissingError, sharing
from onnxcalib.executors.wire import UnsendableError, packed
from onnxcalib.runtime.software import software
from onnxcalib.runtime.surroundings import Surroundings, surroundings, within
from onnxcalib.runtime.threads import default_workers

Key = TypeVar("Key")


class Workers:
    """Workers of this machine. Jobs take one value that they share, and little else."""

    shares_disk = True  # files that are written here can be read by a job

    def __init__(self, count: int | None = None, executor: Executor | None = None) -> None:
        self.threads = count or default_workers()  # of what this process does itself
        self.executor = executor or LocalExecutor(self.threads)
        self.stop = Stop()  # ends the jobs that run in threads of this process
        self._own = executor is None

    @contextlib.contextmanager
    def sharing(self, value: Any, scratch: Path | None = None) -> Iterator[Any]:
        """What to give to jobs in place of a value, which moves once to each worker."""
        with sharing(value, scratch) as shared:
            yield shared

    def submit(self, work: Callable[..., Any], shared: Any, *given: Any) -> Future[Any]:
        """The future of `work(value, *given)`, for the value that is shared."""
        return self.executor.submit(_with_value, work, surroundings(), shared, *given)

    @contextlib.contextmanager
    def abandoning(self, futures: Iterable[Future[Any]]) -> Iterator[None]:
        """Ends jobs that an error or an interrupt in the block makes useless."""
        try:
            yield
        except BaseException as error:
            self.abandon(futures)
            told = self.told(error)
            if told is error:
                raise
            raise told from error

    def results(self, futures: Mapping[Future[Any], Key]) -> Iterator[tuple[Key, Any]]:
        """What each job came to, in the order in which they end; all are abandoned if one fails."""
        with self.abandoning(futures):
            for future in as_completed(futures):
                yield futures[future], future.result()

    def map(self, work: Callable[..., Any], shared: Any, keys: Iterable[Key]) -> Iterator[tuple[Key, Any]]:
        """`work(value, key)` for each key, as they end."""
        yield from self.results({self.submit(work, shared, key): key for key in keys})

    def told(self, error: BaseException) -> BaseException:
        """The error for the user."""
        if isinstance(error, BrokenExecutor | CancelledError) and not isinstance(error, OnnxcalibError):
            hint = "Give fewer workers if memory is short, or look at the executor's own log."
            return WorkerError(f"the executor lost its workers: {first_line(error)}.", hint)
        return error

    def abandon(self, futures: Iterable[Future[Any]]) -> None:
        """Ends what nobody waits for any more."""
        self.stop.set()
        for future in futures:
            future.cancel()
        if isinstance(self.executor, LocalExecutor) and self._own:
            self.executor.abandon()

    def close(self) -> None:
        """Lets go of the workers."""
        if self._own:
            self.executor.shutdown(cancel_futures=True)


class ForeignWorkers(Workers):
    """An executor of the user's, whose workers may live anywhere."""

    def __init__(self, executor: Executor) -> None:
        super().__init__(None, executor)
        self.shares_disk = isinstance(executor, ProcessPoolExecutor)

    def submit(self, work: Callable[..., Any], shared: Any, *given: Any) -> Future[Any]:
        """The future of a job; a worker that cannot read the value gets it with the job."""
        around = surroundings()

        def send(error: BaseException | None) -> Future[Any] | None:
            if error is None:
                value: Any = shared
            elif isinstance(error, MissingError):
                value = Delivered(packed(shared.value), shared.file[1])
            else:
                return None
            return self.executor.submit(carry_out, _with_value, work, around, value, *given, expected=software())

        return Relay(send)

    def told(self, error: BaseException) -> BaseException:
        """The error for the user."""
        return unsendable(error) if isinstance(error, UnsendableError) else super().told(error)


def _with_value(work: Callable[..., Any], around: Surroundings, shared: Any, *given: Any) -> Any:
    with within(around):
        return work(shared.value, *given)


def unsendable(error: BaseException) -> RecipeError:
    """What to say of a value that workers elsewhere cannot get."""
    hint = "Define it in a module that the workers can import, and name it MODULE:FUNCTION."
    return RecipeError(f"something cannot be sent to workers: {first_line(error)}.", hint)


def of_executor(executor: Executor) -> Workers:
    """The workers of an executor of the user's."""
    if isinstance(executor, ThreadPoolExecutor):
        return Workers(None, executor)
    from onnxcalib.executors import dask

    return dask.of_executor(executor) or ForeignWorkers(executor)


def find_workers(
    count: int | None = None, scheduler: str | Path | None = None, executor: Executor | None = None
) -> Workers:
    """The workers that were asked for: so many of this machine, those of a Dask scheduler, or an executor's."""
    given = {"workers": count, "scheduler": scheduler, "executor": executor}
    named = [f"`{name}`" for name, value in given.items() if value is not None]
    if len(named) > 1:
        raise RecipeError(f"{' and '.join(named)} both say where jobs run.", "Give one of them.")
    if count is not None and count < 1:
        raise RecipeError(f"`workers={count}` is not a number of workers.", "Give 1 or more.")
    if scheduler is not None:
        from onnxcalib.executors import dask

        return dask.connect(scheduler)
    return Workers(count) if executor is None else of_executor(executor)
