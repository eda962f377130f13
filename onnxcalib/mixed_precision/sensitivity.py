"""What each layer loses at each precision: one layer changed at a time, everything else at the base precision."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import onnx

from onnxcalib.algorithms.teacher import Loss, check_loss, new_loss
from onnxcalib.data import Dataset, first
from onnxcalib.data.padding import positions_that_count
from onnxcalib.mixed_precision.costs import Problem, unmeasured
from onnxcalib.mixed_precision.table import SensitivityTable
from onnxcalib.model.layers import Layer
from onnxcalib.model.outputs import find_output_kinds
from onnxcalib.model.prepare import Model
from onnxcalib.model.qdq import write_plain, write_qdq
from onnxcalib.model.shapes import typed
from onnxcalib.model.subgraph import after, layer_model, with_outputs
from onnxcalib.numerics.losses import TEMPERATURE, ModelLoss, Reference, kept_of
from onnxcalib.numerics.metric import Metric, MetricLoss
from onnxcalib.numerics.positions import Counts
from onnxcalib.numerics.quant_params import Array
from onnxcalib.plan import QuantPlan
from onnxcalib.progress import NO_CHECKPOINT, Checkpoint, Progress
from onnxcalib.recipe import Precision
from onnxcalib.runtime.session import Session, Tensors, fitting_batch, samples_in

SAMPLES = 256
# Where every position of a sequence is an example: of so many, and of so many sequences at least.
POSITIONS, SEQUENCES = 4096, 8
STATE = "state"  # the name of what is kept after each batch


@dataclass(frozen=True)
class Measured:
    """The table, and what measuring it cost."""

    table: SensitivityTable
    float_passes: float  # time spent, in float passes over the same samples
    probes: int  # layers times choices beside the base


def enough(model: Model, data: Dataset) -> Dataset:
    """As many of the samples as tell layers apart: fewer where each has many outputs."""
    if not any(kind.is_of_tokens for kind in find_output_kinds(model.proto).values()):
        return first(data, SAMPLES)
    feed = next(iter(data.batches(1)))
    positions = max((value.shape[1] for value in feed.values() if value.ndim == 2), default=1)
    return first(data, min(max(POSITIONS // positions, SEQUENCES), SAMPLES))


def measure(
    problem: Problem, data: Dataset, loss: Loss, progress: Progress, checkpoint: Checkpoint = NO_CHECKPOINT
) -> Measured:
    """Streams over the data: the base model once a batch, then for each choice one layer and what comes after it."""
    check_loss(loss, find_output_kinds(problem.model.proto), problem.model, data)
    probes = _Probes(problem, loss)
    batch = fitting_batch(probes.base, data)
    spent, float_time, done, passed = 0.0, 0.0, 0, 0
    if (cached := checkpoint.found([STATE])[0]) is not None:
        spent, float_time, done, passed = cached["counts"]
        probes.restore(cached)
    for feed in itertools.islice(data.batches(batch), passed, None):
        samples = samples_in(feed, data)
        labels = data.labels[done : done + samples] if data.labels is not None else None
        start = time.perf_counter()
        reference = probes.teacher.run(feed)
        middle = time.perf_counter()
        probes.update(feed, reference, labels, samples)
        float_time += middle - start
        spent += time.perf_counter() - middle
        done += samples
        passed += 1
        checkpoint.put(STATE, {"counts": (spent, float_time, done, passed), **probes.state()})
        progress("sensitivity", done, len(data))
    return Measured(
        probes.table(done), spent / max(float_time, 1e-9), sum(len(probe.choices) for probe in probes.probes)
    )


class _Probe:
    """One layer: its sessions at every choice, and the one for what comes after it."""

    def __init__(
        self,
        problem: Problem,
        layer: Layer,
        base: onnx.ModelProto,
        loss: Callable[[float], ModelLoss | MetricLoss],
        *,
        softens: bool,
    ) -> None:
        self.layer = layer
        alone = layer_model(problem.model, layer)
        self.choices = [choice for choice in problem.candidate_precisions[layer.name] if choice != problem.base]
        self.sessions = {
            choice: Session(_layer_at(problem, alone, layer, choice), pool=False) for choice in self.choices
        }
        rest, self.fed = after(base, layer.activated) if self.choices else (None, ())
        self.rest = Session(rest, pool=False) if rest is not None else None
        self.losses = {choice: loss(1.0) for choice in self.choices}
        self.softened = {choice: loss(TEMPERATURE) for choice in self.choices} if softens else {}

    def update(
        self, tensors: Tensors, outputs: Tensors, reference: Reference, labels: Array | None, counts: Counts | None
    ) -> None:
        for choice, session in self.sessions.items():
            made = session.run({self.layer.input: tensors[self.layer.input]})
            if self.rest is not None:
                made |= self.rest.run({**made, **{name: tensors[name] for name in self.fed}})
            # Outputs that do not depend on the layer are those of the base model.
            for losses in (self.losses, self.softened):
                if losses:
                    losses[choice].update(reference, outputs | made, labels, counts)


class _Probes:
    def __init__(self, problem: Problem, loss: Loss) -> None:
        self.problem, self.loss = problem, loss
        self.kinds = find_output_kinds(problem.model.proto)
        plan = problem.candidates.stitch({layer.name: problem.base for layer in problem.layers})
        proto = typed(write_plain(problem.model, problem.layers, plan, problem.target))
        # Where every position has a say, a temperature changes nothing.
        base_loss = self._new_loss(1.0)
        self.softens = isinstance(base_loss, ModelLoss) and any(
            kind.is_distribution and not kind.is_of_tokens for kind in base_loss.kinds.values()
        )
        self.probes = [_Probe(problem, layer, proto, self._new_loss, softens=self.softens) for layer in problem.layers]
        reads = [name for probe in self.probes for name in (probe.layer.input, *probe.fed)]
        inputs = {value.name for value in proto.graph.input}
        outputs = [value.name for value in proto.graph.output]
        self.shown = [name for name in dict.fromkeys(reads) if name not in inputs and name not in outputs]
        self.base = Session(with_outputs(proto, [*outputs, *self.shown]))
        self.teacher = Session(problem.model.proto)
        self.base_loss, self.base_softened = self._new_loss(1.0), self._new_loss(TEMPERATURE)
        self.elements: dict[str, float] = {}

    def _new_loss(self, temperature: float) -> ModelLoss | MetricLoss:
        return new_loss(self.kinds, self.loss, temperature)

    def update(self, feed: Tensors, reference: Tensors, labels: Array | None, samples: int) -> None:
        outputs = self.base.run(feed)
        tensors, counts = {**feed, **outputs}, positions_that_count(feed)
        kept = kept_of(reference, self.base_loss.kinds, counts) if isinstance(self.base_loss, ModelLoss) else reference
        self.base_loss.update(kept, outputs, labels, counts)
        self.base_softened.update(kept, outputs, labels, counts)
        self.elements |= {probe.layer.input: tensors[probe.layer.input].size / samples for probe in self.probes}
        for probe in self.probes:
            probe.update(tensors, outputs, kept, labels, counts)

    def state(self) -> dict[str, Any]:
        """All that was measured so far."""
        return {"elements": self.elements, "sums": [loss.sums for loss in self._losses()]}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on from what was measured before."""
        self.elements = dict(state["elements"])
        for loss, sums in zip(self._losses(), state["sums"], strict=True):
            loss.restore(sums)

    def _losses(self) -> Iterator[ModelLoss | MetricLoss]:
        yield from (self.base_loss, self.base_softened)
        for probe in self.probes:
            yield from (*probe.losses.values(), *probe.softened.values())

    def table(self, samples: int) -> SensitivityTable:
        table = unmeasured(self.problem, self.elements)
        increases = self._increases()
        name = self.loss.name if isinstance(self.loss, Metric) else self.loss.value
        rows = tuple(
            replace(row, losses={choice: increases.get((row.layer, choice), 0.0) for choice in row.losses})
            for row in table.layers
        )
        return replace(table, loss=name, base_loss=self.base_loss.value, samples=samples, layers=rows)

    def _increases(self) -> dict[tuple[str, Precision], float]:
        """The increases of the softened loss, scaled to add up to those of the loss itself."""
        probed = [(probe, choice) for probe in self.probes for choice in probe.choices]
        hard = [probe.losses[choice].value - self.base_loss.value for probe, choice in probed]
        soft = hard
        if self.softens:
            soft = [probe.softened[choice].value - self.base_softened.value for probe, choice in probed]
        if not (sum(hard) > 0 and sum(soft) > 0):
            soft = hard
        scale = sum(hard) / sum(soft) if sum(hard) > 0 else 1.0
        return {(probe.layer.name, choice): scale * value for (probe, choice), value in zip(probed, soft, strict=True)}


def _layer_at(problem: Problem, alone: Model, layer: Layer, choice: Precision) -> onnx.ModelProto:
    candidates = problem.candidates
    params = {layer.name: candidates.layers[layer.name][choice]}
    # A quantizer after the layer belongs to what comes after it, unless it makes a model output.
    whole = {value.name for value in problem.model.proto.graph.output}
    own = {layer.input, layer.output, layer.summed} - {layer.activated} | ({layer.activated} & whole)
    shared = {name: qparams for name, qparams in candidates.shared.items() if name in own}
    qparams = candidates.inputs[layer.input].get(choice.activation)
    inputs = {layer.input: qparams} if qparams is not None else {}
    plan = QuantPlan(candidates.target, candidates.ranges, {layer.name: choice}, params, shared, inputs)
    plan = replace(plan, dynamic=tuple(name for name in candidates.dynamic if name == layer.input))
    return write_qdq(alone, [layer], plan, problem.target.simulated)
