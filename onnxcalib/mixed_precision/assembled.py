"""Jobs that assemble a model of some assignment and measure its loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from onnxcalib.algorithms.teacher import BATCH, Loss, Teacher
from onnxcalib.data import Dataset
from onnxcalib.data.portable import Portable
from onnxcalib.executors.jobs import PerProcess
from onnxcalib.executors.workers import Workers
from onnxcalib.model.layers import Layer
from onnxcalib.model.prepare import Model
from onnxcalib.model.qdq import write_qdq
from onnxcalib.plan import Candidates
from onnxcalib.recipe import Precision
from onnxcalib.targets import Target

Choices = Mapping[str, Precision]


@dataclass(frozen=True)
class Assembled:
    """What such jobs share: all that models are assembled from, and the samples that they are measured on."""

    model: Model
    layers: Sequence[Layer]
    target: Target
    candidates: Candidates
    data: Dataset
    kind: Loss
    teachers: PerProcess = field(default_factory=PerProcess)

    def loss_of(self, choices: Choices) -> float:
        """The loss of one assignment, by one thread, so that it is the same everywhere."""
        plan = self.candidates.stitch(choices)
        model = write_qdq(self.model, self.layers, plan, self.target.simulated)
        teacher: Teacher = self.teachers.get("teacher", self._teacher)
        return teacher.loss_of(model)

    def _teacher(self) -> Teacher:
        return Teacher(self.model, self.data, self.kind, threads=1)


def sendable(data: Dataset) -> Dataset:
    """The data as such jobs read it."""
    return Portable(data, BATCH)


def assembled_losses(
    work: Assembled, workers: Workers, asked: Sequence[Choices], told: Callable[[], None]
) -> list[float]:
    """The losses of all assignments, in their order; `told` hears of each that is measured."""
    losses: dict[int, float] = {}
    with workers.sharing(work) as shared:
        futures = {workers.submit(_measure, shared, dict(choices)): place for place, choices in enumerate(asked)}
        for place, loss in workers.results(futures):
            losses[place] = loss
            told()
    return [losses[place] for place in range(len(asked))]


def _measure(work: Assembled, choices: Choices) -> float:
    return work.loss_of(choices)
