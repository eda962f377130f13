"""Grids against onnxruntime's own QuantizeLinear and DequantizeLinear, and what every grid promises."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import onnxruntime as ort
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from models import build, session_of
from onnxcalib.numerics.quant_params import (
    QuantParams,
    QuantScheme,
    dequantize,
    fake_quantize,
    make_qparams,
    most_scale,
    quantize,
    rounding_errors,
    with_least_scale,
    within,
)

BITS = range(2, 9)
KINDS = [
    QuantScheme(bits, signed, symmetric) for bits in BITS for signed in (False, True) for symmetric in (False, True)
]
kinds = st.sampled_from(KINDS)


@cache
def quantizer(signed: bool, axis: int | None) -> ort.InferenceSession:
    dtype, attribute = "int8" if signed else "uint8", "" if axis is None else f"<axis={axis}>"
    shape = "" if axis is None else "[C]"
    return session_of(
        build(f"""
    net (float[A,B,D] x, float{shape} scale, {dtype}{shape} zero, {dtype} low, {dtype} high)
        => ({dtype}[A,B,D] codes) {{
        wide = QuantizeLinear {attribute} (x, scale, zero)
        codes = Clip (wide, low, high)
    }}""")
    )


@cache
def dequantizer(signed: bool, axis: int | None) -> ort.InferenceSession:
    dtype, attribute = "int8" if signed else "uint8", "" if axis is None else f"<axis={axis}>"
    shape = "" if axis is None else "[C]"
    return session_of(
        build(f"""
    net ({dtype}[A,B,D] codes, float{shape} scale, {dtype}{shape} zero) => (float[A,B,D] x) {{
        x = DequantizeLinear {attribute} (codes, scale, zero)
    }}""")
    )


def reference_codes(values: np.ndarray, made: QuantParams) -> np.ndarray:
    feed = {"x": values, "scale": made.scale, "zero": made.zero_point.astype(made.dtype)}
    limits = {"low": np.array(made.low, made.dtype), "high": np.array(made.high, made.dtype)}
    return quantizer(made.signed, made.axis).run(None, feed | limits)[0]


def reference_values(quantized: np.ndarray, made: QuantParams) -> np.ndarray:
    feed = {"codes": quantized, "scale": made.scale, "zero": made.zero_point.astype(made.dtype)}
    return dequantizer(made.signed, made.axis).run(None, feed)[0]


@st.composite
def qparams(draw: st.DrawFn, channels: int = 3) -> QuantParams:
    kind, axis = draw(kinds), draw(st.sampled_from([None, 0, 1, 2]))
    count = 1 if axis is None else channels
    ends = st.lists(st.floats(0, 1e4, width=32), min_size=count, max_size=count)
    low, high = -np.array(draw(ends)), np.array(draw(ends))
    return make_qparams(low[0], high[0], kind) if axis is None else make_qparams(low, high, kind, axis)


def values_near(draw: st.DrawFn, made: QuantParams) -> np.ndarray:
    """Ordinary values, huge ones, zeros of both signs, and values exactly between two quantized values."""
    plain = draw(hnp.arrays(np.float32, (3, 3, 3), elements=st.floats(-1e5, 1e5, width=32)))
    halves = draw(hnp.arrays(np.int32, (3, 3, 3), elements=st.integers(-600, 600)))
    which = draw(hnp.arrays(np.int8, (3, 3, 3), elements=st.integers(0, 3)))
    shape = [1, 1, 1]
    if made.axis is not None:
        shape[made.axis] = 3
    between = (halves.astype(np.float32) * np.float32(0.5)) * made.scale.reshape(shape)
    extreme = np.array([0.0, -0.0, 3.4e38, -3.4e38, 1e-45, -1e-45], np.float32)[np.abs(halves) % 6]
    return np.select([which == 0, which == 1, which == 2], [plain, between, extreme], np.float32(0)).astype(np.float32)


@settings(max_examples=300)
@given(st.data())
def test_codes_equal_quantizelinear_bit_for_bit(data: st.DataObject) -> None:
    made = data.draw(qparams())
    values = values_near(data.draw, made)
    quantized = quantize(values, made)
    assert quantized.dtype == made.dtype
    np.testing.assert_array_equal(quantized, reference_codes(values, made))


@settings(max_examples=200)
@given(st.data())
def test_values_equal_dequantizelinear_bit_for_bit(data: st.DataObject) -> None:
    made = data.draw(qparams())
    quantized = data.draw(hnp.arrays(made.dtype, (3, 3, 3), elements=st.integers(made.low, made.high)))
    values = dequantize(quantized, made)
    assert values.dtype == np.float32
    np.testing.assert_array_equal(values.view(np.uint32), reference_values(quantized, made).view(np.uint32))


@given(st.data())
def test_rounding_errors_are_what_the_grid_adds(data: st.DataObject) -> None:
    made = data.draw(qparams())
    values = values_near(data.draw, made)
    np.testing.assert_array_equal(rounding_errors(values, made), fake_quantize(values, made) - values)


@given(qparams())
def test_zero_lies_exactly_on_every_grid(made: QuantParams) -> None:
    zeros = np.zeros((3, 3, 3), np.float32)
    assert made.low <= made.zero_point.min() <= made.zero_point.max() <= made.high
    np.testing.assert_array_equal(fake_quantize(zeros, made), zeros)


@given(st.data())
def test_values_on_the_grid_stay(data: st.DataObject) -> None:
    made = data.draw(qparams())
    quantized = data.draw(hnp.arrays(made.dtype, (3, 3, 3), elements=st.integers(made.low, made.high)))
    np.testing.assert_array_equal(quantize(dequantize(quantized, made), made), quantized)


@given(kinds, st.floats(0, 1e4), st.floats(0, 1e4))
def test_a_grid_covers_its_range_within_half_a_step(kind: QuantScheme, below: float, above: float) -> None:
    made = make_qparams(-below, above, kind)
    step = float(made.scale)
    ends = np.array([-below, above], np.float32)
    # An asymmetric zero point is rounded, which moves both ends by at most half a step.
    slack = 0.5 * step * (1 + 1e-3)
    assert (np.abs(fake_quantize(ends, made) - ends) <= slack).all()
    inside = np.linspace(-below, above, 101).astype(np.float32)
    assert (np.abs(fake_quantize(inside, made) - inside) <= slack).all()


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_codes_of_a_kind(kind: QuantScheme) -> None:
    low, high = kind.limits
    made = make_qparams(-3.0, 1.0, kind)
    assert (made.low, made.high) == (low, high)
    assert high - low + 1 == 2**kind.bits - (kind.symmetric and kind.signed and kind.bits == 8)
    assert low >= (-128 if kind.signed else 0)
    assert high == (2 ** (kind.bits - 1) - 1 if kind.signed else 2**kind.bits - 1)
    if kind.symmetric and kind.signed:
        assert made.zero_point == 0
    elif kind.symmetric:
        assert made.zero_point == 2 ** (kind.bits - 1)


@given(hnp.arrays(np.float32, 20, elements=st.floats(width=32, allow_nan=False, allow_infinity=False)))
def test_minus_128_never_appears_in_symmetric_eight_bit(values: np.ndarray) -> None:
    made = make_qparams(-2.0, 1.0, QuantScheme(8, signed=True, symmetric=True))
    assert quantize(values, made).min() >= -127
    assert quantize(np.array([-1e30], np.float32), made) == -127


def test_only_full_grids_rely_on_saturation() -> None:
    full = {kind for kind in KINDS if make_qparams(-1, 1, kind).fills_container}
    assert full == {QuantScheme(8, False, False), QuantScheme(8, False, True), QuantScheme(8, True, False)}


def test_range_is_what_the_outermost_codes_mean() -> None:
    made = make_qparams([-1.0, -2.0], [3.0, 0.5], QuantScheme(4, signed=False, symmetric=False), 0)
    low, high = made.range
    outer = np.array([[made.low, made.high]] * 2, np.uint8)
    np.testing.assert_array_equal(np.stack([low, high], axis=1), dequantize(outer, made))


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_constant_zero_tensor_has_a_sound_grid(kind: QuantScheme) -> None:
    made = make_qparams(0.0, 0.0, kind)
    assert np.isfinite(made.scale)
    assert made.scale >= np.finfo(np.float32).tiny
    np.testing.assert_array_equal(fake_quantize(np.zeros(3, np.float32), made), np.zeros(3))


def test_positive_and_negative_ranges_are_widened_to_zero() -> None:
    kind = QuantScheme(8, signed=False, symmetric=False)
    assert make_qparams(2.0, 5.1, kind).zero_point == 0
    assert make_qparams(2.0, 5.1, kind).scale == np.float32(5.1 / 255)
    assert make_qparams(-5.1, -2.0, kind).zero_point == 255


ends = st.floats(0, 100, width=32).filter(lambda end: end == 0 or end > 0.01)
bounded = st.tuples(ends.map(lambda end: -end) | st.just(-np.inf), ends | st.just(np.inf)).filter(
    lambda bounds: bounds[0] < bounds[1]
)


@st.composite
def moved_grids(draw: st.DrawFn, kind: QuantScheme) -> QuantParams:
    """A grid as training might leave it: any scale, and any zero point where that may move."""
    made = make_qparams(-draw(ends), draw(ends), kind)
    zero = int(made.zero_point) if kind.symmetric else draw(st.integers(*kind.limits))
    return replace(made, zero_point=np.array(zero, np.int32))


@settings(max_examples=500)
@given(st.data(), kinds.filter(lambda kind: not kind.symmetric), bounded)
def test_no_code_lies_beyond_the_bounds_and_little_changes(
    data: st.DataObject, kind: QuantScheme, bounds: tuple[float, float]
) -> None:
    made = data.draw(moved_grids(kind))
    held = within(made, bounds, kind)
    assert bounds[0] <= held.range[0] <= 0 <= held.range[1] <= bounds[1]
    assert held.scale.dtype == np.float32
    span, step = made.high - made.low, float(made.scale)
    if bounds[0] <= made.range[0] and made.range[1] <= bounds[1]:
        assert (held.scale, held.zero_point) == (made.scale, made.zero_point)
    elif bounds[1] - bounds[0] >= (span + 1) * step * (1 + 1e-6):  # there is room for all steps: the range is shifted
        assert held.scale == made.scale
        low, high = (max(held.range[0], made.range[0]), min(held.range[1], made.range[1]))
        values = np.linspace(low, high, 50).astype(np.float32)
        np.testing.assert_array_equal(fake_quantize(values, held), fake_quantize(values, made))
    else:  # there is none for one step more
        assert held.scale * (span + 1) >= min(bounds[1] - bounds[0], step * span) * (1 - 1e-6)


@given(st.data(), kinds.filter(lambda kind: kind.symmetric), bounded)
def test_a_symmetric_grid_keeps_its_zero_and_reaches_the_farther_bound(
    data: st.DataObject, kind: QuantScheme, bounds: tuple[float, float]
) -> None:
    made = data.draw(moved_grids(kind))
    held = within(made, bounds, kind)
    assert held.zero_point == made.zero_point
    if held.scale == made.scale:
        assert held.range[1] <= bounds[1] or held.range[0] >= bounds[0]
    else:
        assert held.scale < made.scale
        far = np.float32(max(bounds, key=abs))
        assert abs(fake_quantize(far, held) - far) <= 1.001 * held.scale


@given(ends.filter(bool), st.integers(2, 8), st.booleans())
def test_a_range_that_ends_at_the_bound_does_not_pass_it_by_rounding(high: float, bits: int, signed: bool) -> None:
    kind = QuantScheme(bits, signed, symmetric=False)
    made = make_qparams(0.0, high, kind)
    held = within(made, (0.0, high), kind)
    assert held.range[1] <= np.float32(high)
    assert held.range[1] == pytest.approx(high, rel=3e-7)
    assert held.scale == most_scale(made, (0.0, high), kind)
    assert held.zero_point == made.zero_point


@given(st.data(), bounded)
def test_powers_of_two_stay(data: st.DataObject, bounds: tuple[float, float]) -> None:
    kind = QuantScheme(8, signed=True, symmetric=data.draw(st.booleans()), power_of_two=True)
    made = data.draw(moved_grids(kind))
    held = within(made, bounds, kind)
    assert (held.scale, held.zero_point) == (made.scale, made.zero_point)


def test_with_least_scale_raises_only_smaller_scales() -> None:
    made = make_qparams([-1.0, -1.0], [1.0, 8.0], QuantScheme(8, signed=True, symmetric=True), 0)
    raised = with_least_scale(made, [0.02, 0.02])
    np.testing.assert_array_equal(raised.scale, np.array([0.02, 8 / 127], np.float32))
    assert raised.scale.dtype == np.float32
    assert (raised.low, raised.high, raised.axis) == (made.low, made.high, made.axis)
    np.testing.assert_array_equal(raised.zero_point, made.zero_point)
    np.testing.assert_array_equal(made.scale, np.array([1 / 127, 8 / 127], np.float32))
