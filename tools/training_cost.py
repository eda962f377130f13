#!/usr/bin/env python3
"""How much of the advanced pipeline's time is arithmetic: the kernels of onnxruntime in the graphs of gradients.

    python tools/training_cost.py MODEL.onnx DATA.npz [--bits w4a4] [--edge-bits 8] [--compression 0.15] [--steps 100]
    python tools/benchmark.py ZOO floor --part advanced     # the models of the benchmark

The time of a run of a gradient graph is the CPU time of its thread. What of it are kernels, onnxruntime's profiler says
for the first runs of each session: rather too little, for it takes time of its own beside each small node. Jobs run in
processes of a pool, as they would otherwise, and are watched too.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import multiprocessing
import os
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import onnxruntime as ort

from onnxcalib import Recipe, quantize
from onnxcalib.progress import Event
from onnxcalib.recipe import DEFAULTS, parse_bits
from onnxcalib.runtime import bound

Figures = dict[str, float]
PROFILED = 8  # runs of each session; the first of a thread is left out, for it makes the plan of memory


@dataclass
class Stages:
    """Hears when stages begin and end, and what CPU time this process had taken by then."""

    spans: list[tuple[str, float, float, float]] = field(default_factory=list)  # name, begin, end, CPU seconds
    begun: tuple[float, float] = (0.0, 0.0)

    def __call__(self, *_step: object) -> None:
        pass

    def event(self, event: Event) -> None:
        """Notes a stage."""
        if event.name == "stage_start":
            self.begun = time.time(), time.process_time()
        elif event.name == "stage_end":
            wall, cpu = self.begun
            self.spans.append((event.values["stage"], wall, time.time(), time.process_time() - cpu))


def watch(folder: str) -> None:
    """From now on this process writes a line for each run of a gradient graph."""
    made, run, log = bound.BoundSession.__init__, bound.BoundSession.run_bound, Path(folder) / f"{os.getpid()}.jsonl"
    lines = log.open("a", buffering=1, encoding="utf-8")
    numbers = itertools.count()

    def init(self: Any, model: Any, threads: int) -> None:
        self.number, self.threads = next(numbers), threads
        self.runs = itertools.count(1)  # of the session and its twins
        self.profile = str(Path(folder) / f"profile_{os.getpid()}_{self.number}")
        with _profiling(self.profile):
            made(self, model, threads)

    def run_bound(self: Any, feed: Any) -> None:
        clock = time.thread_time if self.threads == 1 else time.process_time
        begun = clock()
        run(self, feed)
        spent = clock() - begun
        found: dict[str, Any] = {"at": time.time(), "session": self.number, "cpu": spent, "all": time.process_time()}
        if next(self.runs) == PROFILED:
            found["share"] = _kernel_share(self._session.end_profiling())
        lines.write(json.dumps(found) + "\n")

    bound.BoundSession.__init__, bound.BoundSession.run_bound = init, run_bound  # type: ignore[method-assign]


@contextlib.contextmanager
def _profiling(prefix: str) -> Iterator[None]:
    """Sessions that are opened in the block are profiled."""
    before = bound.new_options

    def options() -> Any:
        made = before()
        made.enable_profiling, made.profile_file_prefix = True, prefix
        return made

    bound.new_options = options
    try:
        yield
    finally:
        bound.new_options = before


def _kernel_share(path: str) -> float:
    """What of the time of runs, but for the first of each thread, was spent in kernels."""
    events = json.loads(Path(path).read_text(encoding="utf-8"))
    Path(path).unlink()
    runs = [e for e in events if e.get("name") == "model_run"]
    runs = [run for place, run in enumerate(runs) if run["tid"] in {before["tid"] for before in runs[:place]}]
    kernels = (e for e in events if e.get("cat") == "Node" and e["name"].endswith("_kernel_time"))
    # An If counts for what it runs inside.
    inside = (e["dur"] for e in kernels if e["args"].get("op_name") != "If" and any(_is_in(e, run) for run in runs))
    return float(sum(inside) / max(sum(run["dur"] for run in runs), 1))


def _is_in(event: dict[str, Any], run: dict[str, Any]) -> bool:
    return bool(event["tid"] == run["tid"] and run["ts"] <= event["ts"] <= run["ts"] + run["dur"])


def measure(
    model: Path, data: Path, bits: str, edge_bits: int | None, compression: float | None, steps: int
) -> Figures:
    """Quantizes once, prints where the time went, and gives the figures of the whole."""
    recipe = Recipe("advanced", parse_bits(bits), edge_bits=edge_bits, compression=compression, steps=steps)
    stages, cores = Stages(), len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as folder:
        wall, cpu = time.perf_counter(), time.process_time()
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(cores, context, watch, (folder,)) as pool:
            watch(folder)
            # One precision alone has no jobs.
            where: dict[str, Any] = {"executor": pool} if len(recipe.bits) > 1 else {}
            quantize(model, data, recipe, output=Path(folder) / "written.onnx", progress=stages, **where)
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        runs = {path.stem: _runs(path) for path in Path(folder).glob("*.jsonl")}
    own = runs.pop(str(os.getpid()), [])
    cpu += sum(lines[-1]["all"] for lines in runs.values() if lines)
    lines = [line for each in (own, *runs.values()) for line in each]
    print(
        f"{model.stem}, advanced {bits}, {steps} steps: {wall:.1f} s, {cpu:.1f} s of CPU, {cpu / wall:.2f} cores busy;"
        f" runs of gradient graphs {_shares(lines, cpu)}"
    )
    for name, begin, end, here in stages.spans:
        inside = [line for line in lines if begin <= line["at"] <= end]
        spent = here + sum(_between(each, begin, end) for each in runs.values())
        if spent > 0.01 * cpu:
            print(
                f"  {name:24} {end - begin:7.1f} s  CPU {spent:7.1f} s, {100 * spent / cpu:3.0f} % of all; "
                f"{spent / (end - begin):.2f} cores busy; {_shares(inside, spent)}",
                flush=True,
            )
    figures = {"seconds": wall, "cpu": cpu, "busy": cpu / wall, "cores": float(cores)}
    figures |= {"share": _share(lines, "kernels", cpu), "usual_share": _share(lines, "kernels", cpu)}
    if steps < DEFAULTS["steps"]:
        more, stepped = DEFAULTS["steps"] / steps, sum(line["step"] for line in lines)
        whole = cpu / more + (1 - 1 / more) * stepped
        print(f"  at {DEFAULTS['steps']} steps, if each takes as long: {_shares(lines, whole)}")
        figures["usual_share"] = _share(lines, "kernels", whole)
    return figures


def _shares(lines: list[dict[str, Any]], cpu: float) -> str:
    runs, kernels = (_share(lines, key, cpu) for key in ("cpu", "kernels"))
    return f"{runs:.0f} %, kernels alone {kernels:.0f} %"


def _share(lines: list[dict[str, Any]], key: str, cpu: float) -> float:
    """What runs, or kernels alone, are of the CPU time, in %."""
    return float(100 * sum(line[key] for line in lines) / cpu)


def _runs(path: Path) -> list[dict[str, Any]]:
    """The runs of a process, each with the CPU time of its kernels, and of the whole step that it is part of."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    shares = {line["session"]: line["share"] for line in lines if "share" in line}
    usual = sum(shares.values()) / max(len(shares), 1)  # of sessions that ran too seldom to tell
    seen, before = set[int](), 0.0
    for line in lines:
        line["kernels"] = line["cpu"] * shares.get(line["session"], usual)
        # All that the process did since the last run; before the first run of a session it made that.
        line["step"] = line["all"] - before if line["session"] in seen else 0.0
        before = line["all"]
        seen.add(line["session"])
    return lines


def _between(lines: list[dict[str, Any]], begin: float, end: float) -> float:
    """The CPU time that a process of the pool took while a stage ran, by its last line in it."""
    before = [line["all"] for line in lines if line["at"] < begin]
    until = [line["all"] for line in lines if line["at"] <= end]
    return (until[-1] if until else 0.0) - (before[-1] if before else 0.0)


def main() -> None:
    """One model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("--bits", default="w4a4")
    parser.add_argument("--edge-bits", type=int)
    parser.add_argument("--compression", type=float)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--json", action="store_true", help="print the figures of the whole once more, as JSON")
    asked = parser.parse_args()
    ort.set_default_logger_severity(4)
    figures = measure(asked.model, asked.data, asked.bits, asked.edge_bits, asked.compression, asked.steps)
    if asked.json:
        print(json.dumps(figures))


if __name__ == "__main__":
    main()
