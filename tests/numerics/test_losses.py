"""Losses against float64 references."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from onnxcalib.numerics.losses import MANY_TOKENS, ModelLoss, divergence, kept_of, log_probabilities
from onnxcalib.numerics.output_kind import LossKind, OutputKind
from onnxcalib.numerics.top_tokens import TopTokens

logits = hnp.arrays(np.float32, (4, 5), elements=st.floats(-30, 30, width=32))


def softmax(values: np.ndarray) -> np.ndarray:
    powers = np.exp(values.astype(np.float64) - values.max(axis=-1, keepdims=True))
    return powers / powers.sum(axis=-1, keepdims=True)


def by_definition(reference: np.ndarray, guess: np.ndarray) -> np.ndarray:
    p, q = softmax(reference), softmax(guess)
    return np.sum(p * (np.log(p) - np.log(q)), axis=-1)


@given(logits, logits)
def test_divergence_of_logits(reference: np.ndarray, guess: np.ndarray) -> None:
    found = divergence(reference, guess, OutputKind.LOGITS)
    np.testing.assert_allclose(found, by_definition(reference, guess), rtol=1e-6, atol=1e-9)
    assert (found > -1e-9).all()


@given(logits, st.floats(-1e4, 1e4))
def test_a_common_offset_changes_nothing(values: np.ndarray, offset: float) -> None:
    moved = values.astype(np.float64) + offset
    np.testing.assert_allclose(divergence(values, moved, OutputKind.LOGITS), 0, atol=1e-6)


def test_divergence_of_probabilities_is_that_of_their_logits() -> None:
    reference, guess = np.random.default_rng(0).normal(size=(2, 6, 7))
    found = divergence(softmax(reference), softmax(guess), OutputKind.PROBABILITIES)
    np.testing.assert_allclose(found, by_definition(reference, guess), rtol=1e-9)


def test_impossible_and_huge_values_stay_finite() -> None:
    certain = np.array([[1.0, 0.0, 0.0]])
    assert np.isfinite(divergence(certain, certain[:, ::-1], OutputKind.PROBABILITIES)).all()
    far = np.array([[1e30, -1e30]])
    assert np.isfinite(log_probabilities(far, OutputKind.LOGITS)[0, 0])


@pytest.mark.parametrize("head", OutputKind)
def test_identical_outputs_lose_nothing(head: OutputKind) -> None:
    loss = ModelLoss({"y": head})
    values = softmax(np.random.default_rng(0).normal(size=(8, 5)))
    loss.update({"y": values}, {"y": values})
    assert loss.value == 0.0


def test_values_lose_their_relative_squared_error() -> None:
    reference, guess = np.random.default_rng(0).normal(size=(2, 10, 3, 4)).astype(np.float32)
    loss = ModelLoss({"y": OutputKind.VALUES})
    loss.update({"y": reference}, {"y": guess})
    expected = np.sum((reference.astype(np.float64) - guess) ** 2) / np.sum(reference.astype(np.float64) ** 2)
    assert loss.value == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("head", [each for each in OutputKind if each is not OutputKind.HIDDEN])
def test_batches_and_outputs_add_up(head: OutputKind) -> None:
    reference, guess = (softmax(values) for values in np.random.default_rng(0).normal(size=(2, 11, 5)))
    whole, pieces, two = ModelLoss({"y": head}), ModelLoss({"y": head}), ModelLoss({"y": head, "z": head})
    whole.update({"y": reference}, {"y": guess})
    for part in (slice(0, 3), slice(3, 4), slice(4, 11)):
        pieces.update({"y": reference[part]}, {"y": guess[part]})
    two.update({"y": reference, "z": reference}, {"y": guess, "z": reference})
    assert pieces.value == pytest.approx(whole.value, rel=1e-12)
    assert two.value == pytest.approx(whole.value, rel=1e-12)
    assert whole.value > 0


def test_all_zero_reference_is_no_division_by_zero() -> None:
    loss = ModelLoss({"y": OutputKind.VALUES})
    loss.update({"y": np.zeros((2, 2))}, {"y": np.zeros((2, 2))})
    assert loss.value == 0.0


def test_cross_entropy_is_that_of_the_labels() -> None:
    guess = np.random.default_rng(0).normal(size=(6, 5))
    labels = np.array([0, 1, 2, 3, 4, 0])
    loss = ModelLoss({"z": OutputKind.VALUES, "y": OutputKind.LOGITS}, LossKind.CROSS_ENTROPY)
    outputs = {"y": guess, "z": guess}
    for part in (slice(0, 2), slice(2, 6)):
        loss.update(outputs, {name: value[part] for name, value in outputs.items()}, labels[part])
    assert loss.value == pytest.approx(-np.log(softmax(guess)[np.arange(6), labels]).mean(), rel=1e-9)


def test_mse_looks_at_every_output_as_values() -> None:
    reference, guess = np.random.default_rng(0).normal(size=(2, 6, 5))
    loss = ModelLoss({"y": OutputKind.LOGITS}, LossKind.MSE)
    loss.update({"y": reference}, {"y": guess})
    assert loss.value == pytest.approx(np.sum((reference - guess) ** 2) / np.sum(reference**2), rel=1e-9)


def test_tokens_lose_their_divergence_at_every_position_that_counts() -> None:
    reference, guess = np.random.default_rng(0).normal(size=(2, 3, 4, 5)).astype(np.float32)
    counts = np.array([[1, 1, 1, 0], [1, 0, 0, 0], [1, 1, 1, 1]], bool)
    loss = ModelLoss({"y": OutputKind.TOKEN_LOGITS}, temperature=4.0)
    loss.update({"y": reference}, {"y": guess}, counts=counts)
    assert loss.value == pytest.approx(by_definition(reference, guess)[counts].mean(), rel=1e-5)


def test_embeddings_lose_by_their_angle_alone() -> None:
    reference, guess = np.random.default_rng(0).normal(size=(2, 6, 5))
    cosines = [a @ b / np.sqrt((a @ a) * (b @ b)) for a, b in zip(reference, guess, strict=True)]
    for scale in (1.0, 17.0):
        loss = ModelLoss({"y": OutputKind.EMBEDDING})
        loss.update({"y": reference}, {"y": scale * guess})
        assert loss.value == pytest.approx(1 - np.mean(cosines), rel=1e-9)


def test_padding_does_not_count_for_values() -> None:
    reference, guess = np.random.default_rng(0).normal(size=(2, 2, 3, 4))
    counts = np.array([[1, 1, 0], [1, 0, 0]], bool)
    wild = np.where(counts[..., None], guess, 1e6)
    losses = []
    for each in (guess, wild):
        losses.append(ModelLoss({"y": OutputKind.VALUES}))
        losses[-1].update({"y": reference}, {"y": each}, counts=counts)
    assert losses[0].value == losses[1].value > 0


@pytest.mark.parametrize("kind", [OutputKind.TOKEN_LOGITS, OutputKind.TOKEN_PROBABILITIES])
def test_what_is_kept_of_many_tokens_tells_the_divergence(kind: OutputKind) -> None:
    rng, many = np.random.default_rng(0), MANY_TOKENS + 300
    # As languages have it: few tokens are likely, and most are not.
    reference = (rng.normal(size=(2, 5, many)) - 3 * np.log(np.arange(1, many + 1))).astype(np.float32)
    guess = (reference + 0.2 * rng.normal(size=reference.shape)).astype(np.float32)
    counts = np.array([[1, 1, 1, 1, 0], [1, 1, 0, 0, 0]], bool)
    if kind is OutputKind.TOKEN_PROBABILITIES:
        reference, guess = (softmax(each).astype(np.float32) for each in (reference, guess))
    kept, exact = ModelLoss({"y": kind}), ModelLoss({"y": kind})
    small = kept_of({"y": reference}, {"y": kind}, counts)["y"]
    assert isinstance(small, TopTokens)
    assert small.logits.nbytes + small.places.nbytes < reference.nbytes / 3
    kept.update({"y": small}, {"y": guess}, counts=counts)
    exact.update({"y": reference}, {"y": guess}, counts=counts)
    assert 0.97 * exact.value < kept.value <= exact.value + 1e-6
    same = ModelLoss({"y": kind})
    same.update({"y": small}, {"y": reference}, counts=counts)
    assert same.value == pytest.approx(0, abs=1e-6)
