"""Every layer trained by itself: in parallel on the float model's inputs, or in sequence on the quantized one's."""

from __future__ import annotations

import contextlib
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from onnxcalib.algorithms.reconstruction.activations import DiskActivations, capture
from onnxcalib.algorithms.reconstruction.adaquant import LayerProblem, Optimised, Schedule, optimise
from onnxcalib.autodiff.interface import NoGradientError
from onnxcalib.data import Dataset, first
from onnxcalib.model.layers import Layer
from onnxcalib.model.placement import InsertionPoints
from onnxcalib.model.prepare import Model
from onnxcalib.model.qdq import write_plain
from onnxcalib.model.subgraph import with_outputs
from onnxcalib.numerics.quant_params import UNBOUNDED, QuantParams
from onnxcalib.plan import Candidates, LayerParams, QuantPlan
from onnxcalib.progress import NO_CHECKPOINT, Checkpoint, Progress
from onnxcalib.recipe import Engine, LayerOptimizer, Precision
from onnxcalib.runtime.session import Session
from onnxcalib.runtime.threads import default_workers
from onnxcalib.targets import Target

# What lies on disk at a time, and of one sample in memory, unless a single layer takes more.
DISK_BYTES = 4 * 2**30
SAMPLE_BYTES = 32 * 2**20
# Training by layers that leaves more than this of the held-out loss has learned the other samples by heart.
OVERFIT_THRESHOLD = 0.8

Key = tuple[str, Precision]


@dataclass(frozen=True)
class Trained:
    """A plan trained layer by layer, and the held-out loss before and after."""

    start: QuantPlan
    plan: QuantPlan
    before: float
    after: float
    skip_reasons: tuple[str, ...] = ()  # why layers could not be trained
    solved: bool = False  # without gradients: second-order rounding of layers that read floats has the same aim

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


class Submitted(NamedTuple):
    """The jobs of a chunk, and the folder that their tensors lie in."""

    folder: tempfile.TemporaryDirectory[str]
    jobs: list[tuple[Key, Future[Optimised]]]


@dataclass(frozen=True)
class Layerwise:
    """What both flavours work on."""

    model: Model
    layers: Sequence[Layer]
    points: InsertionPoints
    target: Target
    data: Dataset
    schedule: Schedule
    engine: Engine
    optimizer: LayerOptimizer
    seed: int
    workers: int
    progress: Progress
    strict: bool = False  # fail where a layer has no gradient
    checkpoint: Checkpoint = NO_CHECKPOINT
    stop: threading.Event = field(default_factory=threading.Event)  # ends the jobs that run in threads
    disk_bytes: int = DISK_BYTES

    def parallel(self, candidates: Candidates) -> Candidates:
        """Inputs and targets from the float model: every layer at every precision is a job of its own."""
        problems = self._problems(candidates)
        parts = {key: _part(problem, candidates) for key, problem in problems.items()}
        cached = dict(zip(problems, self.checkpoint.found(list(parts.values())), strict=True))
        trained = {key: found.params for key, found in cached.items() if found is not None}
        self._tell("parallel", len(trained), len(problems))
        with ThreadPoolExecutor(self.workers) as pool, contextlib.ExitStack() as folders, self._abandoning(pool):
            running: list[Submitted] = []
            for chunk in self._chunks(at_once=2):
                names = {layer.name for layer in chunk}
                todo = {key: problem for key, problem in problems.items() if key[0] in names and key not in trained}
                if not todo:
                    continue
                folder = self._folder()
                folders.enter_context(folder)
                # While a chunk's tensors are captured, the workers train the layers of the one before.
                running.append(Submitted(folder, self._submit(pool, candidates, chunk, todo, parts, Path(folder.name))))
                if len(running) == 2:
                    self._collect(running.pop(0), trained, len(problems))
            for left in running:
                self._collect(left, trained, len(problems))
        layers = {
            name: {choice: trained[name, choice] for choice in choices} for name, choices in candidates.layers.items()
        }
        return replace(candidates, layers=layers)

    def _collect(self, submitted: Submitted, trained: dict[Key, LayerParams], total: int) -> None:
        """Waits for a chunk's jobs, and removes its tensors."""
        for key, future in submitted.jobs:
            trained[key] = future.result().params
            self._tell("parallel", len(trained), total)
        submitted.folder.cleanup()

    def sequential(self, plan: QuantPlan) -> tuple[QuantPlan, tuple[str, ...]]:
        """Targets from the float model, inputs from the network whose earlier layers are already trained.

        Also says why layers could not be trained.
        """
        names = [layer.name for layer in self.layers]
        cached = dict(zip(names, self.checkpoint.found(names), strict=True))
        done = sum(found is not None for found in cached.values())
        self._tell("sequential", done, len(names))
        skip_reasons = []
        for chunk in self._chunks():
            missing = any(cached[layer.name] is None for layer in chunk)
            with self._folder() as folder:
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

    @contextlib.contextmanager
    def _abandoning(self, pool: ThreadPoolExecutor) -> Iterator[None]:
        """Ends the jobs that an error or an interrupt has made useless, before their files are gone."""
        try:
            yield
        except BaseException:
            self.stop.set()
            pool.shutdown(cancel_futures=True)
            raise

    def _tell(self, flavour: str, done: int, total: int) -> None:
        if done:
            self.progress(f"{flavour} {self.optimizer}", done, total)

    def _folder(self) -> tempfile.TemporaryDirectory[str]:
        return tempfile.TemporaryDirectory(prefix="onnxcalib_", dir=self.checkpoint.scratch)

    def _targets(self, layers: Sequence[Layer], folder: str) -> dict[str, DiskActivations]:
        names = [layer.activated for layer in layers]
        return capture(self.model.proto, names, self.data, _made(Path(folder) / "targets"))

    def _next(
        self, plan: QuantPlan, layer: Layer, inputs: DiskActivations | None, targets: DiskActivations | None
    ) -> Optimised:
        start, qparams = plan.layers[layer.name], plan.layer_input(layer.input)
        problem = self.problem(layer, plan.precisions[layer.name], start, qparams)
        return self._optimised(problem, inputs, targets, default_workers())

    def _capture_input(self, plan: QuantPlan, layer: Layer, known: dict[str, DiskActivations], folder: Path) -> None:
        """Adds the layer's input to the known tensors of the network whose earlier layers are trained."""
        if layer.input in known:
            return
        quantized = write_plain(self.model, self.layers, plan, self.target)
        qparams = {layer.input: plan.shared[layer.input]} if layer.input in plan.shared else {}
        known |= capture(quantized, [layer.input], self.data, folder, qparams, known)

    def _problems(self, candidates: Candidates) -> dict[Key, LayerProblem]:
        problems = {}
        for layer in self.layers:
            for precision, params in candidates.layers[layer.name].items():
                qparams = candidates.inputs[layer.input].get(precision.activation) or candidates.shared.get(layer.input)
                problems[layer.name, precision] = self.problem(layer, precision, params, qparams)
        return problems

    def _submit(
        self,
        pool: Executor,
        candidates: Candidates,
        layers: Sequence[Layer],
        problems: Mapping[Key, LayerProblem],
        parts: Mapping[Key, Any],
        folder: Path,
    ) -> list[tuple[Key, Future[Optimised]]]:
        """Jobs for the problems; tensors of all the layers are captured, for fewer could come out otherwise."""
        targets = {layer.activated for layer in layers}
        names = [name for layer in layers for name in (layer.input, layer.activated)]
        activations = capture(self.model.proto, names, self.data, folder)
        shared = dict.fromkeys(layer.input for layer in layers if layer.input in candidates.shared)
        read = dict(activations)
        for place, name in enumerate(name for name in shared if name in activations):
            read[name] = activations[name].fake_quantized(candidates.shared[name], folder / f"carried_{place}.bin")
            if name not in targets:
                activations[name].close()
        jobs = []
        # Long layers first would finish sooner, but results are wanted in order.
        for key, problem in problems.items():
            tensors = read.get(problem.layer.input), activations.get(problem.layer.activated)
            jobs.append((key, pool.submit(self._optimised_and_cached, parts[key], problem, *tensors)))
        return jobs

    def _optimised_and_cached(
        self, part: Any, problem: LayerProblem, inputs: DiskActivations | None, targets: DiskActivations | None
    ) -> Optimised:
        found = self._optimised(problem, inputs, targets, 1)
        self.checkpoint.put(part, found)
        return found

    def _optimised(
        self, problem: LayerProblem, inputs: DiskActivations | None, targets: DiskActivations | None, threads: int
    ) -> Optimised:
        if inputs is None or targets is None:
            return Optimised(problem.start, 0.0, 0.0, f"the rows of '{problem.layer.input}' are not those of samples.")
        try:
            return optimise(problem, inputs, targets, self.schedule, self.engine, self.seed, threads, self.stop)
        except NoGradientError as error:
            if self.strict:
                raise
            return Optimised(problem.start, 0.0, 0.0, str(error))

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

    def _chunks(self, at_once: int = 1) -> Iterator[list[Layer]]:
        """Layers in order whose inputs and targets, of so many chunks at once, fit on disk together."""
        sizes = self._bytes_a_sample()
        most = min(self.disk_bytes // len(self.data), SAMPLE_BYTES) // at_once
        chunk: list[Layer] = []
        held = 0
        for layer in self.layers:
            size = sizes[layer.input] + sizes[layer.activated]
            if chunk and held + size > most:
                yield chunk
                chunk, held = [], 0
            chunk.append(layer)
            held += size
        yield chunk

    def _bytes_a_sample(self) -> Mapping[str, int]:
        inputs = {value.name for value in self.model.proto.graph.input}
        names = dict.fromkeys(name for layer in self.layers for name in (layer.input, layer.activated))
        session = Session(with_outputs(self.model.proto, [name for name in names if name not in inputs]))
        feed = next(iter(first(self.data, 1).batches(1)))
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
