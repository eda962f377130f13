"""Weights of layers that stay float for the sake of an output: these compute in float, and are stored in less."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from onnxcalib.algorithms.broken import output_noise
from onnxcalib.algorithms.constants import WEIGHTS_OUTPUT_DB, store_wide
from onnxcalib.pipeline.job import Job, Start
from onnxcalib.pipeline.result import Outcome

HEARD_DB = 1.0  # by which an output may come out worse for it, where it is not very near to float


def with_left_weights_stored(started: Start, outcomes: Sequence[Outcome]) -> tuple[Start, list[Outcome]]:
    """The same with these weights stored as integers, of sixteen bits as eight were too few, unless that is heard."""
    pairs = [_stored(job, outcome) for job, outcome in zip(started.jobs, outcomes, strict=True)]
    jobs = tuple(job for job, _ in pairs)
    more = [it for old, job in zip(started.jobs, jobs, strict=True) for it in job.constants[len(old.constants) :]]
    own = next((job.model for job in jobs if job.branch is None), started.model)
    return replace(started, model=own, jobs=jobs, constants=(*started.constants, *more)), [it for _, it in pairs]


def _stored(job: Job, outcome: Outcome) -> tuple[Job, Outcome]:
    left = outcome.left
    if left is None or not left.layers or outcome.noise is None:
        return job, outcome
    others = [layer for layer in job.layers if layer.name not in left.layers]
    model, found = store_wide(job.model, others, job.target, lambda name: name in left.layers)
    if not found:
        return job, outcome
    smaller = replace(job, model=model, constants=(*job.constants, *found), run=job.run.changed_by(left))
    noise = output_noise(job.model, job.data, smaller.simulate(outcome.plan))
    worse = any(
        noise.sqnr_db[name] < min(db - HEARD_DB, WEIGHTS_OUTPUT_DB) for name, db in outcome.noise.sqnr_db.items()
    )
    if worse or not noise.broken.keys() <= outcome.noise.broken.keys():
        return job, outcome
    return smaller, replace(outcome, noise=noise)
