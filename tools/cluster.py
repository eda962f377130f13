"""How the time of independent jobs falls with workers: measured with one and two, simulated for more.

    python tools/cluster.py MODEL DATA [--bits w4a4,w4a8,w8a8] [--steps 200] [--repeats 3] [--dask]

The ratio of wall times needs idle cores: the load is printed with it. The simulated schedule is made of the jobs' CPU
times, which others on the machine hardly change, in the order in which they are sent, each to the worker that is free
first; a worker of another machine also gets the shared value and captures the tensors of each chunk that it works on.
"""

from __future__ import annotations

import argparse
import contextlib
import heapq
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from onnxcalib import Recipe, quantize
from onnxcalib.algorithms.reconstruction.layerwise import ParallelWork
from onnxcalib.executors import wire
from onnxcalib.mixed_precision.probes import ProbeWork
from onnxcalib.progress import Event
from onnxcalib.recipe import parse_bits

STAGES = ("parallel", "sensitivity", "allocation")  # those whose work is jobs
ROUNDS = "allocation"  # its jobs come in rounds, each of which waits for the one before
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
        super().__init__(1)
        self.jobs: dict[str, list[tuple[int, float]]] = {}  # by kind: the chunk or the round, and seconds
        self._waiting, self._round = 0, 0

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        kind, chunk = _kind(args)
        if not self._waiting:  # all that was asked before is known by now
            self._round += 1
        chunk = self._round if kind == ROUNDS else chunk
        self._waiting += 1

        def timed() -> Any:
            start = time.thread_time()
            found = fn(*args, **kwargs)
            self.jobs.setdefault(kind, []).append((chunk, time.thread_time() - start))
            self._waiting -= 1
            return found

        return super().submit(timed)


def _kind(args: Sequence[Any]) -> tuple[str, int]:
    """What a job is: training and probes name a function and a chunk, assignments are measured whole."""
    named = next((each for each in args[3:] if callable(each)), None)
    if named is None:
        return ROUNDS, 0
    return {"train_layer": "parallel", "probe": "sensitivity"}[named.__name__], int(args[5])


@contextlib.contextmanager
def captures() -> Iterator[dict[str, list[float]]]:
    """The CPU time of capturing each chunk, and the bytes that workers share."""
    spent: dict[str, list[float]] = {}
    before = {kind: kind.capture for kind in (ParallelWork, ProbeWork)}

    def watched(kind: type, name: str) -> Callable[..., Any]:
        def capture(self: Any, chunk: int, folder: Any) -> Any:
            start = time.process_time()
            found = before[kind](self, chunk, folder)
            spent.setdefault(name, []).append(time.process_time() - start)
            spent.setdefault(f"{name} bytes", []).append(float(_bytes(self)))
            return found

        return capture

    for kind, name in ((ParallelWork, "parallel"), (ProbeWork, "sensitivity")):
        setattr(kind, "capture", watched(kind, name))  # noqa: B010 - mypy minds an assignment
    try:
        yield spent
    finally:
        for kind, own in before.items():
            setattr(kind, "capture", own)  # noqa: B010


def _bytes(value: Any) -> int:
    buffers: list[Any] = []
    return len(wire.packed(value, buffers)) + sum(buffer.raw().nbytes for buffer in buffers)


def makespan(jobs: Sequence[tuple[int, float]], capture: Sequence[float], size: float, workers: int) -> float:
    """When the last job ends, if each goes to the worker that is free first."""
    free = [(size / BANDWIDTH, number) for number in range(workers)]
    seen: set[tuple[int, int]] = set()
    heapq.heapify(free)
    end = 0.0
    for chunk, seconds in jobs:
        start, number = heapq.heappop(free)
        own = capture[chunk] if chunk < len(capture) and (number, chunk) not in seen else 0.0
        seen.add((number, chunk))
        done = start + own + seconds + LATENCY
        heapq.heappush(free, (done, number))
        end = max(end, done)
    return end


def in_rounds(jobs: Sequence[tuple[int, float]], workers: int) -> float:
    """When the last round ends."""
    rounds = sorted({number for number, _ in jobs})
    return sum(makespan([job for job in jobs if job[0] == number], [], 0.0, workers) for number in rounds)


def run(asked: argparse.Namespace, last: str, **where: Any) -> Watch:
    """Quantizes once, as far as the last stage that is measured."""
    watch = Watch(last)
    recipe = Recipe("advanced", parse_bits(asked.bits), compression=asked.compression, steps=asked.steps)
    with contextlib.suppress(EnoughError):
        quantize(asked.model, asked.data, recipe, progress=watch, **where)
    return watch


def simulate(asked: argparse.Namespace) -> None:
    """Prints the schedule of many workers, from the CPU times of all jobs."""
    with Timed() as executor, captures() as capture:
        watch = run(asked, STAGES[-1], executor=executor)
    others = sum(seconds for name, seconds in watch.cpu.items() if name not in STAGES)
    print("CPU seconds of jobs, in one thread each:")
    for name in STAGES:
        spent = [seconds for _, seconds in executor.jobs.get(name, [])]
        if spent:
            middle = sorted(spent)[len(spent) // 2]
            own, size = sum(capture.get(name, [])), max(capture.get(f"{name} bytes", [0.0]))
            print(
                f"  {name:12} {len(spent):4} jobs, {sum(spent):8.1f} s in all, {middle:6.2f} s the median, "
                f"{max(spent):6.2f} s the longest; capturing {own:.1f} s, shared {size / 2**20:.1f} MB"
            )
    print(f"  what goes before and is not jobs: {others:.1f} CPU s")
    print("workers  " + "".join(f"{name:>14}" for name in STAGES) + f"{'all jobs':>12}{'speed-up':>10}")
    first = 0.0
    for workers in WORKERS:
        spans = []
        for name in STAGES:
            jobs, size = executor.jobs.get(name, []), max(capture.get(f"{name} bytes", [0.0]))
            whole = makespan(jobs, capture.get(name, []), size, workers)
            spans.append(in_rounds(jobs, workers) if name == ROUNDS else whole)
        first = first or sum(spans)
        print(
            f"{workers:7}  " + "".join(f"{span:13.1f}s" for span in spans) + f"{sum(spans):11.1f}s"
            f"{first / sum(spans):9.1f}x"
        )


def measure(asked: argparse.Namespace) -> None:
    """Prints the wall times of one and two workers, which take turns."""
    kinds: dict[str, Callable[[int], contextlib.AbstractContextManager[dict[str, Any]]]] = {"local": _local}
    if asked.dask:
        kinds["dask"] = _dask
    for kind, workers_of in kinds.items():
        spent: dict[int, list[float]] = {1: [], 2: []}
        load = []
        for _ in range(asked.repeats):
            for workers, walls in spent.items():
                with workers_of(workers) as where:
                    watch = run(asked, STAGES[1], **where)
                walls.append(sum(watch.seconds.get(name, 0.0) for name in STAGES[:2]))
                load.append(os.getloadavg()[0])
        ratios = sorted(one / two for one, two in zip(spent[1], spent[2], strict=True))
        shown = {workers: " ".join(f"{wall:.1f}" for wall in walls) for workers, walls in spent.items()}
        print(
            f"{kind}: training and probes take {shown[1]} s with one worker, {shown[2]} s with two; "
            f"ratio {ratios[len(ratios) // 2]:.2f} (median of {len(ratios)}, {ratios[0]:.2f} to {ratios[-1]:.2f}), "
            f"load {min(load):.1f} to {max(load):.1f} on {os.cpu_count()} cores",
            flush=True,
        )


@contextlib.contextmanager
def _local(workers: int) -> Iterator[dict[str, Any]]:
    yield {"workers": workers}


@contextlib.contextmanager
def _dask(workers: int) -> Iterator[dict[str, Any]]:
    from distributed import LocalCluster

    options: dict[str, Any] = {"threads_per_worker": 1, "dashboard_address": ":0", "silence_logs": 50}
    with LocalCluster(n_workers=workers, **options) as cluster:
        yield {"scheduler": cluster.scheduler_address}


def main() -> None:
    """Measures, then simulates."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model")
    parser.add_argument("data")
    parser.add_argument("--bits", default="w4a4,w4a8,w8a8")
    parser.add_argument("--compression", type=float, default=0.2)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dask", action="store_true", help="measure Dask workers as well")
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
