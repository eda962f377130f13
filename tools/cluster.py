"""How the time of independent jobs falls with workers: measured with one and two, simulated for more.

    python tools/cluster.py MODEL DATA [--bits w4a4,w4a8,w8a8] [--steps 200] [--repeats 3] [--where local dask]
    python tools/cluster.py MODEL DATA --simulate-only     # any network: all jobs are done, in one thread

The ratio of wall times needs idle cores: the load is printed with it. The simulated schedule is made of the jobs' CPU
times, which others on the machine hardly change, in the order in which they are sent, each to the worker that is free
first; a worker of another machine also gets the shared value and captures the tensors of each chunk that it works on.
"""

from __future__ import annotations

import argparse
import contextlib
import heapq
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from onnxcalib import Recipe, quantize
from onnxcalib.algorithms.reconstruction.layerwise import ParallelWork
from onnxcalib.executors import wire
from onnxcalib.mixed_precision.probes import ProbeWork
from onnxcalib.progress import Event
from onnxcalib.recipe import parse_bits

STAGES = ("parallel", "sensitivity")  # those whose work is jobs
JOBS = {"train_layer": "parallel", "probe": "sensitivity"}  # by the name of a job's function
WORKERS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
BANDWIDTH = 1e9  # bytes a second, from one machine to the next
LATENCY = 0.01  # seconds that a scheduler takes for a job


class EnoughError(Exception):
    """What follows is not measured."""


@dataclass
class Watch:
    """Hears how long stages take, by the clock and by the processor."""

    last: str
    seconds: dict[str, float] = field(default_factory=dict)
    cpu: dict[str, float] = field(default_factory=dict)
    begun: float = 0.0

    def __call__(self, *_step: object) -> None:
        pass

    def event(self, event: Event) -> None:
        if event.name == "stage_start":
            self.begun = time.process_time()
        if event.name == "stage_end":
            name = event.values["stage"]
            self.seconds[name] = self.seconds.get(name, 0.0) + event.values["seconds"]
            self.cpu[name] = self.cpu.get(name, 0.0) + time.process_time() - self.begun
            if name == self.last:
                raise EnoughError


class Timed(ThreadPoolExecutor):
    """One thread, and the CPU time of every job in it."""

    def __init__(self) -> None:
        super().__init__(1, initializer=self._begin)
        self._clock: int | None = None
        self.jobs: dict[str, list[tuple[int, float]]] = {}  # by kind: the chunk, and seconds

    def _begin(self) -> None:
        self._clock = time.pthread_getcpuclockid(threading.get_ident())

    def busy(self) -> float:
        """The CPU time of the thread so far, also of a job that it is at."""
        return 0.0 if self._clock is None else time.clock_gettime(self._clock)

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        kind, chunk = _kind(args)

        def timed() -> Any:
            start = time.thread_time()
            found = fn(*args, **kwargs)
            self.jobs.setdefault(kind, []).append((chunk, time.thread_time() - start))
            return found

        return super().submit(timed)


def _kind(args: Sequence[Any]) -> tuple[str, int]:
    """What a job is, and the chunk of tensors that it reads: both stages send (function, key, chunk, ...)."""
    work, _, chunk = args[3:6]
    return JOBS[work.__name__], int(chunk)


@dataclass
class Captured:
    """What a worker of another machine does and gets for the jobs of a stage."""

    spent: dict[int, float] = field(default_factory=dict)  # CPU seconds of capturing each chunk
    size: int = 0  # bytes of the shared value


@contextlib.contextmanager
def captures(executor: Timed) -> Iterator[dict[str, Captured]]:
    """What is captured and shared for each stage, from now on, while an executor may do jobs."""
    found = {name: Captured() for name in STAGES}
    before: dict[type, Callable[..., Any]] = {kind: kind.capture for kind in (ParallelWork, ProbeWork)}

    def watched(kind: type, name: str) -> Callable[..., Any]:
        def capture(self: Any, chunk: int, folder: Any) -> Any:
            start = time.process_time() - executor.busy()
            tensors = before[kind](self, chunk, folder)
            found[name].spent[chunk] = time.process_time() - executor.busy() - start
            found[name].size = found[name].size or _bytes(self)
            return tensors

        return capture

    for kind, name in ((ParallelWork, "parallel"), (ProbeWork, "sensitivity")):
        setattr(kind, "capture", watched(kind, name))  # noqa: B010 - mypy minds an assignment
    try:
        yield found
    finally:
        for changed, own in before.items():
            setattr(changed, "capture", own)  # noqa: B010


def _bytes(value: Any) -> int:
    buffers: list[Any] = []
    return int(len(wire.packed(value, buffers)) + sum(buffer.raw().nbytes for buffer in buffers))


def makespan(jobs: Sequence[tuple[int, float]], captured: Captured, workers: int) -> float:
    """When the last job ends, if each goes to the worker that is free first."""
    free = [(captured.size / BANDWIDTH, number) for number in range(workers)]
    seen: set[tuple[int, int]] = set()
    heapq.heapify(free)
    end = 0.0
    for chunk, seconds in jobs:
        start, number = heapq.heappop(free)
        own = captured.spent.get(chunk, 0.0) if (number, chunk) not in seen else 0.0
        seen.add((number, chunk))
        done = start + own + seconds + LATENCY
        heapq.heappush(free, (done, number))
        end = max(end, done)
    return end


def run(asked: argparse.Namespace, last: str, **where: Any) -> Watch:
    """Quantizes once, as far as the last stage that is measured."""
    watch = Watch(last)
    # Layers are trained one by one before bits are assigned only where they are rounded to nearest.
    asked_for = {"rounding": "nearest", "compression": asked.compression, "steps": asked.steps}
    recipe = Recipe("advanced", parse_bits(asked.bits), **asked_for)
    with contextlib.suppress(EnoughError):
        quantize(asked.model, asked.data, recipe, progress=watch, **where)
    return watch


def simulate(asked: argparse.Namespace) -> None:
    """Prints the schedule of many workers, from the CPU times of all jobs."""
    with Timed() as executor, captures(executor) as captured:
        watch = run(asked, STAGES[-1], executor=executor)
    others = sum(seconds for name, seconds in watch.cpu.items() if name not in STAGES)
    print("CPU seconds of jobs, in one thread each:")
    for name in STAGES:
        spent = [seconds for _, seconds in executor.jobs.get(name, [])]
        if spent:
            middle = sorted(spent)[len(spent) // 2]
            own, size = sum(captured[name].spent.values()), captured[name].size
            print(
                f"  {name:12} {len(spent):4} jobs, {sum(spent):8.1f} s in all, {middle:6.2f} s the median, "
                f"{max(spent):6.2f} s the longest; capturing {own:.1f} s, shared {size / 2**20:.1f} MB"
            )
    print(f"  what goes before and is not jobs: {others:.1f} CPU s")
    print("workers  " + "".join(f"{name:>14}" for name in STAGES) + f"{'all jobs':>12}{'speed-up':>10}")
    first = 0.0
    for workers in WORKERS:
        spans = [makespan(executor.jobs.get(name, []), captured[name], workers) for name in STAGES]
        first = first or sum(spans)
        print(
            f"{workers:7}  " + "".join(f"{span:13.1f}s" for span in spans) + f"{sum(spans):11.1f}s"
            f"{first / sum(spans):9.1f}x"
        )


def measure(asked: argparse.Namespace) -> None:
    """Prints the wall times of one and two workers, which take turns."""
    for kind in asked.where:
        spent: dict[int, list[float]] = {1: [], 2: []}
        load = []
        for _ in range(asked.repeats):
            for workers, walls in spent.items():
                with WHERE[kind](workers) as where:
                    watch = run(asked, STAGES[-1], **where)
                walls.append(sum(watch.seconds.get(name, 0.0) for name in STAGES))
                load.append(os.getloadavg()[0])
        ratios = sorted(one / two for one, two in zip(spent[1], spent[2], strict=True))
        shown = {workers: " ".join(f"{wall:.1f}" for wall in walls) for workers, walls in spent.items()}
        print(
            f"{kind}: training and probes take {shown[1]} s with one worker, {shown[2]} s with two; "
            f"ratio {median(ratios):.2f} (median of {len(ratios)}, {ratios[0]:.2f} to {ratios[-1]:.2f}), "
            f"load {min(load):.1f} to {max(load):.1f} on {os.cpu_count()} cores",
            flush=True,
        )
        if asked.json:
            figures = {name: median(spent[workers]) for name, workers in (("one", 1), ("two", 2))}
            print(json.dumps(figures | {"ratio": median(ratios), "least": ratios[0], "most": ratios[-1]}))


@contextlib.contextmanager
def _local(workers: int) -> Iterator[dict[str, Any]]:
    yield {"workers": workers}


@contextlib.contextmanager
def _dask(workers: int) -> Iterator[dict[str, Any]]:
    from distributed import LocalCluster

    options: dict[str, Any] = {"threads_per_worker": 1, "dashboard_address": ":0", "silence_logs": 50}
    with LocalCluster(n_workers=workers, **options) as cluster:
        yield {"scheduler": cluster.scheduler_address}


WHERE: dict[str, Callable[[int], contextlib.AbstractContextManager[dict[str, Any]]]] = {"local": _local, "dask": _dask}


def main() -> None:
    """Measures, then simulates."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model")
    parser.add_argument("data")
    parser.add_argument("--bits", default="w4a4,w4a8,w8a8")
    parser.add_argument("--compression", type=float, default=0.2)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--where", nargs="+", choices=WHERE, default=["local"], help="which workers are measured")
    parser.add_argument("--json", action="store_true", help="print what was measured of each once more, as JSON")
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--measure-only", action="store_true")
    only.add_argument("--simulate-only", action="store_true")
    asked = parser.parse_args()
    if not asked.measure_only:
        simulate(asked)
    if not asked.simulate_only:
        measure(asked)


if __name__ == "__main__":
    main()
