"""How far the outputs of a quantized model are from those of the float model."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from onnxcalib.numerics.grid import Array

FloatArray = npt.NDArray[np.float64]


class Head(enum.Enum):
    """What an output means."""

    LOGITS = "logits"
    PROBABILITIES = "probabilities"
    VALUES = "values"


def log_probabilities(output: Array, head: Head) -> FloatArray:
    """Natural logarithms of the distribution over the last axis."""
    values = output.astype(np.float64)
    if head is Head.PROBABILITIES:
        return np.log(np.clip(values, 1e-12, None))
    shifted = values - values.max(axis=-1, keepdims=True)
    result: FloatArray = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return result


def divergence(reference: Array, output: Array, head: Head) -> FloatArray:
    """Kullback-Leibler divergence from the reference, for each distribution."""
    truth, guess = log_probabilities(reference, head), log_probabilities(output, head)
    result: FloatArray = (np.exp(truth) * (truth - guess)).sum(axis=-1)
    return result


@dataclass
class Distillation:
    """The distillation loss over batches: divergence for distributions, relative squared error for values."""

    heads: Mapping[str, Head]

    def __post_init__(self) -> None:
        self._sums = dict.fromkeys(self.heads, 0.0)
        self._counts = dict.fromkeys(self.heads, 0.0)

    def update(self, reference: Mapping[str, Array], outputs: Mapping[str, Array]) -> None:
        """Takes the outputs of a batch."""
        for name, head in self.heads.items():
            if head is Head.VALUES:
                truth = reference[name].astype(np.float64)
                self._sums[name] += float(((truth - outputs[name]) ** 2).sum())
                self._counts[name] += float((truth**2).sum())
            else:
                each = divergence(reference[name], outputs[name], head)
                self._sums[name] += float(each.sum())
                self._counts[name] += each.size

    @property
    def value(self) -> float:
        """The loss, summed over the outputs."""
        return sum(self._sums[name] / max(self._counts[name], 1e-30) for name in self.heads)
