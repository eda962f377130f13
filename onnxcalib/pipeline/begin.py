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
from onnxcalib.cache.fingerprint import data_digest, model_digest
from onnxcalib.cache.run_directory import RunDirectory
from onnxcalib.pipeline.job import Job, Run, Start
from onnxcalib.pipeline.stage import value_classes
from onnxcalib.pipeline.stages import STAGES
from onnxcalib.progress import Event, Listener
from onnxcalib.recipe import write_recipe
from onnxcalib.runtime.providers import CPU, chosen
from onnxcalib.runtime.software import software


@contextlib.contextmanager
def running(started: Start, folder: Path | None, listener: Listener) -> Iterator[Start]:
    """The jobs, with a run that tells what happens and keeps values in the folder, if there is one."""
    listener(Event("start", {**_told(started), **_software(), "run_dir": None if folder is None else str(folder)}))
    if folder is None:
        yield replace(started, jobs=tuple(replace(each, run=Run(listener)) for each in started.jobs))
        return
    with contextlib.ExitStack() as stack:
        # The data is read once to name it, and only when a stage asks for it.
        data = cache(partial(data_digest, started.data))
        digests = [cache(partial(_digests, each, data)) for each in started.jobs]

        def about() -> dict[str, Any]:
            now = time.strftime("%Y-%m-%d %H:%M:%S")
            own = {**_software(), **digests[0]()}
            return {**_told(started), **own, "about": digest(own), "started": now}

        directory = RunDirectory(folder, about, listener, stack, value_classes(STAGES))
        origins = [cache(partial(_origin, *each)) for each in zip(started.jobs, digests, strict=True)]
        jobs = [
            replace(each, run=Run(listener, directory, origin))
            for each, origin in zip(started.jobs, origins, strict=True)
        ]
        yield replace(started, jobs=tuple(jobs))
        directory.finish()


def _software() -> dict[str, str]:
    """What is installed, and which provider computes: another one's results differ in their last digits."""
    own = software()
    return own if chosen() == CPU else {**own, "runtime": f"{own['runtime']} ({chosen()})"}


def _told(started: Start) -> dict[str, Any]:
    job = started.jobs[0]
    return {
        "model": started.model.source,
        "data": job.data.source,
        "samples": len(job.data),
        "target": job.target.name,
        "recipe": write_recipe(started.asked),
        "layers": [layer.name for each in started.jobs for layer in each.layers],
    }


def _origin(job: Job, digests: Callable[[], dict[str, str]]) -> str:
    """Names all that every stage of a job starts from; the seed names the order of the data."""
    captured = None if job.branch is None else data_digest(job.data)
    # Another function of the same name is another metric, and samples that prove are held out of all else.
    judged = None if job.metric is None else (job.metric.source, job.proof is not None)
    return digest(digests(), captured, job.recipe.seed, _software(), judged)


def _digests(job: Job, data: Callable[[], str]) -> dict[str, str]:
    """Names what a job is about."""
    return {
        "model_digest": digest(model_digest(job.model.proto), job.model.batch_norms),
        "data_digest": data(),
        "target_digest": digest(job.target),
        "layers_digest": digest(job.layers, job.points),
    }
