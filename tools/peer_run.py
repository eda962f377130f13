"""Runs one tool of tools/peers.py in an environment of its own, and measures the process with all that it starts."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

IDLE = 10.0  # a process that waits for ever is ended after so many times its CPU seconds of wall time
POLL, LONGEST_POLL = 0.2, 2.0  # seconds between two looks at the memory, which take time of their own


@dataclass(frozen=True)
class Environment:
    """What pip installs, one command after the other, and a module that compiles code at its first import."""

    name: str
    installs: tuple[tuple[str, ...], ...]
    compiles: str = ""


@dataclass(frozen=True)
class Measured:
    """How a process ended and what it took; memory is that of the process and all its children at one moment."""

    code: int
    wall: float
    cpu: float
    peak: int
    said: str
    stopped: bool = False


def python_of(environment: Environment, work: Path) -> tuple[Path | None, str]:
    """The environment's Python, installed where it is not yet so; None, and pip's reason, where it does not install."""
    folder, holds = work / environment.name, repr(environment.installs)
    python, ready = folder / "bin" / "python", folder / ".ready"
    if ready.exists() and ready.read_text(encoding="utf-8") == holds:
        return python, ""
    subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
    for needs in environment.installs:
        install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *needs]
        done = subprocess.run(install, capture_output=True, text=True, check=False)
        if done.returncode:
            errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
            return None, f"Cannot be installed: {(errors or ['pip failed'])[0]}"[:300]
    if environment.compiles:  # here, so that it is in no tool's time
        subprocess.run([python, "-c", f"import {environment.compiles}"], capture_output=True, check=False)
    ready.write_text(holds, encoding="utf-8")
    return python, ""


def measured(command: Sequence[Any], log: Path, longest: float) -> Measured:
    """Runs a command, its words in a file, and ends it with all its children after so many CPU seconds."""
    begin, peak, stopped = time.perf_counter(), 0, False
    environment = {**os.environ, "PYTHONPATH": "", "MPLBACKEND": "agg"}
    with log.open("w", encoding="utf-8") as words:
        process = subprocess.Popen(
            [str(word) for word in command],
            stdout=words, stderr=subprocess.STDOUT, env=environment, cwd=log.parent, start_new_session=True,
        )  # fmt: skip
        while True:
            ended, status, usage = os.wait4(process.pid, os.WNOHANG)
            if ended:
                break
            relatives = family(process.pid)
            peak = max(peak, memory(relatives))
            waited = time.perf_counter() - begin
            if not stopped and (waited > IDLE * longest or cpu_of(relatives) > longest):
                stopped = True
                os.killpg(process.pid, signal.SIGKILL)
            time.sleep(min(LONGEST_POLL, max(POLL, 0.02 * (time.perf_counter() - begin))))
    process.returncode = os.waitstatus_to_exitcode(status)  # so that it is not waited for again
    wall, cpu = time.perf_counter() - begin, usage.ru_utime + usage.ru_stime
    return Measured(process.returncode, wall, cpu, peak, log.read_text(encoding="utf-8", errors="replace"), stopped)


def cpu_so_far() -> float:
    """CPU seconds of this process and of all that it has started and that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def family(pid: int) -> list[int]:
    """A process and its children, and theirs."""
    found = [pid]
    for each in found:
        with contextlib.suppress(OSError):
            for task in Path(f"/proc/{each}/task").iterdir():
                found += [int(child) for child in (task / "children").read_text().split()]
    return found


def memory(relatives: Sequence[int]) -> int:
    """Bytes of a family now, or the most that its first process alone has had, whichever is more."""
    together = sum(_field(each, "smaps_rollup", "Pss:") for each in relatives)  # shared pages count once
    return max(together, _field(relatives[0], "status", "VmHWM:"))


def cpu_of(relatives: Sequence[int]) -> float:
    """CPU seconds of a family so far, children that have ended included."""
    ticks = 0
    for each in relatives:
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{each}/stat").read_text().rpartition(")")[2].split()
            ticks += sum(int(field) for field in fields[11:15])  # user and system, then those of children
    return ticks / os.sysconf("SC_CLK_TCK")


def _field(pid: int, file: str, name: str) -> int:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/{file}").read_text().splitlines():
            if line.startswith(name):
                return int(line.split()[1]) * 1024
    return 0
