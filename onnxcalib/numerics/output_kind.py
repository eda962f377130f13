"""What an output means, and which loss judges it."""

from __future__ import annotations

import enum
from collections.abc import Mapping


class OutputKind(enum.Enum):
    """What an output means."""

    LOGITS = "logits"
    PROBABILITIES = "probabilities"
    TOKEN_LOGITS = "token logits"  # a distribution at every position of a sequence
    TOKEN_PROBABILITIES = "token probabilities"
    EMBEDDING = "embedding"
    VALUES = "values"
    HIDDEN = "hidden states"  # of a model whose tokens or embedding count

    @property
    def is_distribution(self) -> bool:
        """Whether the last axis holds classes."""
        return self not in (OutputKind.EMBEDDING, OutputKind.VALUES, OutputKind.HIDDEN)

    @property
    def is_of_tokens(self) -> bool:
        """Whether every position has a say, so that nothing need be softened."""
        return self in (OutputKind.TOKEN_LOGITS, OutputKind.TOKEN_PROBABILITIES)

    @property
    def is_of_probabilities(self) -> bool:
        """Whether the classes come as probabilities, not as their logarithms."""
        return self in (OutputKind.PROBABILITIES, OutputKind.TOKEN_PROBABILITIES)

    @property
    def at_every_position(self) -> OutputKind:
        """The same classes, read as those of tokens."""
        return OutputKind.TOKEN_PROBABILITIES if self.is_of_probabilities else OutputKind.TOKEN_LOGITS


class LossKind(enum.StrEnum):
    """What is compared: the outputs with the float model's, or with labels."""

    DISTILLATION = "distillation"
    DIVERGENCE = "divergence"
    COSINE = "cosine"
    CROSS_ENTROPY = "cross-entropy"
    MSE = "mse"
    METRIC = "metric"


Kinds = Mapping[str, OutputKind]  # by output


def kinds_that_count(kinds: Kinds, kind: LossKind = LossKind.DISTILLATION) -> dict[str, OutputKind]:
    """The outputs that a loss looks at, and what it takes them for.

    Distillation takes each for what it is, and leaves hidden states out. A loss that is named by hand takes outputs for
    what it compares: all of them, or the distributions if there are any.
    """
    distributions = {name: each for name, each in kinds.items() if each.is_distribution}
    match kind:
        case LossKind.MSE:
            return dict.fromkeys(kinds, OutputKind.VALUES)
        case LossKind.COSINE:
            return dict.fromkeys(kinds, OutputKind.EMBEDDING)
        case LossKind.DIVERGENCE:
            return {name: each.at_every_position for name, each in (distributions or kinds).items()}
        case LossKind.CROSS_ENTROPY:
            return dict(list(distributions.items())[:1])
    return {name: each for name, each in kinds.items() if each is not OutputKind.HIDDEN}


COMPARED = {
    OutputKind.LOGITS: "softened divergence of the classes of",
    OutputKind.PROBABILITIES: "softened divergence of the classes of",
    OutputKind.TOKEN_LOGITS: "divergence at every position of",
    OutputKind.TOKEN_PROBABILITIES: "divergence at every position of",
    OutputKind.EMBEDDING: "cosine distance of",
    OutputKind.VALUES: "relative squared error of",
}


def loss_in_words(kinds: Kinds, kind: LossKind = LossKind.DISTILLATION) -> str:
    """What tells a good model, output by output."""
    if kind is LossKind.CROSS_ENTROPY:
        return f"cross-entropy of {_quoted(list(kinds_that_count(kinds, kind)))} with the labels"
    compared: dict[str, list[str]] = {}
    for name, each in kinds_that_count(kinds, kind).items():
        compared.setdefault(COMPARED[each], []).append(name)
    return ", ".join(f"{words} {_quoted(names)}" for words, names in compared.items())


def _quoted(names: list[str], most: int = 3) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(f"'{name}'" for name in names[:most]) + more
