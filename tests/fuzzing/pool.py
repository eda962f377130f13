"""Tries in other processes, so that an abort or a hang is one more answer."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent.parent
SECONDS = 60
TRIES_A_LIFE = 400  # then a worker starts afresh: what a runtime leaks is not the next try's fault

Answer = dict[str, Any]


class Worker:
    """One process, started when it is needed."""

    def __init__(self, seconds: float = SECONDS) -> None:
        self.seconds = seconds
        self._process: subprocess.Popen[bytes] | None = None
        self._tries = 0
        self._said = tempfile.TemporaryFile()  # noqa: SIM115

    def ask(self, kind: str, seed: int) -> Answer:
        """The answer of one try; a death or a hang is one too."""
        if self._process is None or self._tries >= TRIES_A_LIFE:
            self.close()
            self._start()
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        self._tries += 1
        process.stdin.write(json.dumps([kind, seed]).encode() + b"\n")
        process.stdin.flush()
        ready, _, _ = select.select([process.stdout], [], [], self.seconds)
        line = process.stdout.readline() if ready else b""
        if line:
            answer: Answer = json.loads(line)
            return answer
        if ready:
            process.wait()
            return {"outcome": "failed", "where": "the process died", "detail": self._death(process.returncode)}
        self.close()
        return {"outcome": "failed", "where": "no answer", "detail": f"no answer in {self.seconds} s"}

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def _start(self) -> None:
        paths = [str(HERE.parent), str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
        self._said.seek(0)
        self._said.truncate()
        self._tries = 0
        self._process = subprocess.Popen(
            [sys.executable, "-m", "fuzzing.worker"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._said,
            env=environment,
        )  # fmt: skip

    def _death(self, code: int) -> str:
        name = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        self._said.seek(0)
        said = self._said.read().decode(errors="replace").strip().splitlines()
        self._process = None
        return f"{name}: {' | '.join(said[-3:])[-400:]}"


def try_all(kind: str, seeds: Iterable[int], jobs: int, heard: Callable[[int, Answer], None]) -> None:
    """Every seed once, by so many processes; answers are heard one at a time, in no order."""
    local, lock, workers = threading.local(), threading.Lock(), []

    def one(seed: int) -> None:
        if not hasattr(local, "worker"):
            local.worker = Worker()
            workers.append(local.worker)
        answer = local.worker.ask(kind, seed)
        with lock:
            heard(seed, answer)

    with ThreadPoolExecutor(jobs) as threads:
        try:
            list(threads.map(one, seeds))
        finally:
            for worker in workers:
                worker.close()
