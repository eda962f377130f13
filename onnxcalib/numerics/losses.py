"""How far the outputs of a quantized model are from those of the float model."""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from onnxcalib.numerics.quant_params import Array

FloatArray = npt.NDArray[np.float64]

# Of a confident model, few samples carry nearly all of the divergence: softened by this, every sample has a say.
TEMPERATURE = 4.0


class Head(enum.Enum):
    """What an output means."""

    LOGITS = "logits"
    PROBABILITIES = "probabilities"
    VALUES = "values"


def log_probabilities(output: Array, head: Head, temperature: float = 1.0) -> FloatArray:
    """Natural logarithms of the distribution over the last axis, softened by the temperature."""
    values = output.astype(np.float64)
    if head is Head.PROBABILITIES:
        values = np.log(np.clip(values, 1e-12, None))
        if temperature == 1.0:
            return values
    values = values / temperature
    shifted = values - values.max(axis=-1, keepdims=True)
    result: FloatArray = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return result


def divergence(reference: Array, output: Array, head: Head, temperature: float = 1.0) -> FloatArray:
    """Kullback-Leibler divergence from the reference, for each distribution."""
    truth, guess = (log_probabilities(values, head, temperature) for values in (reference, output))
    result: FloatArray = (np.exp(truth) * (truth - guess)).sum(axis=-1)
    return result


class LossKind(enum.StrEnum):
    """What is compared: the outputs with the float model's, or with labels."""

    DISTILLATION = "distillation"
    CROSS_ENTROPY = "cross-entropy"
    MSE = "mse"


class ModelLoss:
    """The loss of a model, gathered batch by batch and summed over its outputs.

    Distillation is the divergence for distributions and the relative squared error for values; mse is the relative
    squared error for every output; cross-entropy needs labels and looks at the first distribution alone.
    """

    def __init__(
        self, heads: Mapping[str, Head], kind: LossKind = LossKind.DISTILLATION, temperature: float = 1.0
    ) -> None:
        if kind is LossKind.CROSS_ENTROPY:
            heads = dict([next((name, head) for name, head in heads.items() if head is not Head.VALUES)])
        self.heads = dict.fromkeys(heads, Head.VALUES) if kind is LossKind.MSE else heads
        self.kind, self.temperature = kind, temperature
        self._sums = dict.fromkeys(heads, 0.0)
        self._counts = dict.fromkeys(heads, 0.0)

    def update(self, reference: Mapping[str, Array], outputs: Mapping[str, Array], labels: Array | None = None) -> None:
        """Takes the outputs of a batch."""
        for name, head in self.heads.items():
            if self.kind is LossKind.CROSS_ENTROPY:
                assert labels is not None
                self._sums[name] -= float(log_probabilities(outputs[name], head)[np.arange(len(labels)), labels].sum())
                self._counts[name] += len(labels)
            elif head is Head.VALUES:
                truth = reference[name].astype(np.float64)
                self._sums[name] += float(((truth - outputs[name]) ** 2).sum())
                self._counts[name] += float((truth**2).sum())
            else:
                each = divergence(reference[name], outputs[name], head, self.temperature)
                self._sums[name] += float(each.sum())
                self._counts[name] += each.size

    @property
    def sums(self) -> tuple[dict[str, float], dict[str, float]]:
        """All that was gathered so far."""
        return dict(self._sums), dict(self._counts)

    def restore(self, sums: tuple[dict[str, float], dict[str, float]]) -> None:
        """Goes on from what another gathered."""
        self._sums, self._counts = dict(sums[0]), dict(sums[1])

    @property
    def value(self) -> float:
        """The loss."""
        return sum(self._sums[name] / max(self._counts[name], 1e-30) for name in self.heads)


def sqnr_db(signal: float, noise: float) -> float:
    """Signal to quantization noise in decibels; infinite where there is no noise."""
    return math.inf if noise == 0 else 10 * math.log10(max(signal, 1e-30) / noise)
