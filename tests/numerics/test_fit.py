"""Outputs of other sizes are compared as far as they go."""

from __future__ import annotations

import numpy as np
import pytest

from onnxcalib.numerics.fit import in_shape


@pytest.mark.parametrize("shape", [(2, 3), (4, 3), (3, 2), (3, 5), (0, 3)])
def test_what_is_missing_is_zero_and_more_is_cut(shape: tuple[int, int]) -> None:
    output = np.full(shape, 2, np.float32)
    rows, columns = min(shape[0], 3), min(shape[1], 3)
    expected = np.zeros((3, 3), np.float32)
    expected[:rows, :columns] = 2
    np.testing.assert_array_equal(in_shape((3, 3), output), expected)


def test_of_another_rank_nothing_is_comparable() -> None:
    assert not in_shape((2, 2), np.ones(4, np.float32)).any()
