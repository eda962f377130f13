"""How far the outputs of a quantized model are from those of the float model."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from onnxcalib.numerics.fit import in_shape
from onnxcalib.numerics.output_kind import Kinds, LossKind, OutputKind, kinds_that_count
from onnxcalib.numerics.positions import Counts, counted
from onnxcalib.numerics.quant_params import Array
from onnxcalib.numerics.top_tokens import KEPT, TopTokens, as_logits, exact_divergence

FloatArray = npt.NDArray[np.float64]

# Of a confident model, few samples carry nearly all of the divergence: softened by this, every sample has a say.
TEMPERATURE = 4.0
MANY_TOKENS = 4 * KEPT  # of which the likeliest are kept

Reference = Mapping[str, Array | TopTokens]  # the float model's outputs, or what is kept of them


def log_probabilities(output: Array, output_kind: OutputKind, temperature: float = 1.0) -> FloatArray:
    """Natural logarithms of the distribution over the last axis, softened by the temperature."""
    values = output.astype(np.float64)
    if output_kind.is_of_probabilities:
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


def temperature_of(output_kind: OutputKind, temperature: float) -> float:
    """By how much an output is softened where others are by this much: not where every position has a say."""
    return 1.0 if output_kind.is_of_tokens else temperature


def cosine_distances(reference: Array, output: Array) -> FloatArray:
    """One minus the cosine, for each row; between rows of nothing but zeros it is none."""
    first, second = (values.astype(np.float64).reshape(-1, values.shape[-1]) for values in (reference, output))
    lengths = np.linalg.norm(first, axis=-1) * np.linalg.norm(second, axis=-1)
    same: FloatArray = (first * second).sum(axis=-1) / np.maximum(lengths, 1e-30)
    return np.where((first == second).all(axis=-1), 0.0, 1 - same)


def kept_of(reference: Mapping[str, Array], kinds: Kinds, counts: Counts | None = None) -> dict[str, Array | TopTokens]:
    """What a loss needs of the float model's outputs, where they are to be kept or compared with often."""
    kept: dict[str, Array | TopTokens] = {}
    for name, value in reference.items():
        kind = kinds.get(name, OutputKind.VALUES)
        kept[name] = value
        if kind.is_of_tokens and value.ndim and value.shape[-1] > MANY_TOKENS:
            kept[name] = TopTokens.of(as_logits(counted(value, counts), probabilities=kind.is_of_probabilities))
    return kept


class ModelLoss:
    """The loss of a model, gathered batch by batch and summed over the outputs that count.

    Distillation is the divergence for distributions, at every position for those of tokens; one minus the cosine for
    embeddings; and the relative squared error for values. The others take all outputs for one of these, but
    cross-entropy, which needs labels and looks at the first distribution alone.
    """

    def __init__(self, kinds: Kinds, kind: LossKind = LossKind.DISTILLATION, temperature: float = 1.0) -> None:
        self.kinds = kinds_that_count(kinds, kind)
        self.kind, self.temperature = kind, temperature
        self._sums = dict.fromkeys(self.kinds, 0.0)
        self._counts = dict.fromkeys(self.kinds, 0.0)

    def update(
        self,
        reference: Reference,
        outputs: Mapping[str, Array],
        labels: Array | None = None,
        counts: Counts | None = None,
    ) -> None:
        """Takes the outputs of a batch, of which positions that do not count are left out."""
        for name, output_kind in self.kinds.items():
            if self.kind is LossKind.CROSS_ENTROPY:
                assert labels is not None
                logs = log_probabilities(outputs[name], output_kind)
                self._add(name, -float(logs[np.arange(len(labels)), labels].sum()), len(labels))
                continue
            exact, output = reference[name], counted(outputs[name], counts)
            exact = exact if isinstance(exact, TopTokens) else counted(exact, counts)
            self._compare(name, output_kind, exact, output)

    def _compare(self, name: str, output_kind: OutputKind, exact: Array | TopTokens, output: Array) -> None:
        if output_kind.is_of_tokens:
            logits = as_logits(output, probabilities=output_kind.is_of_probabilities)
            if isinstance(exact, TopTokens):
                each = exact.divergence(in_shape((len(exact.places), logits.shape[-1]), logits))
            else:
                wanted = as_logits(exact, probabilities=output_kind.is_of_probabilities)
                each = exact_divergence(wanted, in_shape(wanted.shape, logits))
            self._add(name, float(each.sum()), each.size)
            return
        assert not isinstance(exact, TopTokens), "they are kept of tokens alone"
        output = in_shape(exact.shape, output)
        if output_kind is OutputKind.VALUES:
            exact = exact.astype(np.float64)
            self._add(name, float(((exact - output) ** 2).sum()), float((exact**2).sum()))
        elif output_kind is OutputKind.EMBEDDING:
            each = cosine_distances(exact, output)
            self._add(name, float(each.sum()), each.size)
        else:
            each = divergence(exact, output, output_kind, self.temperature)
            self._add(name, float(each.sum()), each.size)

    def _add(self, name: str, lost: float, of: float) -> None:
        self._sums[name] += lost
        self._counts[name] += of

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
