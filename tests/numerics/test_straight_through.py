"""Gradients of quantizers in NumPy, beside those that both engines make of the same quantizer in a graph."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onnxcalib.autodiff.gradients import Gradients
from onnxcalib.model.loss_writer import Along, LossWriter
from onnxcalib.numerics.quant_params import QuantParams, dequantize, fake_quantize, quantize
from onnxcalib.numerics.straight_through import scale_gradient, straight_through
from onnxcalib.recipe import Engine

SHAPE = (6, 10)


def grid(axis: int | None, block: int | None, seed: int, zero: int = 0) -> QuantParams:
    rng = np.random.default_rng(seed)
    sizes: tuple[int, ...] = () if axis is None else (SHAPE[axis],)
    if block is not None:
        sizes = tuple(-(-size // block) if place == axis else size for place, size in enumerate(SHAPE))
    scale = rng.uniform(0.1, 0.4, sizes).astype(np.float32)
    return QuantParams(scale, np.full(sizes, zero, np.int32), 4, True, -8, 7, axis, block)


def by_engine(
    weight: np.ndarray, qparams: QuantParams, gradient: np.ndarray, engine: Engine
) -> tuple[np.ndarray, np.ndarray]:
    """The gradients of the sum of products with the quantized weight."""
    empty = onnx.helper.make_graph([], "empty", [], [])
    writer = LossWriter(onnx.helper.make_model(empty, opset_imports=[onnx.helper.make_opsetid("", 17)]))
    names = [writer.parameter(name, value) for name, value in (("weight", weight), ("scale", qparams.scale))]
    zero = writer.number("zero", qparams.zero_point.astype(np.float32))
    along = Along(qparams.axis, qparams.block, weight.shape)
    made = writer.fake_quantize(*names, zero, (qparams.low, qparams.high), along)
    products = writer.node("Mul", [made, writer.number("upstream", gradient)])
    model = writer.finish(writer.node("ReduceSum", [products], keepdims=0))
    found = Gradients(model, {"weight": weight, "scale": qparams.scale}, engine)
    found.run({})
    return found.gradients["weight"], found.gradients["scale"]


@pytest.mark.parametrize("engine", [Engine.AUTO, Engine.STANDARD])
@pytest.mark.parametrize(("axis", "block"), [(None, None), (0, None), (1, None), (0, 4), (1, 4), (1, 5)])
@pytest.mark.parametrize("zero", [0, 3])
def test_gradients_are_those_of_the_quantizer_in_a_graph(
    engine: Engine, axis: int | None, block: int | None, zero: int
) -> None:
    qparams, rng = grid(axis, block, 1, zero), np.random.default_rng(2)
    weight, gradient = (rng.normal(size=SHAPE).astype(np.float32) * size for size in (2.5, 1.0))
    clipped = np.abs(weight - fake_quantize(weight, qparams)) > 0.3
    assert clipped.any()
    assert not clipped.all()
    expected = by_engine(weight, qparams, gradient, engine)
    for found, wanted in zip(straight_through(weight, qparams, gradient), expected, strict=True):
        assert found.shape == wanted.shape
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)


@given(st.integers(0, 10**6), st.sampled_from([(None, None), (0, None), (1, None), (0, 4), (1, 3)]))
@settings(max_examples=40, deadline=None)
def test_real_values_of_codes_that_stay_are_linear_in_their_scales(
    seed: int, along: tuple[int | None, int | None]
) -> None:
    qparams, rng = grid(*along, seed, zero=-2), np.random.default_rng([seed, 1])
    codes = quantize(rng.normal(size=SHAPE).astype(np.float32), qparams)
    gradient = rng.normal(size=SHAPE).astype(np.float32)
    slopes = scale_gradient(codes, qparams, gradient)
    assert slopes.shape == qparams.scale.shape
    assert float((slopes * qparams.scale).sum()) == pytest.approx(
        float((dequantize(codes, qparams) * gradient).sum()), rel=1e-3, abs=1e-3
    )
