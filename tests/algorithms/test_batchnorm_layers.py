"""Re-fusing one layer: its output gets the wanted statistics, its quantized values stay."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tuning import stats

from models import (
    build,
    normal,
)
from onnxcalib.algorithms.batchnorm import LIMITS, refold_layer
from onnxcalib.algorithms.rounding import least_scale
from onnxcalib.model.layers import Layer, find_layers
from onnxcalib.model.read import read_prepared
from onnxcalib.numerics.quant_params import QuantScheme, dequantize, make_qparams, quantize, with_least_scale
from onnxcalib.plan import LayerParams
from onnxcalib.targets import find_target

# Re-fusing one layer.


def gemm_layer(channels: int, inputs: int) -> Layer:
    model = build(f"net (float[N,{inputs}] x) => (float[N,{channels}] y) {{ [fc] y = Gemm <transB=1> (x, w, b) }}",
                  w=normal(channels, inputs), b=normal(channels))  # fmt: skip
    return find_layers(read_prepared(model, find_target("ort"))).layers[0]


def rounded(weight: np.ndarray, bias: np.ndarray | None, bits: int, target: str) -> LayerParams:
    kind = find_target(target).weight_scheme(bits)
    qparams = make_qparams(weight.min(axis=1), weight.max(axis=1), kind, axis=0)
    return LayerParams(quantize(weight, qparams), qparams, bias, weight)


ACTIVATION = make_qparams(0.0, 4.0, QuantScheme(8, signed=False, symmetric=False))


CHANNELS, INPUTS = 4, 6


layer_histograms = st.lists(st.floats(1e-3, 1e3), min_size=CHANNELS, max_size=CHANNELS).map(np.array)


means = st.lists(st.floats(-50, 50), min_size=CHANNELS, max_size=CHANNELS).map(np.array)


def output(params: LayerParams, x: np.ndarray) -> np.ndarray:
    bias = 0.0 if params.bias is None else params.bias.astype(np.float64)
    return x @ dequantize(params.quantized, params.qparams).astype(np.float64).T + bias


@settings(max_examples=60)
@given(
    st.integers(0, 10**6), st.sampled_from(["ort", "paper"]), st.integers(2, 8), st.booleans(), means, layer_histograms
)
def test_the_output_gets_the_wanted_statistics(
    seed: int, target: str, bits: int, has_bias: bool, mean: np.ndarray, spread: np.ndarray
) -> None:
    rng = np.random.default_rng(seed)
    weight = rng.standard_normal((CHANNELS, INPUTS)).astype(np.float32)
    bias = rng.standard_normal(CHANNELS).astype(np.float32) if has_bias else None
    params = rounded(weight, bias, bits, target)
    x = rng.uniform(0, 4, (40, INPUTS))
    before = output(params, x)
    found, wanted = stats(before.mean(axis=0), before.var(axis=0)), stats(mean, spread**2)
    layer = gemm_layer(CHANNELS, INPUTS)
    tuned = refold_layer(params, layer, find_target(target), ACTIVATION, wanted, found, scale=True)
    factor = np.clip(spread / np.sqrt(found.variance), *LIMITS)
    after = output(tuned, x)
    np.testing.assert_allclose(after, factor * (before - found.mean) + mean, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(after.mean(axis=0), mean, rtol=1e-4, atol=1e-4)
    kept = (factor > LIMITS[0]) & (factor < LIMITS[1])
    np.testing.assert_allclose(after.std(axis=0)[kept], spread[kept], rtol=1e-4)
    assert tuned.quantized is params.quantized
    np.testing.assert_array_equal(tuned.qparams.zero_point, params.qparams.zero_point)


def held(params: LayerParams, target: str) -> LayerParams:
    """With steps no finer than the int32 bias allows, as rounding makes them."""
    assert params.bias is not None
    least = least_scale(find_target(target), params.bias, ACTIVATION, per_channel=True)
    return replace(params, qparams=with_least_scale(params.qparams, least))


@settings(max_examples=60)
@given(st.integers(0, 10**6), st.sampled_from(["ort", "paper"]), st.sampled_from([1.0, 1e-13]), means, layer_histograms)
@example(3, "ort", 1e-13, np.full(CHANNELS, 49.0), np.ones(CHANNELS))
@example(4, "ort", 1e-13, np.full(CHANNELS, -31.0), np.ones(CHANNELS))
def test_equal_statistics_change_no_bit(
    seed: int, target: str, size: float, mean: np.ndarray, spread: np.ndarray
) -> None:
    rng = np.random.default_rng(seed)
    weight = (size * rng.standard_normal((CHANNELS, INPUTS))).astype(np.float32)
    bias = (rng.standard_normal(CHANNELS) * 10.0 ** rng.integers(-12, 3, CHANNELS)).astype(np.float32)
    layer = gemm_layer(CHANNELS, INPUTS)
    params, same = held(rounded(weight, bias, 4, target), target), stats(mean, spread**2)
    tuned = refold_layer(params, layer, find_target(target), ACTIVATION, same, same, scale=True)
    assert tuned.qparams.scale.dtype == np.float32
    assert tuned.qparams.scale.tobytes() == params.qparams.scale.tobytes()
    assert tuned.bias is not None
    assert tuned.bias.tobytes() == bias.tobytes()
    assert tuned.quantized.tobytes() == params.quantized.tobytes()


EXTREMES = {
    "zero found": ([1.0] * CHANNELS, [0.0] * CHANNELS, LIMITS[1]),
    "zero wanted": ([0.0] * CHANNELS, [1.0] * CHANNELS, LIMITS[0]),
    "both zero": ([0.0] * CHANNELS, [0.0] * CHANNELS, 1.0),
    "huge": ([1e30] * CHANNELS, [1e-30] * CHANNELS, LIMITS[1]),
    "tiny": ([1e-30] * CHANNELS, [1e30] * CHANNELS, LIMITS[0]),
}


@pytest.mark.parametrize("target", ["ort", "paper"])
@pytest.mark.parametrize("case", EXTREMES)
def test_a_broken_channel_keeps_a_sound_grid(case: str, target: str) -> None:
    wanted, found, factor = EXTREMES[case]
    params = rounded(normal(CHANNELS, INPUTS), normal(CHANNELS), 4, target)
    pair = stats(normal(CHANNELS, seed=1), np.array(wanted)), stats(normal(CHANNELS, seed=2), np.array(found))
    layer = gemm_layer(CHANNELS, INPUTS)
    tuned = refold_layer(params, layer, find_target(target), ACTIVATION, *pair, scale=True)
    np.testing.assert_allclose(tuned.qparams.scale, params.qparams.scale * factor, rtol=1e-6)
    assert np.isfinite(tuned.qparams.scale).all()
    assert (tuned.qparams.scale > 0).all()
    assert tuned.bias is not None
    assert np.isfinite(tuned.bias).all()


def test_a_step_does_not_shrink_below_what_the_bias_needs() -> None:
    """Channels of nearly zero weights: their mean is their bias, and a factor of a quarter would overflow it."""
    layer, bias = gemm_layer(CHANNELS, INPUTS), np.array([5, -300, 1e-3, 40], np.float32)
    params = held(rounded(1e-13 * normal(CHANNELS, INPUTS), bias, 8, "ort"), "ort")
    wanted, found = stats(1.5 * bias, np.zeros(CHANNELS)), stats(bias, np.ones(CHANNELS))
    tuned = refold_layer(params, layer, find_target("ort"), ACTIVATION, wanted, found, scale=True)
    assert tuned.bias is not None
    np.testing.assert_allclose(tuned.bias, 1.5 * bias, rtol=1e-6)
    quantized = np.abs(tuned.bias.astype(np.float64)) / (
        tuned.qparams.scale.astype(np.float64) * float(ACTIVATION.scale)
    )
    assert (quantized <= 2.0**30 * (1 + 1e-6)).all()
    assert (quantized >= 2.0**29).all()  # no coarser than needed


def test_without_scaling_only_the_bias_moves() -> None:
    params = rounded(normal(CHANNELS, INPUTS), normal(CHANNELS), 4, "ort")
    wanted, found = (
        stats(normal(CHANNELS, seed=1), np.full(CHANNELS, 4.0)),
        stats(np.zeros(CHANNELS), np.ones(CHANNELS)),
    )
    layer = gemm_layer(CHANNELS, INPUTS)
    tuned = refold_layer(params, layer, find_target("ort"), ACTIVATION, wanted, found, scale=False)
    np.testing.assert_array_equal(tuned.qparams.scale, params.qparams.scale)
    np.testing.assert_allclose(tuned.bias, params.bias + wanted.mean, rtol=1e-6)
