"""The workers of a Dask cluster, by its scheduler's address or file; the only file that imports dask.distributed."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Executor, Future
from pathlib import Path
from typing import Any

from onnxcalib.errors import first_line
from onnxcalib.executors import wire
from onnxcalib.executors.jobs import WorkerError, carry_out
from onnxcalib.executors.relay import Relay
from onnxcalib.executors.workers import Workers, unsendable
from onnxcalib.runtime.software import software
from onnxcalib.runtime.surroundings import Surroundings, surroundings, within

PATIENCE = 10  # seconds that a scheduler gets to answer, and to have a worker
TRIES = 3  # of jobs whose shared value went down with all the workers that held it


class DaskWorkers(Workers):
    """Workers of a cluster; what a lost one was at, the scheduler gives to others."""

    shares_disk = False

    def __init__(self, client: Any, executor: Executor, *, own: bool) -> None:
        super().__init__(None, executor)
        self._client, self._own = client, own

    @contextlib.contextmanager
    def sharing(self, value: Any, scratch: Path | None = None) -> Iterator[Any]:
        """The value, which goes to every worker at the first job, and from worker to worker later."""
        del scratch
        yield _Scattered(self._client, value)

    def submit(self, work: Callable[..., Any], shared: Any, *given: Any) -> Future[Any]:
        """The future of a job."""
        tries, around = iter(range(1, TRIES)), surroundings()

        def send(error: BaseException | None) -> Future[Any] | None:
            if error is not None and not (isinstance(error, CancelledError) and next(tries, None)):
                return None
            scattered = shared.future(lost=error is not None)
            return self.executor.submit(carry_out, _with_parcel, work, around, scattered, *given, expected=software())

        return Relay(send, apart=True)

    def told(self, error: BaseException) -> BaseException:
        """The error for the user."""
        if type(error).__name__ == "KilledWorker":
            hint = "If memory is short, start workers with more each; their own logs say how they ended."
            return WorkerError(f"workers of the Dask cluster died of one job: {first_line(error)}.", hint)
        if type(error).__module__.startswith("distributed"):
            return WorkerError(f"the Dask cluster failed: {first_line(error)}.", "See its dashboard and logs.")
        return super().told(error)

    def close(self) -> None:
        """Leaves the cluster as it was found."""
        if self._own:
            self._client.close(timeout=2)


class _Parcel:
    """A value in the form that travels: arrays beside the text, models of any size."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __reduce_ex__(self, _protocol: Any) -> tuple[Any, ...]:
        buffers: list[Any] = []
        try:
            return _unpacked, (wire.packed(self.value, buffers), *buffers)
        except wire.UnsendableError:  # what a script defines Dask can send as well
            return _Parcel, (self.value,)


def _unpacked(text: bytes, *buffers: Any) -> _Parcel:
    return _Parcel(wire.unpacked(text, buffers))


def _with_parcel(work: Callable[..., Any], around: Surroundings, parcel: _Parcel, *given: Any) -> Any:
    with within(around):
        return work(parcel.value, *given)


class _Scattered:
    """A value on the workers."""

    def __init__(self, client: Any, value: Any) -> None:
        self._client, self._parcel = client, _Parcel(value)
        self._future: Any = None
        self._lock = threading.Lock()

    def future(self, *, lost: bool) -> Any:
        """What stands for it; where it was lost it is sent again."""
        with self._lock:
            if self._future is None or (lost and self._future.status != "finished"):
                try:
                    self._future = self._client.scatter(self._parcel, broadcast=True, hash=False)
                except TypeError as error:
                    raise unsendable(error) from error
            return self._future


def of_executor(executor: Executor) -> DaskWorkers | None:
    """The workers of a Dask client's executor; None where it is another."""
    client = getattr(executor, "_client", None)
    if not type(executor).__module__.startswith("distributed") or client is None:
        return None
    return DaskWorkers(client, executor, own=False)


def connect(scheduler: str | Path) -> DaskWorkers:
    """The workers of a scheduler, by its address such as tcp://host:8786 or by its file."""
    try:
        from distributed import Client
    except ImportError as error:
        hint = "Type: pip install 'onnxcalib[cluster]'"
        raise WorkerError("`scheduler` needs dask.distributed, which is not installed.", hint) from error
    logging.getLogger("distributed").setLevel(logging.CRITICAL)  # what matters becomes a sentence of ours
    is_file = "://" not in str(scheduler) and (isinstance(scheduler, Path) or Path(scheduler).suffix == ".json")
    if is_file and not Path(scheduler).is_file():
        raise WorkerError(f"there is no scheduler file {scheduler}.", "Start the scheduler, or check the path.")
    where = {"scheduler_file": str(scheduler)} if is_file else {"address": str(scheduler)}
    client: Any = Client.__new__(Client)
    try:
        client.__init__(**where, timeout=PATIENCE, set_as_default=False)
    except Exception as error:  # no route, no answer, no such name, no JSON: each is raised in its own way
        with contextlib.suppress(Exception):
            client.close(timeout=2)  # left to the garbage collector, it might wait for a lock that its thread holds
        hint = "Check that it runs and that this machine can reach it."
        raise WorkerError(f"the Dask scheduler {scheduler} does not answer: {first_line(error)}.", hint) from error
    try:
        client.wait_for_workers(1, timeout=PATIENCE)
    except Exception as error:
        client.close(timeout=2)
        raise WorkerError(f"the Dask scheduler {scheduler} has no workers.", "Start some.") from error
    return DaskWorkers(client, client.get_executor(pure=False), own=True)


def worker_folder() -> str | None:
    """Where a worker of Dask keeps its files; None where this is none."""
    if "distributed.worker" not in sys.modules:
        return None
    from distributed import get_worker

    try:
        return str(get_worker().local_directory)
    except ValueError:
        return None
