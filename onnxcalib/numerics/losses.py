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


class OutputKind(enum.Enum):
    """What an output means."""

    LOGITS = "logits"
    PROBABILITIES = "probabilities"
    VALUES = "values"


def log_probabilities(output: Array, output_kind: OutputKind, temperature: float = 1.0) -> FloatArray:
    """Natural logarithms of the distribution over the last axis, softened by the temperature."""
    values = output.astype(np.float64)
    if output_kind is OutputKind.PROBABILITIES:
        values = np.log(np.clip(values, 1e-12, None))
        if temperature == 1.0:
            return values
    values = values / temperature
    shifted = values - values.max(axis=-1, keepdims=True, initial=-np.inf)  # there may be no class at all
    result: FloatArray = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return result


def divergence(reference: Array, output: Array, output_kind: OutputKind, temperature: float = 1.0) -> FloatArray:
    """Kullback-Leibler divergence from the reference, for each distribution."""
    reference, guess = (log_probabilities(values, output_kind, temperature) for values in (reference, output))
    result: FloatArray = (np.exp(reference) * (reference - guess)).sum(axis=-1)
    return result


class LossKind(enum.StrEnum):
    """What is compared: the outputs with the float model's, or with labels."""

    DISTILLATION = "distillation"
    CROSS_ENTROPY = "cross-entropy"
    MSE = "mse"
    METRIC = "metric"


class ModelLoss:
    """The loss of a model, gathered batch by batch and summed over its outputs.

    Distillation is the divergence for distributions and the relative squared error for values; mse is the relative
    squared error for every output; cross-entropy needs labels and looks at the first distribution alone.
    """

    def __init__(
        self, kinds: Mapping[str, OutputKind], kind: LossKind = LossKind.DISTILLATION, temperature: float = 1.0
    ) -> None:
        if kind is LossKind.CROSS_ENTROPY:
            kinds = dict(
                [
                    next(
                        (name, output_kind)
                        for name, output_kind in kinds.items()
                        if output_kind is not OutputKind.VALUES
                    )
                ]
            )
        self.kinds = dict.fromkeys(kinds, OutputKind.VALUES) if kind is LossKind.MSE else kinds
        self.kind, self.temperature = kind, temperature
        self._sums = dict.fromkeys(kinds, 0.0)
        self._counts = dict.fromkeys(kinds, 0.0)

    def update(self, reference: Mapping[str, Array], outputs: Mapping[str, Array], labels: Array | None = None) -> None:
        """Takes the outputs of a batch."""
        for name, output_kind in self.kinds.items():
            if self.kind is LossKind.CROSS_ENTROPY:
                assert labels is not None
                logs = log_probabilities(outputs[name], output_kind)
                self._sums[name] -= float(logs[np.arange(len(labels)), labels].sum())
                self._counts[name] += len(labels)
            elif output_kind is OutputKind.VALUES:
                exact = reference[name].astype(np.float64)
                self._sums[name] += float(((exact - outputs[name]) ** 2).sum())
                self._counts[name] += float((exact**2).sum())
            else:
                each = divergence(reference[name], outputs[name], output_kind, self.temperature)
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
        return sum(self._sums[name] / max(self._counts[name], 1e-30) for name in self.kinds)


def sqnr_db(signal: float, noise: float) -> float:
    """Signal to quantization noise in decibels; infinite where there is no noise."""
    return math.inf if noise == 0 else 10 * math.log10(max(signal, 1e-30) / noise)
