"""What is kept of the float model's logits of tokens: a vocabulary at every position is too much for memory.

The likeliest tokens of a position are kept, and how much is left for all others together: the divergence of these is
never more than that of all tokens, is zero where that is, and misses next to nothing as the others are unlikely.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
FloatArray = npt.NDArray[np.float64]

KEPT = 128  # tokens of a position: a kilobyte in place of 128 for 32,000 tokens
PART = 2**21  # values that are looked at at a time
SMALLEST = 1e-12  # of a probability whose logarithm is taken


@dataclass(frozen=True)
class TopTokens:
    """Of each position the likeliest tokens and their logits, and the logarithm of the sum of all powers."""

    places: npt.NDArray[np.int32]
    logits: npt.NDArray[np.float32]
    norms: npt.NDArray[np.float32]

    @classmethod
    def of(cls, logits: Array) -> TopTokens:
        """What to keep of logits, positions in rows."""
        places = np.concatenate([_likeliest(part) for part in _parts(logits)])
        return cls(places, np.take_along_axis(logits, places, axis=-1).astype(np.float32), log_sums(logits))

    def divergence(self, logits: Array) -> FloatArray:
        """From what was kept to other logits, for each position."""
        theirs = np.take_along_axis(logits, self.places, axis=-1).astype(np.float64) - log_sums(logits)[:, None]
        ours = self.logits.astype(np.float64) - self.norms[:, None]
        left, right = (_logarithm_of_rest(each) for each in (ours, theirs))
        found: FloatArray = (np.exp(ours) * (ours - theirs)).sum(axis=-1) + np.exp(left) * (left - right)
        return found

    def squared_error(self, logits: Array) -> tuple[float, float]:
        """The sum of squares of the kept logits, and that of the differences of others from them."""
        theirs = np.take_along_axis(logits, self.places, axis=-1).astype(np.float64)
        return float((self.logits.astype(np.float64) ** 2).sum()), float(((self.logits - theirs) ** 2).sum())


def exact_divergence(reference: Array, logits: Array) -> FloatArray:
    """Of all tokens, for each position, a part of them at a time."""
    found = [np.zeros(0)]
    for wanted, given in zip(_parts(reference), _parts(logits), strict=True):
        ours, theirs = (each.astype(np.float64) - log_sums(each)[:, None] for each in (wanted, given))
        found.append((np.exp(ours) * (ours - theirs)).sum(axis=-1))
    return np.concatenate(found)


def log_sums(logits: Array) -> npt.NDArray[np.float32]:
    """The logarithms of the sums of powers along the last axis."""
    found = [np.zeros(0, np.float32)]
    for part in _parts(logits):
        highest = part.max(axis=-1, keepdims=True, initial=-np.inf)
        found.append((highest + np.log(np.exp(part - highest).sum(axis=-1, keepdims=True)))[..., 0])
    return np.concatenate(found)


def as_logits(output: Array, *, probabilities: bool) -> Array:
    """Rows of logits, whatever axes are before the last."""
    rows = output.reshape(-1, output.shape[-1])
    return np.log(np.clip(rows, SMALLEST, None)) if probabilities else rows


def _likeliest(logits: Array) -> npt.NDArray[np.int32]:
    most = min(KEPT, logits.shape[-1])
    return np.argpartition(logits, -most, axis=-1)[:, -most:].astype(np.int32)


def _logarithm_of_rest(logarithms: FloatArray) -> FloatArray:
    rest: FloatArray = np.log(np.clip(1 - np.exp(logarithms).sum(axis=-1), SMALLEST, 1))
    return rest


def _parts(rows: Array) -> list[Array]:
    step = max(PART // max(rows.shape[-1], 1), 1)
    return [rows[start : start + step] for start in range(0, len(rows), step)] or [rows]
