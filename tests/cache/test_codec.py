"""Values there and back, to the bit."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from onnxcalib.cache.codec import classes_in, digest, pack
from onnxcalib.cache.store import Store
from onnxcalib.numerics.quant_params import QuantParams
from onnxcalib.plan import LayerParams
from onnxcalib.recipe import Precision

leaves = st.none() | st.booleans() | st.integers() | st.text() | st.floats()
leaves |= st.builds(Precision, st.integers(2, 8), st.integers(2, 8)) | st.floats(width=32).map(np.float32)
leaves |= arrays.arrays(
    st.sampled_from([np.float32, np.float64, np.int8, np.uint8, np.int32, np.int64]),
    arrays.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3),
)
keys = st.text() | st.integers() | st.builds(Precision, st.integers(2, 8), st.integers(2, 8))
values = st.recursive(
    leaves, lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(keys, inner), max_leaves=12
)


def same(one: Any, other: Any) -> bool:
    """Equal in kind and in every bit."""
    if type(one) is not type(other):
        return False
    if isinstance(one, np.ndarray | np.generic):
        return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    return one == other or (isinstance(one, float) and math.isnan(one) and math.isnan(other))


@settings(max_examples=60)
@given(values)
def test_there_and_back(tmp_path_factory: pytest.TempPathFactory, value: Any) -> None:
    store = Store(tmp_path_factory.getbasetemp(), classes_in(Precision))
    store.put("stage", "key", value)
    assert same(store.get("stage", "key"), value)


def params(scale: float) -> LayerParams:
    qparams = QuantParams(np.float32([scale, 1]), np.int32([0, 3]), 4, False, 0, 15, 0)
    return LayerParams(np.uint8([[1, 2]]), qparams, None, np.asfortranarray(normalish()), None)


def normalish() -> np.ndarray:
    return np.random.default_rng(0).standard_normal((3, 4)).astype(np.float32)


def test_values_of_stages_come_back(tmp_path: Path) -> None:
    store = Store(tmp_path, classes_in(Precision, LayerParams))
    store.put("stage", "key", {"one": {Precision(4, 8): params(0.5)}})
    back = store.get("stage", "key")
    found = back["one"][Precision(4, 8)]
    assert same(found.qparams.scale, params(0.5).qparams.scale)
    assert same(found.weight, np.ascontiguousarray(params(0.5).weight))


def test_a_digest_sees_every_bit_and_no_layout() -> None:
    assert digest(params(0.5)) == digest(params(0.5))
    assert digest(params(0.5)) != digest(params(np.nextafter(np.float32(0.5), np.float32(1))))
    assert digest(normalish()) == digest(np.asfortranarray(normalish()))
    assert digest(np.zeros(4, np.float32)) != digest(np.zeros(4, np.int32))
    assert digest(np.zeros((2, 2))) != digest(np.zeros(4))
    assert digest([1]) != digest((1,))
    assert digest("ab", "c") != digest("a", "bc")


def test_python_objects_are_refused() -> None:
    with pytest.raises(TypeError):
        pack(np.array([object()]), [])
