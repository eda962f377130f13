"""From what a pipeline starts with to a run: what it is about, and its directory."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from onnxcalib.cache.codec import digest
from onnxcalib.cache.fingerprint import data_digest, model_digest, software
from onnxcalib.cache.run_directory import RunDirectory
from onnxcalib.pipeline.job import Job, Start
from onnxcalib.pipeline.run import Run
from onnxcalib.pipeline.stage import value_classes
from onnxcalib.pipeline.stages import STAGES
from onnxcalib.progress import Event, Listener
from onnxcalib.recipe import write_recipe


@contextlib.contextmanager
def running(started: Start, folder: Path | None, listener: Listener) -> Iterator[Start]:
    """The jobs, with a run that tells what happens and keeps values in the folder, if there is one."""
    listener(Event("start", {**_told(started), **software(), "run_dir": None if folder is None else str(folder)}))
    if folder is None:
        yield replace(started, jobs=tuple(replace(each, run=Run(listener)) for each in started.jobs))
        return
    with contextlib.ExitStack() as stack:
        # The data is read once to name it, and only when a stage asks for it.
        digests = [cache(partial(_digests, each)) for each in started.jobs]

        def about() -> dict[str, Any]:
            now = time.strftime("%Y-%m-%d %H:%M:%S")
            own = {**software(), **digests[0]()}
            return {**_told(started), **own, "about": digest(own), "started": now}

        directory = RunDirectory(folder, about, listener, stack, value_classes(STAGES))
        runs = [Run(listener, directory, partial(_origin, found)) for found in digests]
        yield replace(started, jobs=tuple(replace(it, run=run) for it, run in zip(started.jobs, runs, strict=True)))
        directory.finish()


def _told(started: Start) -> dict[str, Any]:
    job = started.jobs[0]
    return {
        "model": started.model.source,
        "data": job.data.source,
        "samples": len(job.data),
        "target": job.target.name,
        "recipe": write_recipe(job.recipe),
        "layers": [layer.name for each in started.jobs for layer in each.layers],
    }


def _origin(digests: Callable[[], dict[str, str]]) -> str:
    return digest(digests(), software())


def _digests(job: Job) -> dict[str, str]:
    """Names all that every stage of a job starts from."""
    return {
        "model_digest": digest(model_digest(job.model.proto), job.model.batch_norms),
        "data_digest": data_digest(job.data),
        "target_digest": digest(job.target),
        "layers_digest": digest(job.layers, job.places),
    }
