"""Losses in float64 NumPy, by another road than the toolkit's."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import onnx

from models import Arrays, run
from onnxcalib.data.split import ORDER
from onnxcalib.numerics.losses import TEMPERATURE


def log_softmax(values: np.ndarray) -> np.ndarray:
    shifted = values.astype(np.float64) - values.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def divergence(reference: np.ndarray, found: np.ndarray) -> float:
    """Of the distributions that two arrays of logits stand for."""
    p, q = log_softmax(reference), log_softmax(found)
    return float((np.exp(p) * (p - q)).sum(axis=-1).mean())


def relative_error(reference: np.ndarray, found: np.ndarray) -> float:
    """The squared error, relative to the squares of the reference."""
    wanted = reference.astype(np.float64)
    return float(((wanted - found) ** 2).sum() / (wanted**2).sum())


def loss(reference: Arrays, found: Arrays, logits: Collection[str], temperature: float = 1.0) -> float:
    """Divergence for logits and relative squared error for the rest, summed."""
    return sum(
        divergence(reference[name] / temperature, found[name] / temperature)
        if name in logits
        else relative_error(reference[name], found[name])
        for name in reference
    )


def held_out_loss(
    model: onnx.ModelProto, file: onnx.ModelProto, data: Arrays, logits: Collection[str], seed: int = 0
) -> float:
    """Of a written file: its softened loss on the last quarter of the shuffled samples, or on all if they are few."""
    count = len(next(iter(data.values())))
    order = np.random.default_rng([seed, ORDER]).permutation(count)[-(count // 4) if count >= 8 else 0 :]
    feed = {name: value[order] for name, value in data.items()}
    return loss(run(model, feed), run(file, feed), logits, TEMPERATURE)
