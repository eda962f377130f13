"""Metrics against their definitions, and how sure a drop is."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from said import refused

from onnxcalib.errors import RecipeError
from onnxcalib.numerics.metric import Drop, MetricLoss, from_function
from onnxcalib.numerics.metrics import IGNORED_LABEL, METRICS
from onnxcalib.recipe.metrics import find_metric

RNG = np.random.default_rng(0)


def value(name: str, output: np.ndarray, labels: np.ndarray, batch: int = 3) -> float:
    """The metric of some batches."""
    metric = METRICS[name]
    cuts = range(0, len(labels), batch)
    return metric.total([metric.take({"y": output[at : at + batch]}, labels[at : at + batch]) for at in cuts])


@pytest.mark.parametrize("k", [1, 5])
def test_top_k_is_the_share_of_labels_among_the_best(k: int) -> None:
    logits, labels = RNG.normal(size=(40, 12)), RNG.integers(0, 12, 40)
    ranks = [sorted(row, reverse=True).index(row[label]) for row, label in zip(logits, labels, strict=True)]
    assert value(f"top{k}", logits, labels) == pytest.approx(100 * np.mean([rank < k for rank in ranks]))


def test_f1_counts_every_class_alike() -> None:
    guesses, labels = np.array([0, 0, 0, 1, 2, 2]), np.array([0, 0, 1, 1, 2, 0])
    # By hand: class 0 has precision 2/3 and recall 2/3, class 1 1 and 1/2, class 2 1/2 and 1.
    expected = np.mean([2 / 3, 2 * (1 * 0.5) / 1.5, 2 * (0.5 * 1) / 1.5])
    assert value("f1", np.eye(3)[guesses], labels) == pytest.approx(100 * expected)


def test_regression_and_embeddings() -> None:
    output, labels = RNG.normal(size=(2, 20, 7))
    assert value("mse", output, labels) == pytest.approx(-((output - labels) ** 2).mean())
    cosines = [a @ b / math.sqrt((a @ a) * (b @ b)) for a, b in zip(output, labels, strict=True)]
    assert value("cosine", output, labels) == pytest.approx(np.mean(cosines))


def test_perplexity_counts_positions_not_samples_and_leaves_padding_out() -> None:
    logits, labels = RNG.normal(size=(6, 5, 11)), RNG.integers(0, 11, (6, 5))
    labels[0, 2:], labels[4, 1:] = IGNORED_LABEL, IGNORED_LABEL
    logs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    picked = [logs[i, j, labels[i, j]] for i in range(6) for j in range(5) if labels[i, j] >= 0]
    assert value("perplexity", logits, labels, batch=2) == pytest.approx(-math.exp(-np.mean(picked)))


@given(st.lists(st.tuples(st.integers(-5, 5), st.integers(-5, 5)), min_size=3, max_size=20))
def test_spearman_is_the_correlation_of_averaged_ranks(pairs: list[tuple[int, int]]) -> None:
    first, second = (np.array(each, float) for each in zip(*pairs, strict=True))

    def ranks(values: np.ndarray) -> np.ndarray:
        return np.array([(values < each).sum() + ((values == each).sum() + 1) / 2 for each in values])

    if len(set(first)) == 1 or len(set(second)) == 1:
        assert value("spearman", first[:, None], second) == 0
    else:
        expected = np.corrcoef(ranks(first), ranks(second))[0, 1]
        assert value("spearman", first[:, None], second) == pytest.approx(expected)


def test_spearman_of_sentence_pairs_is_that_of_their_cosines() -> None:
    pairs, scores = RNG.normal(size=(9, 2, 4)), RNG.normal(size=9)
    cosines = np.array([a @ b / np.linalg.norm(a) / np.linalg.norm(b) for a, b in pairs])
    assert value("spearman", pairs, scores) == pytest.approx(value("spearman", cosines[:, None], scores))


def test_mean_average_precision_by_hand() -> None:
    truth = np.array([[[0, 0, 10, 10, 1], [20, 20, 30, 30, 1]], [[0, 0, 10, 10, 2], [0, 0, 0, 0, -1]]], float)
    found = np.array(
        [
            # A hit, a second box on the same object (no hit), and one that overlaps nothing.
            [[0, 0, 10, 9, 0.9, 1], [0, 0, 10, 10, 0.8, 1], [50, 50, 60, 60, 0.7, 1]],
            [[0, 0, 10, 10, 0.6, 2], [0, 0, 1, 1, 0.1, -1], [0, 0, 1, 1, 0.1, -1]],
        ],
        float,
    )
    # Class 1: one of two objects found, by the first box: 1/2. Class 2: all found: 1.
    assert value("map", found, truth, batch=1) == pytest.approx(100 * (0.5 + 1) / 2)


def test_a_drop_knows_its_own_error() -> None:
    """The error of a difference of paired shares, against the formula of the binomial."""
    labels = np.zeros(400, np.int64)
    right, wrong = np.array([1.0, 0.0]), np.array([0.0, 1.0])
    before = np.stack([right] * 360 + [wrong] * 40)
    after = np.stack([right] * 340 + [wrong] * 40 + [right] * 20)
    loss = MetricLoss(METRICS["top1"])
    loss.update({"y": before}, {"y": after, "inner": after}, labels)
    assert (loss.drop.before, loss.drop.after, loss.value) == (90, 90, 0)
    spread = 100 * math.sqrt(60 / 400 / 400)  # 40 lost, 20 won, less the square of their mean
    assert loss.drop.error == pytest.approx(spread, rel=0.2)


def test_chance_of_more() -> None:
    assert Drop(90, 89, 0.5, 100).chance_above(1) == pytest.approx(0.5)
    assert Drop(90, 89, 0.5, 100).chance_above(2) == pytest.approx(0.0228, abs=1e-3)
    assert Drop(90, 90, 0.0, 100).chance_above(0.1) == 0


def test_a_function_sees_all_samples_and_the_only_output_alone() -> None:
    seen = []
    metric = from_function(lambda output, labels: seen.append((output, labels)) or 1.0, "own")
    parts = [metric.take({"y": np.ones((2, 3))}, np.zeros(2)), metric.take({"y": np.ones((1, 3))}, np.zeros(1))]
    assert metric.total(parts) == 1.0
    assert seen[0][0].shape == (3, 3)
    metric.total([metric.take({"a": np.ones((2, 3)), "b": np.ones((2, 1))}, np.zeros(2))])
    assert set(seen[1][0]) == {"a", "b"}


def test_metrics_by_module_and_function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "judging.py").write_text(
        "def first(y, labels):\n    return float(y[0, 0])\ndef bad(y, labels):\n    raise KeyError('no such thing')\n"
        "def nan(y, labels):\n    return float('nan')\nnumber = 3\n"
    )
    monkeypatch.chdir(tmp_path)
    parts = [({"y": np.full((1, 1), 7.0)}, np.zeros(1))]
    assert find_metric("judging:first").total(parts) == 7
    for name in ("bad", "nan"):
        with refused(RecipeError, f"judging:{name}"):
            find_metric(f"judging:{name}").total(parts)
    for wanted in ("judging:missing", "judging:number", "no_such_module:f", "top2"):
        with refused(RecipeError, wanted):
            find_metric(wanted)
