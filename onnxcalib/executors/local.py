"""Jobs on this machine: a thread each at first, and once they take long, a process each."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from onnxcalib.executors.jobs import Answer, WorkerError, carry_out, value_of
from onnxcalib.executors.wire import UnsendableError, packed
from onnxcalib.executors.worker import receive, send
from onnxcalib.runtime.software import software

# CPU seconds that threads work alone: starting two processes takes as long, and small models are done by then.
PATIENCE = 4.0
TRIES = 3  # of a job whose process dies
SCRIPT = Path(__file__).with_name("worker.py")
# Cores are shared among processes: a library that starts threads in each would only get in the way.
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")


@dataclass(frozen=True)
class _Task:
    future: Future[Any]
    call: Callable[[], Any]


class LocalExecutor(Executor):
    """So many workers of this machine; one alone never leaves this process."""

    def __init__(self, workers: int, patience: float = PATIENCE) -> None:
        self.workers, self._patience = workers, patience
        self._tasks: deque[_Task] = deque()
        self._threads: set[threading.Thread] = set()  # those at work: an idle one ends
        self._processes: list[_Process] = []
        self._idle: list[_Process] = []
        self._begun: float | None = None
        self._lock = threading.Lock()
        self._closed = False
        weakref.finalize(self, _stop, self._processes)

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Does the call as soon as a worker is free."""
        with self._lock:
            if self._closed:
                raise RuntimeError("the executor is shut down")
            future: Future[Any] = Future()
            self._begun = time.process_time() if self._begun is None else self._begun
            self._tasks.append(_Task(future, partial(fn, *args, **kwargs)))
            if len(self._threads) < self.workers:
                thread = threading.Thread(target=self._serve, name="onnxcalib worker", daemon=True)
                self._threads.add(thread)
                thread.start()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Ends the workers once they have nothing more to do."""
        with self._lock:
            self._closed = True
            if cancel_futures:
                while self._tasks:
                    self._tasks.popleft().future.cancel()
            threads = list(self._threads)
        if wait:
            for thread in threads:
                thread.join()
            _stop(self._processes)

    def abandon(self) -> None:
        """Ends the workers now: nobody wants what they are at. Threads end with the next look at their `Stop`."""
        with self._lock:
            self._closed = True
            for process in self._processes:
                process.kill()
        self.shutdown(cancel_futures=True)

    def _serve(self) -> None:
        while (task := self._next()) is not None:
            if not task.future.set_running_or_notify_cancel():
                continue
            try:
                found = self._done(task)
            except BaseException as error:  # the future carries it to whoever waits
                task.future.set_exception(error)
            else:
                task.future.set_result(found)

    def _next(self) -> _Task | None:
        with self._lock:
            if self._tasks:
                return self._tasks.popleft()
            self._threads.remove(threading.current_thread())
            return None

    def _done(self, task: _Task) -> Any:
        content = self._content(task)
        if content is None:
            return task.call()
        with self._lock:
            if not self._idle:
                self._processes.append(_Process())
                self._idle.append(self._processes[-1])
            process = self._idle.pop()
        try:
            return value_of(self._asked(process, content))
        finally:
            with self._lock:
                self._idle.append(process)

    def _content(self, task: _Task) -> bytes | None:
        """What to send to a process; None where the job is done here."""
        assert self._begun is not None
        if self.workers == 1 or time.process_time() - self._begun < self._patience:
            return None
        try:
            return packed((partial(carry_out, expected=software()), (task.call,)))
        except UnsendableError:
            return None

    def _asked(self, process: _Process, content: bytes) -> Answer:
        for _ in range(TRIES):
            answer = process.ask(content)
            if answer is not None:
                return answer
            if self._closed:
                break
        raise WorkerError(
            f"a worker process ended {TRIES} times in the middle of one job.",
            "If memory is short, give fewer `workers`; `workers=1` works within this process.",
        )


def _stop(processes: list[_Process]) -> None:
    for process in processes:
        process.stop()


class _Process:
    """A process that does one job after the other, and is started anew when it dies."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._killed = False
        self._lock = threading.Lock()  # of who starts it and who kills it

    def ask(self, content: bytes) -> Answer | None:
        """The answer, None where the process died of it."""
        with self._lock:
            process = self._started()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            send(process.stdin, content)
            answer = receive(process.stdout)
        except OSError:
            answer = None
        if answer is None:
            self.stop()
            return None
        found: Answer = pickle.loads(answer)
        return found

    def _started(self) -> subprocess.Popen[bytes]:
        if self._killed:
            raise WorkerError("the job was abandoned.")
        if self._process is None:
            pipe = subprocess.PIPE
            # A group of its own: Ctrl-C is for the process that waits, which then ends this one.
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(SCRIPT)], stdin=pipe, stdout=pipe, env=os.environ | ONE_THREAD,
                start_new_session=True,
            )  # fmt: skip
            assert self._process.stdin is not None
            send(self._process.stdin, pickle.dumps(sys.path))
        return self._process

    def kill(self) -> None:
        """Ends the process for good; may be called by another thread than the one that asks."""
        with self._lock:
            self._killed = True
            if self._process is not None:
                self._process.kill()

    def stop(self) -> None:
        """Ends the process, if there is one."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None
