"""What each layer loses at each precision: one layer changed at a time, everything else at the base precision."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from onnxcalib.algorithms.teacher import Loss, check_loss
from onnxcalib.data import Dataset, first
from onnxcalib.data.portable import Portable
from onnxcalib.executors.chunks import in_chunks
from onnxcalib.executors.workers import Workers
from onnxcalib.mixed_precision.costs import Problem, unmeasured
from onnxcalib.mixed_precision.probes import Probed, ProbeWork, Sums, choices_of, following_of, probe
from onnxcalib.mixed_precision.table import SensitivityTable
from onnxcalib.model.layers import Layer
from onnxcalib.model.outputs import find_output_kinds
from onnxcalib.model.prepare import Model
from onnxcalib.model.qdq import write_plain
from onnxcalib.model.shapes import typed
from onnxcalib.model.subgraph import with_outputs
from onnxcalib.numerics.metric import Metric
from onnxcalib.numerics.output_kind import OutputKind
from onnxcalib.progress import NO_CHECKPOINT, Checkpoint, Progress
from onnxcalib.recipe import Precision
from onnxcalib.runtime.following import Following
from onnxcalib.runtime.memory import buffer_bytes
from onnxcalib.runtime.session import CAPTURE_BYTES, LARGEST_BATCH, Session, samples_in
from onnxcalib.runtime.threads import default_workers

SAMPLES = 128
# What follows a layer is run for each of them: of more layers than so many, each is measured on fewer samples.
MANY_LAYERS, LEAST_SAMPLES = 64, 16
# Where every position of a sequence is an example: of so many, and of so many sequences at least.
POSITIONS, SEQUENCES = 4096, 8
# What lies on disk at a time, and what batches that are captured side by side take of memory.
DISK_BYTES = 4 * 2**30
AHEAD_BYTES = 256 * 2**20


@dataclass(frozen=True)
class Measured:
    """The table, and what measuring it cost."""

    table: SensitivityTable
    float_passes: float  # time of all probes, in float passes over the same samples
    probes: int  # layers times choices beside the base


def enough(model: Model, data: Dataset) -> Dataset:
    """As many of the samples as tell plans apart: fewer where each has many outputs."""
    if not any(kind.is_of_tokens for kind in find_output_kinds(model.proto).values()):
        return first(data, SAMPLES)
    feed = next(iter(data.batches(1)))
    positions = max((value.shape[1] for value in feed.values() if value.ndim == 2), default=1)
    return first(data, min(max(POSITIONS // positions, SEQUENCES), SAMPLES))


def probed_on(model: Model, data: Dataset, layers: int) -> Dataset:
    """The samples on which each of so many layers is measured: all runs together grow with layers, not their square."""
    found = enough(model, data)
    share = min(MANY_LAYERS / max(layers, 1), 1.0)
    return first(found, min(max(round(share * len(found)), LEAST_SAMPLES), len(found)))


def measure(
    problem: Problem,
    data: Dataset,
    loss: Loss,
    progress: Progress,
    checkpoint: Checkpoint = NO_CHECKPOINT,
    workers: Workers | None = None,
) -> Measured:
    """The base model runs once and its tensors are kept; from these each layer and what comes after it is a job."""
    kinds = find_output_kinds(problem.model.proto)
    check_loss(loss, kinds, problem.model, data)
    work, elements = _work(problem, data, loss, kinds)
    probed = [layer.name for layer in problem.layers if choices_of(problem, layer)]
    names: list[str | None] = [None, *probed]
    cached = dict(zip(names, checkpoint.found(names), strict=True))
    found: dict[str | None, Probed] = {name: value for name, value in cached.items() if value is not None}
    todo: list[list[str | None]] = [
        [layer.name for layer in chunk if layer.name in probed and layer.name not in found] for chunk in work.chunks
    ]
    if None not in found:
        todo[0].insert(0, None)
    jobs = in_chunks(workers or Workers(1), work, probe, todo, checkpoint.scratch)
    with contextlib.closing(jobs):  # at once, should keeping a value fail
        for name, value in jobs:
            checkpoint.put(name, value)
            found[name] = value
            progress("sensitivity", len(found), len(names))
    return _measured(work, found, elements)


def _work(
    problem: Problem, data: Dataset, loss: Loss, kinds: Mapping[str, OutputKind]
) -> tuple[ProbeWork, dict[str, float]]:
    """What the jobs share, and the elements that a sample has of each tensor that layers read."""
    plan = problem.candidates.stitch({layer.name: problem.base for layer in problem.layers})
    base = typed(write_plain(problem.model, problem.layers, plan, problem.target))
    following = following_of(problem, base)
    reads = {layer.name: (layer.input, *_fed(problem, following, layer)) for layer in problem.layers}
    inputs = {value.name for value in base.graph.input}
    outputs = [value.name for value in base.graph.output]
    names = dict.fromkeys([*outputs, *(name for each in reads.values() for name in each)])
    feed = next(iter(data.batches(1)))
    samples = samples_in(feed, data)
    shown = Session(with_outputs(base, [name for name in names if name not in inputs])).run(feed)
    sizes = {name: getattr(value, "nbytes", 0) / samples for name, value in {**feed, **shown}.items()}
    # As many samples as fit, whatever their number; those of one batch are judged together.
    batch = int(np.clip(buffer_bytes(CAPTURE_BYTES) // max(sum(sizes.values()), 1), 1, LARGEST_BATCH))
    threads = int(np.clip(buffer_bytes(AHEAD_BYTES) // max(batch * sum(sizes.values()), 1), 1, default_workers()))
    chunks = tuple(_chunks(problem.layers, reads, sizes, DISK_BYTES / 2 / len(data)))
    elements = {layer.input: {**feed, **shown}[layer.input].size / samples for layer in problem.layers}
    own = Portable(data, batch)
    return ProbeWork(problem, base, loss, own, batch, threads, chunks, reads, kinds, uuid.uuid4().hex), elements


def _fed(problem: Problem, following: Following, layer: Layer) -> tuple[str, ...]:
    return following.fed(layer.activated) if choices_of(problem, layer) else ()


def _chunks(
    layers: Sequence[Layer], reads: Mapping[str, Sequence[str]], sizes: Mapping[str, float], most: float
) -> Iterator[tuple[Layer, ...]]:
    """Layers in order whose tensors fit on disk together."""
    chunk: list[Layer] = []
    held: set[str] = set()
    for layer in layers:
        wider = held | set(reads[layer.name])
        if chunk and sum(sizes[name] for name in wider) > most:
            yield tuple(chunk)
            chunk, wider = [], set(reads[layer.name])
        chunk.append(layer)
        held = wider
    yield tuple(chunk)


def _measured(work: ProbeWork, found: Mapping[str | None, Probed], elements: Mapping[str, float]) -> Measured:
    problem, base = work.problem, found[None]
    # In the order of the layers, not in that in which jobs ended: sums of them must not depend on it.
    values = {
        (layer.name, choice): _values(work, found[layer.name].sums[choice])
        for layer in problem.layers
        for choice in choices_of(problem, layer)
    }
    base_values = _values(work, base.sums[problem.base])
    table = unmeasured(problem, elements)
    increases = _increases(values, base_values)
    rows = tuple(
        replace(row, losses={choice: increases.get((row.layer, choice), 0.0) for choice in row.losses})
        for row in table.layers
    )
    name = work.loss.name if isinstance(work.loss, Metric) else work.loss.value
    told = replace(table, loss=name, base_loss=base_values[0], samples=len(work.data), layers=rows)
    spent = sum(probed.seconds for name, probed in found.items() if name is not None)
    return Measured(told, spent / max(base.seconds, 1e-9), len(values))


def _values(work: ProbeWork, sums: Sums) -> tuple[float, ...]:
    losses = work.new_losses()
    for loss, gathered in zip(losses, sums, strict=True):
        loss.restore(gathered)
    return tuple(loss.value for loss in losses)


def _increases(
    values: Mapping[tuple[str, Precision], Sequence[float]], base: Sequence[float]
) -> dict[tuple[str, Precision], float]:
    """The increases of the softened loss, scaled to add up to those of the loss itself."""
    # The last is the softened one, where there are two.
    hard, soft = ([value[place] - base[place] for value in values.values()] for place in (0, -1))
    if not (sum(hard) > 0 and sum(soft) > 0):
        soft = hard
    scale = sum(hard) / sum(soft) if sum(hard) > 0 else 1.0
    return {key: scale * value for key, value in zip(values, soft, strict=True)}
