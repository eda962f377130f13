"""Every layer trained by itself: in parallel on the float model's inputs, or in sequence on the quantized one's."""

from __future__ import annotations

import contextlib
import tempfile
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from onnxcalib.algorithms.reconstruction.activations import BATCH, DiskActivations, capture
from onnxcalib.algorithms.reconstruction.adaquant import OPENED, LayerProblem, Optimised, Schedule, optimise
from onnxcalib.autodiff.interface import NoGradientError
from onnxcalib.data import Dataset, first
from onnxcalib.data.portable import Portable
from onnxcalib.executors.chunks import in_chunks
from onnxcalib.executors.jobs import Stop
from onnxcalib.executors.workers import Workers
from onnxcalib.model.layers import Layer
from onnxcalib.model.placement import InsertionPoints
from onnxcalib.model.prepare import Model
from onnxcalib.model.qdq import write_plain_part
from onnxcalib.model.subgraph import upstream, with_outputs
from onnxcalib.numerics.quant_params import UNBOUNDED, QuantParams
from onnxcalib.plan import Candidates, LayerParams, QuantPlan
from onnxcalib.progress import NO_CHECKPOINT, Checkpoint, Progress
from onnxcalib.recipe import MAX_BITS, Engine, LayerOptimizer, Precision
from onnxcalib.runtime.session import Session
from onnxcalib.runtime.threads import default_workers
from onnxcalib.targets import Target

# What lies on disk at a time, and of one sample in memory, unless a single layer takes more.
DISK_BYTES = 4 * 2**30
SAMPLE_BYTES = 32 * 2**20
# Training by layers that leaves more than this of the held-out loss has learned the other samples by heart.
OVERFIT_THRESHOLD = 0.8

Key = tuple[str, Precision]
Pair = tuple[DiskActivations | None, DiskActivations | None]  # the input and the output of a layer


@dataclass(frozen=True)
class Trained:
    """A plan trained layer by layer, and the held-out loss before and after."""

    start: QuantPlan
    plan: QuantPlan
    before: float
    after: float
    skip_reasons: tuple[str, ...] = ()  # why layers could not be trained
    solved: bool = False  # without gradients, by second-order rounding, which has the same aim

    @property
    def generalizes(self) -> bool:
        """Whether what was learned holds for other samples."""
        return self.after < OVERFIT_THRESHOLD * self.before

    @property
    def further(self) -> QuantPlan:
        """What is worth training on."""
        return self.plan if self.generalizes else self.start

    @property
    def set_aside(self) -> Trained:
        """The same, told as not kept."""
        return replace(self, after=self.before)


@dataclass(frozen=True)
class Trainer:
    """What single layers are trained on, and how: all that a job needs to know, wherever it runs."""

    model: Model
    layers: Sequence[Layer]
    points: InsertionPoints
    target: Target
    data: Dataset
    schedule: Schedule
    engine: Engine
    optimizer: LayerOptimizer
    seed: int
    strict: bool = False  # fail where a layer has no gradient

    def beside(self, precisions: Iterable[Precision]) -> Trainer:
        """The same for a network of these: without coarser layers beside it, no error is so small as to be nothing."""
        if any(min(each.weight, each.activation) < MAX_BITS for each in precisions):
            return self
        return replace(self, schedule=replace(self.schedule, floor=0.0))

    def problem(
        self, layer: Layer, precision: Precision, start: LayerParams, qparams: QuantParams | None
    ) -> LayerProblem:
        """What there is to train in a layer."""
        scheme, alone, bounds = None, False, UNBOUNDED
        if qparams is not None:
            tensor = self.points.group(layer)
            # At eight bits a shared tensor is read as it is; a grid that several layers share stays as it is.
            if not tensor.shared or precision.activation < 8:
                scheme = self.target.activation_scheme(precision.activation, positive=not qparams.signed)
            alone, bounds = len(tensor.layers) == 1, tensor.bounds
        how = (precision.weight, qparams, scheme, alone, self.optimizer, bounds)
        return LayerProblem(self.model, layer, self.target, start, *how)

    def optimised(self, problem: LayerProblem, tensors: Pair, threads: int, stop: Stop | None = None) -> Optimised:
        """The layer, trained on its input towards its output."""
        inputs, targets = tensors
        if problem.start.table is not None:  # an embedding reads the codes too
            return Optimised(problem.start, 0.0, 0.0)
        if inputs is None or targets is None:
            return Optimised(problem.start, 0.0, 0.0, f"the rows of '{problem.layer.input}' are not those of samples.")
        try:
            return optimise(problem, inputs, targets, self.schedule, self.engine, self.seed, threads, stop)
        except NoGradientError as error:
            if self.strict:
                raise
            return Optimised(problem.start, 0.0, 0.0, str(error))


@dataclass(frozen=True)
class ParallelWork:
    """What the jobs of parallel training share."""

    trainer: Trainer
    candidates: Candidates
    chunks: Sequence[Sequence[Layer]]
    token: str  # names this work among others

    def problems(self) -> dict[Key, LayerProblem]:
        """Every layer at every precision."""
        return {
            (layer.name, precision): self.problem(layer, precision)
            for layer in self.trainer.layers
            for precision in self.candidates.layers[layer.name]
        }

    def problem(self, layer: Layer, precision: Precision) -> LayerProblem:
        """One layer at one precision."""
        own, shared = self.candidates.inputs[layer.input], self.candidates.shared
        qparams = own.get(precision.activation) or shared.get(layer.input)
        return self.trainer.problem(layer, precision, self.candidates.layers[layer.name][precision], qparams)

    def capture(self, chunk: int, folder: Path) -> dict[str, Pair]:
        """Inputs and targets of a chunk's layers; of all of them, for fewer could come out otherwise."""
        layers, shared = self.chunks[chunk], self.candidates.shared
        targets = {layer.activated for layer in layers}
        names = [name for layer in layers for name in (layer.input, layer.activated)]
        activations = capture(self.trainer.model.proto, names, self.trainer.data, folder)
        read = dict(activations)
        moved = dict.fromkeys(layer.input for layer in layers if layer.input in shared)
        for place, name in enumerate(name for name in moved if name in activations):
            read[name] = activations[name].fake_quantized(shared[name], folder / f"carried_{place}.bin")
            if name not in targets:
                activations[name].close()
        return {layer.name: (read.get(layer.input), activations.get(layer.activated)) for layer in layers}


def train_layer(work: ParallelWork, key: Key, captured: Mapping[str, Pair], stop: Stop) -> Optimised:
    """A job of parallel training."""
    name, precision = key
    layer = next(layer for layer in work.trainer.layers if layer.name == name)
    return work.trainer.optimised(work.problem(layer, precision), captured[name], 1, stop)


@dataclass(frozen=True)
class Layerwise:
    """Both flavours."""

    trainer: Trainer
    workers: Workers
    progress: Progress
    checkpoint: Checkpoint = NO_CHECKPOINT
    disk_bytes: int = DISK_BYTES

    def parallel(self, candidates: Candidates) -> Candidates:
        """Inputs and targets from the float model: every layer at every precision is a job of its own."""
        offered = [precision for choices in candidates.layers.values() for precision in choices]
        trainer = replace(self.trainer.beside(offered), data=Portable(self.trainer.data, BATCH))
        work = ParallelWork(trainer, candidates, tuple(self._chunks(at_once=2)), uuid.uuid4().hex)
        problems = work.problems()
        floor = trainer.schedule.floor
        parts = {key: (_part(problem, candidates), floor) for key, problem in problems.items()}
        cached = dict(zip(problems, self.checkpoint.found(list(parts.values())), strict=True))
        trained = {key: found.params for key, found in cached.items() if found is not None}
        self._tell("parallel", len(trained), len(problems))

        todo = [
            [(layer.name, choice) for layer in chunk for choice in candidates.layers[layer.name]]
            for chunk in work.chunks
        ]
        left = [[key for key in keys if key not in trained] for keys in todo]
        jobs = in_chunks(self.workers, work, train_layer, left, self.checkpoint.scratch)
        with contextlib.closing(OPENED), contextlib.closing(jobs):  # at once, should keeping a value fail
            for key, found in jobs:
                self.checkpoint.put(parts[key], found)
                trained[key] = found.params
                self._tell("parallel", len(trained), len(problems))
        layers = {
            name: {choice: trained[name, choice] for choice in choices} for name, choices in candidates.layers.items()
        }
        return replace(candidates, layers=layers)

    def sequential(self, plan: QuantPlan) -> tuple[QuantPlan, tuple[str, ...]]:
        """Targets from the float model, inputs from the network whose earlier layers are already trained.

        Also says why layers could not be trained.
        """
        names = [layer.name for layer in self.trainer.layers]
        cached = dict(zip(names, self.checkpoint.found(names), strict=True))
        done = sum(found is not None for found in cached.values())
        self._tell("sequential", done, len(names))
        skip_reasons = []
        for chunk in self._chunks():
            missing = any(cached[layer.name] is None for layer in chunk)
            with contextlib.closing(OPENED), self._folder() as folder:
                targets, known = self._targets(chunk, folder) if missing else {}, dict[str, DiskActivations]()
                for place, layer in enumerate(chunk):
                    if missing:
                        # Of kept layers too: what comes after is computed from it, bit for bit as in an unbroken run.
                        self._capture_input(plan, layer, known, _made(Path(folder) / f"{place}"))
                    found = cached[layer.name]
                    if found is None:
                        found = self._next(plan, layer, known.get(layer.input), targets.get(layer.activated))
                        self.checkpoint.put(layer.name, found)
                        done += 1
                        self._tell("sequential", done, len(names))
                    if found.skip_reason is not None:
                        skip_reasons.append(found.skip_reason)
                    elif found.after < found.before:
                        plan = with_layer(plan, layer, found.params)
        return plan, tuple(skip_reasons)

    def _tell(self, flavour: str, done: int, total: int) -> None:
        if done:
            self.progress(f"{flavour} {self.trainer.optimizer}", done, total)

    def _folder(self) -> tempfile.TemporaryDirectory[str]:
        return tempfile.TemporaryDirectory(prefix="onnxcalib_", dir=self.checkpoint.scratch)

    def _targets(self, layers: Sequence[Layer], folder: str) -> dict[str, DiskActivations]:
        names = [layer.activated for layer in layers]
        return capture(self.trainer.model.proto, names, self.trainer.data, _made(Path(folder) / "targets"))

    def _next(
        self, plan: QuantPlan, layer: Layer, inputs: DiskActivations | None, targets: DiskActivations | None
    ) -> Optimised:
        trainer = self.trainer.beside(plan.precisions.values())
        start, qparams = plan.layers[layer.name], plan.layer_input(layer.input)
        problem = trainer.problem(layer, plan.precisions[layer.name], start, qparams)
        # Two at least: one alone would sum gradients in another order.
        return trainer.optimised(problem, (inputs, targets), max(default_workers(), 2))

    def _capture_input(self, plan: QuantPlan, layer: Layer, known: dict[str, DiskActivations], folder: Path) -> None:
        """Adds the layer's input to the known tensors of the network whose earlier layers are trained."""
        if layer.input in known:
            return
        trainer, name = self.trainer, layer.input
        qparams = {name: plan.shared[name]} if name in plan.shared else {}
        part = trainer.model.proto
        if all(name != value.name for value in part.graph.input):
            before, _ = upstream(part, [name], known)
            part = write_plain_part(trainer.model, before, trainer.layers, plan, trainer.target)
        known |= capture(part, [name], trainer.data, folder, qparams, known)

    def _chunks(self, at_once: int = 1) -> Iterator[list[Layer]]:
        """Layers in order whose inputs and targets, of so many chunks at once, fit on disk together."""
        sizes = self._bytes_a_sample()
        most = min(self.disk_bytes // len(self.trainer.data), SAMPLE_BYTES) // at_once
        chunk: list[Layer] = []
        held = 0
        for layer in self.trainer.layers:
            size = sizes[layer.input] + sizes[layer.activated]
            if chunk and held + size > most:
                yield chunk
                chunk, held = [], 0
            chunk.append(layer)
            held += size
        yield chunk

    def _bytes_a_sample(self) -> Mapping[str, int]:
        inputs = {value.name for value in self.trainer.model.proto.graph.input}
        names = dict.fromkeys(name for layer in self.trainer.layers for name in (layer.input, layer.activated))
        session = Session(with_outputs(self.trainer.model.proto, [name for name in names if name not in inputs]))
        feed = next(iter(first(self.trainer.data, 1).batches(1)))
        return {name: value.nbytes for name, value in {**feed, **session.run(feed)}.items()}


def _part(problem: LayerProblem, candidates: Candidates) -> Any:
    """All that the training of a layer depends on, beside the model, the data and the recipe."""
    shared = candidates.shared.get(problem.layer.input)
    own = (problem.bits, problem.input_scheme, problem.trains_input)
    return problem.layer.name, own, problem.start, problem.qparams, shared


def with_layer(plan: QuantPlan, layer: Layer, params: LayerParams) -> QuantPlan:
    """The plan with other quantized values, grids and bias for one layer."""
    inputs = plan.inputs if params.input is None else {**plan.inputs, layer.input: params.input}
    return replace(plan, layers={**plan.layers, layer.name: params}, inputs=inputs)


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder
