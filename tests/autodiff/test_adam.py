"""Optimisers against plain float64 formulas."""

from __future__ import annotations

import numpy as np
import pytest

from onnxcalib.autodiff.adam import BLOCK, Adam, cosine

SHAPES = {"weight": (3, BLOCK // 2), "bias": (7,), "scale": ()}
RATES = {"weight": 1e-3, "bias": 1e-2, "scale": 1e-1}


def parameters() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {name: np.array(rng.standard_normal(shape), np.float32) for name, shape in SHAPES.items()}


def gradients(step: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(step + 1)
    return {
        name: np.array(rng.standard_normal(shape) * 10.0 ** (step % 5 - 3), np.float32)
        for name, shape in SHAPES.items()
    }


def scale_of(step: int) -> float:
    return 0.5 if step > 40 else 1.0


def adam_reference(name: str, steps: int, betas: tuple[float, float], epsilon: float) -> np.ndarray:
    value = parameters()[name].astype(np.float64)
    mean, square = np.zeros_like(value), np.zeros_like(value)
    for step in range(steps):
        gradient = gradients(step)[name].astype(np.float64)
        mean = betas[0] * mean + (1 - betas[0]) * gradient
        square = betas[1] * square + (1 - betas[1]) * gradient**2
        unbiased_mean = mean / (1 - betas[0] ** (step + 1))
        unbiased_square = square / (1 - betas[1] ** (step + 1))
        value = value - RATES[name] * scale_of(step) * unbiased_mean / (np.sqrt(unbiased_square) + epsilon)
    return value


@pytest.mark.parametrize(("betas", "epsilon"), [((0.9, 0.999), 1e-8), ((0.5, 0.9), 1e-3)])
def test_adam_follows_the_formula_for_many_steps(betas: tuple[float, float], epsilon: float) -> None:
    values = parameters()
    adam = Adam(values, RATES, betas, epsilon)
    for step in range(80):
        adam.step(gradients(step), scale_of(step))
    for name, value in values.items():
        np.testing.assert_allclose(value, adam_reference(name, 80, betas, epsilon), rtol=0, atol=2e-5)


def test_parameters_change_in_place_and_gradients_stay() -> None:
    values, given = parameters(), gradients(0)
    before = {name: value.copy() for name, value in values.items()}
    arrays = dict(values)
    Adam(values, {**RATES, "bias": 0.0}).step(given)
    for name, value in values.items():
        assert value is arrays[name]
        assert np.array_equal(value, before[name]) == (name == "bias")
        assert np.array_equal(given[name], gradients(0)[name])


def test_gradients_of_other_parameters_are_ignored() -> None:
    values = {"bias": parameters()["bias"]}
    Adam(values, RATES).step(gradients(0))
    assert not np.array_equal(values["bias"], parameters()["bias"])


def test_an_array_that_would_be_copied_is_refused() -> None:
    for wrong in (np.zeros((4, 4), np.float32).T[:2], np.zeros(4, np.float64)):
        with pytest.raises(ValueError, match=r"'w'.*float32"):
            Adam({"w": wrong}, {"w": 1.0})


def test_a_parameter_without_a_rate_is_refused() -> None:
    with pytest.raises(KeyError, match="bias"):
        Adam(parameters(), {"weight": 1.0})


def test_the_cosine_falls_from_all_to_nearly_nothing() -> None:
    shares = [cosine(step, 10) for step in range(1, 11)]
    assert shares[0] == 1.0
    assert shares == sorted(shares, reverse=True)
    assert shares[5] == pytest.approx(0.5)
    assert 0 < shares[-1] < 0.03
