"""Probes: one layer at another precision than the base, and everything after it, on captured tensors."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import onnx

from onnxcalib.algorithms.teacher import Loss, new_loss
from onnxcalib.data import Dataset, Feed
from onnxcalib.data.padding import positions_that_count
from onnxcalib.executors.jobs import PerProcess, Stop
from onnxcalib.mixed_precision.costs import Problem
from onnxcalib.model.bottlenecks import quantized_bottlenecks
from onnxcalib.model.layers import Layer
from onnxcalib.model.prepare import Model
from onnxcalib.model.qdq import write_plain, write_qdq
from onnxcalib.model.subgraph import Cutter, with_outputs
from onnxcalib.numerics.losses import TEMPERATURE, ModelLoss, Reference, kept_of
from onnxcalib.numerics.metric import MetricLoss
from onnxcalib.numerics.output_kind import OutputKind
from onnxcalib.numerics.positions import Counts
from onnxcalib.numerics.quant_params import Array
from onnxcalib.plan import QuantPlan
from onnxcalib.recipe import Precision
from onnxcalib.runtime.following import Following
from onnxcalib.runtime.session import Session, Tensors, samples_in
from onnxcalib.runtime.threads import ahead

Sums = Sequence[Any]  # what losses gathered
Run = Callable[[Tensors], Tensors]

BETWEEN = 8  # layers between quantized tensors up to which what follows a layer is opened for it


class AbandonedError(Exception):
    """Nobody waits for this layer any more."""


@dataclass(frozen=True)
class Probed:
    """What was gathered for a layer at each of its choices, and the seconds that it took."""

    sums: Mapping[Precision, Sums]
    seconds: float


@dataclass(frozen=True)
class Captured:
    """The float model's outputs, and the base model's outputs and inner tensors: a file of batches each."""

    folder: Path
    tensors: Mapping[str, int]  # numbers of files: every job is sent all of them
    float_seconds: float
    base_seconds: float

    @property
    def reference(self) -> Path:
        """Where the float model's outputs are."""
        return self.folder / "reference.batches"

    def path(self, name: str) -> Path:
        """Where a tensor is."""
        return self.folder / f"{self.tensors[name]}.batches"


class Batch(NamedTuple):
    """A batch of captured tensors, with what is known of its samples."""

    reference: Reference  # what the loss keeps of the float model's outputs
    tensors: Tensors
    labels: Array | None
    counts: Counts | None


@dataclass(frozen=True)
class ProbeWork:
    """What the jobs of a sensitivity table share."""

    problem: Problem
    base: onnx.ModelProto  # every layer at the base precision
    loss: Loss
    data: Dataset
    batch: int
    threads: int  # batches that are captured side by side
    chunks: Sequence[Sequence[Layer]]
    reads: Mapping[str, Sequence[str]]  # by layer: the tensors that it and what comes after it are fed
    kinds: Mapping[str, OutputKind]
    token: str
    graphs: PerProcess = field(default_factory=PerProcess)  # indices of both models, and what layers share of the base

    def new_losses(self) -> tuple[ModelLoss | MetricLoss, ...]:
        """Losses that have seen no batch yet: the loss itself, and a softened one unless that would be the same."""
        hard, soft = (new_loss(self.kinds, self.loss, temperature) for temperature in (1.0, TEMPERATURE))
        # Where every position has a say, a temperature changes nothing.
        softens = isinstance(hard, ModelLoss) and any(
            kind.is_distribution and not kind.is_of_tokens for kind in hard.kinds.values()
        )
        return (hard, soft) if softens else (hard,)

    def capture(self, chunk: int, folder: Path) -> Captured:
        """Runs both models once; every batch by one thread, so that the tensors are the same everywhere."""
        outputs = [value.name for value in self.base.graph.output]
        inputs = {value.name for value in self.base.graph.input}
        read = dict.fromkeys(name for layer in self.chunks[chunk] for name in self.reads[layer.name])
        shown = [*outputs, *(name for name in read if name not in inputs and name not in outputs)]
        base = Session(with_outputs(self.base, shown), threads=1)
        teacher, loss = Session(self.problem.model.proto, threads=1), self.new_losses()[0]

        def run(feed: Feed) -> tuple[Reference, Tensors, float, float]:
            start = time.perf_counter()
            reference = teacher.run(feed)
            middle = time.perf_counter()
            kept = (
                kept_of(reference, loss.kinds, positions_that_count(feed)) if isinstance(loss, ModelLoss) else reference
            )
            return kept, base.run(feed), middle - start, time.perf_counter() - middle

        captured, seconds = Captured(folder, {name: place for place, name in enumerate(shown)}, 0.0, 0.0), [0.0, 0.0]
        for reference, tensors, *spent in ahead(run, self.data.batches(self.batch), self.threads):
            _append(captured.reference, reference)
            for name in shown:
                _append(captured.path(name), tensors[name])
            seconds = [total + more for total, more in zip(seconds, spent, strict=True)]
        return replace(captured, float_seconds=seconds[0], base_seconds=seconds[1])

    def batches(self, captured: Captured, names: Sequence[str]) -> Iterator[Batch]:
        """What the captured files hold of each batch."""
        done, labels = 0, self.data.labels
        streams = {name: _read(captured.path(name)) for name in names if name in captured.tensors}
        for feed, reference in zip(self.data.batches(self.batch), _read(captured.reference), strict=True):
            samples = samples_in(feed, self.data)
            tensors = {name: next(streams[name]) if name in streams else feed[name] for name in names}
            own = None if labels is None else labels[done : done + samples]
            yield Batch(reference, tensors, own, positions_that_count(feed))
            done += samples

    @property
    def layers(self) -> Cutter:
        """Cuts layers out of the float model."""
        cutter: Cutter = self.graphs.get("layers", lambda: Cutter(self.problem.model.proto))
        return cutter

    @property
    def following(self) -> Following:
        """What follows layers in the base model."""
        following: Following = self.graphs.get("following", lambda: following_of(self.problem, self.base))
        return following

    @property
    def outputs(self) -> list[str]:
        """The names of the model's outputs."""
        return [value.name for value in self.base.graph.output]


def probe(work: ProbeWork, name: str | None, captured: Captured, stop: Stop) -> Probed:
    """A job: one layer at all its choices, or the base model itself where no layer is named."""
    start = time.perf_counter()
    if name is None:
        return Probed({work.problem.base: _base(work, captured)}, captured.float_seconds)
    layer = next(layer for layer in work.problem.layers if layer.name == name)
    found = {}
    for choice, run, reads in _runs_of(work, layer):
        losses, names = work.new_losses(), [*dict.fromkeys([*reads, *work.outputs])]
        for batch in work.batches(captured, names):
            if stop.is_set():
                raise AbandonedError
            tensors = batch.tensors
            made = run({name: tensors[name] for name in reads})
            # Outputs that do not depend on the layer are those of the base model.
            outputs = {name: tensors[name] for name in work.outputs} | made
            for loss in losses:
                loss.update(batch.reference, outputs, batch.labels, batch.counts)
        found[choice] = tuple(loss.sums for loss in losses)
    return Probed(found, time.perf_counter() - start)


def _runs_of(work: ProbeWork, layer: Layer) -> Iterator[tuple[Precision, Run, Sequence[str]]]:
    """By choice of a layer: what computes the outputs, and the tensors that it is fed."""
    problem, reads = work.problem, work.reads[layer.name]
    alone = replace(problem.model, proto=work.layers.layer(layer))
    following = work.following.open(layer.activated)

    def behind(session: Session) -> Run:
        def run(tensors: Tensors) -> Tensors:
            made = session.run({layer.input: tensors[layer.input]})
            return made | following({**tensors, **made})

        return run

    for choice in choices_of(problem, layer):
        if choice.is_float or problem.candidates.layers[layer.name][choice].table is None:
            yield choice, behind(Session(_layer_at(problem, alone, layer, choice), threads=1)), reads
        else:  # an embedding changes too, and with it the whole network
            choices = {each.name: problem.base for each in problem.layers} | {layer.name: choice}
            whole = write_plain(problem.model, problem.layers, problem.candidates.stitch(choices), problem.target)
            yield choice, Session(whole, threads=1).run, [value.name for value in work.base.graph.input]


def following_of(problem: Problem, base: onnx.ModelProto) -> Following:
    """What follows the layers that are measured, from one quantized tensor to another."""
    tensors = [layer.activated for layer in problem.layers if choices_of(problem, layer)]
    return Following(Cutter(base), tensors, BETWEEN, quantized_bottlenecks(base))


def _base(work: ProbeWork, captured: Captured) -> Sums:
    losses = work.new_losses()
    for batch in work.batches(captured, work.outputs):
        for loss in losses:
            loss.update(batch.reference, batch.tensors, batch.labels, batch.counts)
    return tuple(loss.sums for loss in losses)


def choices_of(problem: Problem, layer: Layer) -> list[Precision]:
    """The precisions of a layer that are measured."""
    return [choice for choice in problem.candidate_precisions[layer.name] if choice != problem.base]


def _layer_at(problem: Problem, alone: Model, layer: Layer, choice: Precision) -> onnx.ModelProto:
    candidates = problem.candidates
    params = {} if choice.is_float else {layer.name: candidates.layers[layer.name][choice]}
    # A quantizer after the layer belongs to what comes after it, unless it makes a model output.
    whole = {value.name for value in problem.model.proto.graph.output}
    own = {layer.input, layer.output, layer.summed} - {layer.activated} | ({layer.activated} & whole)
    shared = {name: qparams for name, qparams in candidates.shared.items() if name in own}
    qparams = candidates.inputs[layer.input].get(choice.activation)
    inputs = {layer.input: qparams} if qparams is not None else {}
    plan = QuantPlan(candidates.target, candidates.ranges, dict.fromkeys(params, choice), params, shared, inputs)
    plan = replace(plan, dynamic=tuple(name for name in candidates.dynamic if name == layer.input))
    return write_qdq(alone, [layer], plan, problem.target.simulated)


def _append(path: Path, batch: Any) -> None:
    with path.open("ab") as file:  # a large model has more tensors than a process may hold files open
        pickle.dump(batch, file, protocol=5)


def _read(path: Path) -> Iterator[Any]:
    with path.open("rb") as file:
        while file.peek(1):
            yield pickle.load(file)
