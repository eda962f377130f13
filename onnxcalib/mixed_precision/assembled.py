"""Jobs that assemble a model of some assignment and measure its loss."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from onnxcalib.algorithms.teacher import BATCH, Loss, Teacher
from onnxcalib.data import Dataset, MixedPairs
from onnxcalib.data.portable import Portable
from onnxcalib.executors.jobs import PerProcess
from onnxcalib.executors.workers import Workers
from onnxcalib.model.layers import Layer
from onnxcalib.model.prepare import Model
from onnxcalib.model.qdq import write_qdq
from onnxcalib.plan import Candidates
from onnxcalib.progress import NO_CHECKPOINT, Checkpoint
from onnxcalib.recipe import Precision
from onnxcalib.targets import Target

Choices = Mapping[str, Precision]
Question = tuple[int, Choices]  # an assignment, and the number of a set of samples


@dataclass(frozen=True)
class Assembled:
    """What such jobs share: all that models are assembled from, and the sets of samples that they are measured on."""

    model: Model
    layers: Sequence[Layer]
    target: Target
    candidates: Candidates
    data: Dataset
    kind: Loss
    mixups: Sequence[int | None] = (None,)  # by set: how far apart the two of a pair stand; None: samples as they are
    teachers: PerProcess = field(default_factory=PerProcess)

    def loss_of(self, part: int, choices: Choices) -> float:
        """The loss of one assignment, by one thread, so that it is the same everywhere."""
        plan = self.candidates.stitch(choices)
        model = write_qdq(self.model, self.layers, plan, self.target.simulated)
        teacher: Teacher = self.teachers.get(part, partial(self._teacher, part))
        return teacher.loss_of(model)

    def _teacher(self, part: int) -> Teacher:
        places = self.mixups[part]
        return Teacher(self.model, self.data if places is None else MixedPairs(self.data, places), self.kind, threads=1)


def sendable(data: Dataset) -> Dataset:
    """The data as such jobs read it."""
    return Portable(data, BATCH)


@contextlib.contextmanager
def assembled_losses(
    work: Assembled, workers: Workers, told: Callable[[], None], checkpoint: Checkpoint = NO_CHECKPOINT
) -> Iterator[Callable[[Sequence[Question]], list[float]]]:
    """What measures all questions that it is asked at once; what was measured before is not measured again."""
    with workers.sharing(work, checkpoint.scratch) as shared:

        def ask(questions: Sequence[Question]) -> list[float]:
            keys = [(part, dict(choices)) for part, choices in questions]
            losses: dict[int, Any] = dict(enumerate(checkpoint.found(keys) if keys else ()))
            new = [place for place, loss in losses.items() if loss is None]
            for _ in range(len(losses) - len(new)):
                told()
            futures = {workers.submit(_measure, shared, *keys[place]): place for place in new}
            with workers.abandoning(futures):
                for place, loss in workers.results(futures):
                    checkpoint.put(keys[place], loss)
                    losses[place] = loss
                    told()
            return [float(losses[place]) for place in range(len(keys))]

        yield ask


def _measure(work: Assembled, part: int, choices: Choices) -> float:
    return work.loss_of(part, choices)
