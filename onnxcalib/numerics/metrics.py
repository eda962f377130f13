"""The metrics that have a name: numbers from outputs and labels, higher is better."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from onnxcalib.numerics.metric import Array, Metric, Outputs, Scores, from_function

IGNORED_LABEL = -100  # of a position that does not count
OVERLAP = 0.5  # of a box with the one that it finds


def _mean(name: str, score: Callable[[Array, Array], Scores], scale: Callable[[float], float] = float) -> Metric:
    """A metric that is the mean of a number a sample, or follows from that mean."""
    return Metric(
        name,
        lambda outputs, labels: score(main_output(outputs, labels), labels),
        lambda parts: scale(float(np.concatenate(parts).mean())),
        of_rows=True,
    )


def _of_main(name: str, function: Callable[[Array, Array], float]) -> Metric:
    """A metric of the main output that needs all samples at once."""
    own = from_function(function, name)
    return Metric(name, lambda outputs, labels: own.take({"": main_output(outputs, labels)}, labels), own.total)


def main_output(outputs: Outputs, labels: Array) -> Array:
    """The output that labels speak of: the first with a row for each of them."""
    fitting = [value for value in outputs.values() if value.ndim and len(value) == len(labels)]
    return fitting[0] if fitting else next(iter(outputs.values()))


def top_k(k: int) -> Callable[[Array, Array], Scores]:
    """Whether the class is among the k that the model holds most likely."""

    def score(output: Array, labels: Array) -> Scores:
        rows = output.reshape(len(labels), -1)
        best = np.argsort(-rows, axis=1, kind="stable")[:, :k]
        found: Scores = (best == labels.reshape(-1, 1)).any(axis=1).astype(np.float64)
        return found

    return score


def _squared_error(output: Array, labels: Array) -> Scores:
    errors = output.astype(np.float64).reshape(len(labels), -1) - labels.astype(np.float64).reshape(len(labels), -1)
    squares: Scores = (errors**2).mean(axis=1)
    return squares


def _cosine(output: Array, labels: Array) -> Scores:
    first, second = (each.astype(np.float64).reshape(len(labels), -1) for each in (output, labels))
    lengths = np.linalg.norm(first, axis=1) * np.linalg.norm(second, axis=1)
    cosines: Scores = (first * second).sum(axis=1) / np.maximum(lengths, 1e-30)
    return cosines


def _surprise(output: Array, labels: Array) -> Scores:
    """Minus the log-likelihood of a sample's labels, and over how many positions that is."""
    values = output.astype(np.float64)
    shifted = values - values.max(axis=-1, keepdims=True)
    logs = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    counts = labels != IGNORED_LABEL
    picked = np.take_along_axis(logs, np.where(counts, labels, 0)[..., None].astype(np.int64), axis=-1)[..., 0]
    return np.stack([each.reshape(len(labels), -1).sum(axis=1) for each in (-picked * counts, counts)], axis=1)


def _perplexity(parts: Sequence[Scores]) -> float:
    surprise, positions = np.concatenate(parts).sum(axis=0)
    return -math.exp(min(surprise / max(positions, 1), 700.0))


def macro_f1(output: Array, labels: Array) -> float:
    """The F1 of every class that is there, averaged, in percent."""
    guesses, truth = output.reshape(len(labels), -1).argmax(axis=1), labels.reshape(-1)
    scores = []
    for each in np.unique(truth):
        hits = float(((guesses == each) & (truth == each)).sum())
        scores.append(2 * hits / float((guesses == each).sum() + (truth == each).sum()))
    return 100 * float(np.mean(scores))


def spearman(output: Array, labels: Array) -> float:
    """The correlation of ranks; of two embeddings a sample ([samples, 2, width]), that of their cosines."""
    if output.ndim == 3 and output.shape[1] == 2:
        output = _cosine(output[:, 0], output[:, 1])
    ranks = [_ranks(np.asarray(each, np.float64).reshape(len(labels), -1)[:, 0]) for each in (output, labels)]
    spread = [each - each.mean() for each in ranks]
    return float((spread[0] * spread[1]).sum() / max(np.linalg.norm(spread[0]) * np.linalg.norm(spread[1]), 1e-30))


def _ranks(values: Scores) -> Scores:
    """Ranks, those of equal values averaged."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    ranks: Scores = (ends - (counts - 1) / 2.0)[inverse]
    return ranks


def mean_average_precision(output: Array, labels: Array) -> float:
    """Of boxes [samples, boxes, (x1, y1, x2, y2, score, class)] against [samples, boxes, (x1, y1, x2, y2, class)].

    A class below zero is no box. In percent, at an overlap of one half, precision interpolated at every hit.
    """
    classes = [each for each in np.unique(labels[..., 4]) if each >= 0]
    return 100 * float(np.mean([_average_precision(output, labels, each) for each in classes])) if classes else 0.0


def _average_precision(output: Array, labels: Array, kind: float) -> float:
    found = []  # score, and whether the box is one that nobody found before
    wanted = 0
    for boxes, truth in zip(output.astype(np.float64), labels.astype(np.float64), strict=True):
        mine, theirs = boxes[boxes[:, 5] == kind], truth[truth[:, 4] == kind]
        wanted += len(theirs)
        taken: set[int] = set()
        for box in mine[np.argsort(-mine[:, 4], kind="stable")]:
            overlaps = _overlaps(box[:4], theirs[:, :4])
            best = int(overlaps.argmax()) if len(overlaps) else -1
            hit = best >= 0 and overlaps[best] >= OVERLAP and best not in taken
            taken |= {best} if hit else set()
            found.append((box[4], hit))
    hits = np.array([hit for _, hit in sorted(found, key=lambda pair: -pair[0])], bool)
    if not hits.any():
        return 0.0
    precision = np.cumsum(hits) / np.arange(1, len(hits) + 1)
    envelope = np.maximum.accumulate(precision[::-1])[::-1]
    return float(envelope[hits].sum() / wanted)


def _overlaps(box: Scores, boxes: Scores) -> Scores:
    corners = np.maximum(box[:2], boxes[:, :2]), np.minimum(box[2:], boxes[:, 2:])
    shared = np.clip(corners[1] - corners[0], 0, None).prod(axis=1)
    areas = (box[2:] - box[:2]).prod() + (boxes[:, 2:] - boxes[:, :2]).prod(axis=1)
    ratios: Scores = shared / np.maximum(areas - shared, 1e-30)
    return ratios


def _percent(share: float) -> float:
    return 100 * share


METRICS: Mapping[str, Metric] = {
    "top1": _mean("top1", top_k(1), _percent),
    "top5": _mean("top5", top_k(5), _percent),
    "f1": _of_main("f1", macro_f1),
    "mse": _mean("mse", _squared_error, lambda mean: -mean),
    "cosine": _mean("cosine", _cosine),
    "spearman": _of_main("spearman", spearman),
    "perplexity": Metric(
        "perplexity",
        lambda outputs, labels: _surprise(main_output(outputs, labels), labels),
        _perplexity,
        of_rows=True,
    ),
    "map": _of_main("map", mean_average_precision),
}
