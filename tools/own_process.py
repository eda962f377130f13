"""Measurements in processes of their own: what one takes, and its figures as the last line that it prints."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from onnxcalib.runtime.memory import peak_bytes


class FailedError(Exception):
    """A process ended with an error."""


def measured(script: str | Path, *words: str | Path, shown: bool = False) -> dict[str, Any]:
    """The figures of a script; what it printed before them is printed here if it is to be shown."""
    command = [sys.executable, str(script), *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    said = done.stdout.splitlines()
    if done.returncode or not said:
        last = (done.stderr.strip().splitlines() or ["no word"])[-1]
        raise FailedError(f"{' '.join(command[1:])} ended with code {done.returncode}: {last}")
    if shown:
        print("\n".join(f"  {line}" for line in said[:-1]), flush=True)
    found: dict[str, Any] = json.loads(said[-1])
    return found


def tell(work: Callable[[], object]) -> None:
    """Does the work in this process, and prints what it took: seconds, CPU seconds of all threads, peak memory."""
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    workers = resource.getrusage(resource.RUSAGE_CHILDREN)  # processes that did jobs, and ended
    spent = time.process_time() - cpu + workers.ru_utime + workers.ru_stime
    # getrusage would report the parent's peak where that is higher: it outlives exec, this does not.
    peak = peak_bytes() or 0
    print(json.dumps({"seconds": time.perf_counter() - wall, "cpu": spent, "MB": peak // 2**20}))
