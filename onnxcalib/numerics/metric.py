"""A metric: what a user judges a model by, and how far it falls from one model to another."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from onnxcalib.errors import RecipeError, first_line
from onnxcalib.numerics.positions import Counts

Array = npt.NDArray[Any]
Scores = npt.NDArray[np.float64]
Outputs = Mapping[str, Array]
# From all outputs (the array itself where there is one) and all labels, samples first, to a number.
MetricFunction = Callable[[Any, Array], float]

RESAMPLES = 200  # of the samples, to learn how much chance a drop rests on


@dataclass(frozen=True)
class Metric:
    """A metric: how a batch is taken in, and how the batches make one number."""

    name: str
    take: Callable[[Outputs, Array], Any]  # a row of numbers a sample, or outputs and labels
    total: Callable[[Sequence[Any]], float]
    of_rows: bool = False  # a batch is taken in as an array with a row a sample
    source: str = ""  # names what a function of the user's does, so that nothing is reused once it changed

    def drop(self, before: Sequence[Any], after: Sequence[Any]) -> Drop:
        """How far the metric falls from one model to another on the same batches, and how sure that is."""
        rng = np.random.default_rng(0)
        first, second = (_samples(parts, of_rows=self.of_rows) for parts in (before, after))
        count = len(first)
        drawn = [rng.integers(0, count, count) for _ in range(RESAMPLES if count > 1 else 0)]
        resampled = [
            self.total(_again(first, each, self.of_rows)) - self.total(_again(second, each, self.of_rows))
            for each in drawn
        ]
        error = float(np.std(resampled)) if resampled else math.inf
        return Drop(self.total(before), self.total(after), error, count)


@dataclass(frozen=True)
class Drop:
    """A metric of two models on the same samples, and the standard error of their difference on others."""

    before: float
    after: float
    error: float
    samples: int

    @property
    def value(self) -> float:
        """What was lost."""
        return self.before - self.after

    def chance_above(self, most: float) -> float:
        """How likely the drop on other samples like these is more than this, if errors are normal."""
        if self.error == 0:
            return float(self.value > most)
        return 0.5 * math.erfc((most - self.value) / (self.error * math.sqrt(2)))


@dataclass(frozen=True)
class Taken:
    """A batch of the float model's outputs as a metric took them in, which is often little."""

    outputs: tuple[str, ...]
    part: Any

    @classmethod
    def of(cls, metric: Metric, outputs: Outputs, labels: Array) -> Taken:
        """What a metric needs of outputs."""
        return cls(tuple(outputs), metric.take(outputs, labels))


class MetricLoss:
    """What a metric falls by, gathered batch by batch like any other loss of a model."""

    def __init__(self, metric: Metric) -> None:
        self.metric = metric
        self._before: list[Any] = []
        self._after: list[Any] = []

    def update(
        self,
        reference: Mapping[str, Any] | Taken,
        outputs: Outputs,
        labels: Array | None = None,
        counts: Counts | None = None,  # noqa: ARG002 - labels tell what counts
    ) -> None:
        """Takes the outputs of a batch."""
        assert labels is not None
        before = reference if isinstance(reference, Taken) else Taken.of(self.metric, reference, labels)
        own = {name: outputs[name] for name in before.outputs}  # a probe shows inner tensors too
        self._before.append(before.part)
        self._after.append(self.metric.take(own, labels))

    @property
    def sums(self) -> tuple[list[Any], list[Any]]:
        """All that was gathered so far."""
        return list(self._before), list(self._after)

    def restore(self, sums: tuple[list[Any], list[Any]]) -> None:
        """Goes on from what another gathered."""
        self._before, self._after = list(sums[0]), list(sums[1])

    @property
    def value(self) -> float:
        """The drop."""
        return self.metric.total(self._before) - self.metric.total(self._after)

    @property
    def drop(self) -> Drop:
        """The drop, and how sure it is."""
        return self.metric.drop(self._before, self._after)


def from_function(function: MetricFunction, name: str) -> Metric:
    """A metric of the user's own, which sees all samples at once."""

    def take(outputs: Outputs, labels: Array) -> tuple[Outputs, Array]:
        return {key: np.array(value) for key, value in outputs.items()}, labels

    def total(parts: Sequence[tuple[Outputs, Array]]) -> float:
        outputs = {key: np.concatenate([part[0][key] for part in parts]) for key in parts[0][0]}
        whole = next(iter(outputs.values())) if len(outputs) == 1 else outputs
        try:
            found = float(function(whole, np.concatenate([part[1] for part in parts])))
        except Exception as error:
            raise RecipeError(f"the metric {name} failed: {first_line(error)}.", "Mend the function.") from error
        if math.isnan(found):
            raise RecipeError(f"the metric {name} is not a number.", "Check it against the outputs and labels.")
        return found

    return Metric(name, take, total)


def _samples(parts: Sequence[Any], *, of_rows: bool) -> Any:
    """All batches as rows that can be drawn again."""
    if of_rows:
        return np.concatenate(parts)
    return [
        ({key: value[row : row + 1] for key, value in outputs.items()}, labels[row : row + 1])
        for outputs, labels in parts
        for row in range(len(labels))
    ]


def _again(rows: Any, drawn: npt.NDArray[np.int64], of_rows: bool) -> Sequence[Any]:
    return [rows[drawn]] if of_rows else [rows[row] for row in drawn]
