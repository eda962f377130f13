"""Batches that wait on disk come back as they were."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import hypothesis.extra.numpy as arrays
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from onnxcalib.algorithms.held import Held
from onnxcalib.numerics.quant_params import Array

kinds = st.sampled_from([np.float32, np.float64, np.int8, np.uint8, np.int64, np.bool_])
shapes = arrays.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5)


@given(st.lists(kinds.flatmap(lambda kind: arrays.arrays(kind, shapes)), max_size=5))
def test_batches_of_any_shape_and_type_come_back(batches: list[Array]) -> None:
    with TemporaryDirectory() as folder:
        held = Held(Path(folder) / "tensor.bin")
        held.path.touch()
        for each in batches:
            held.append(each)
        for _ in range(2):
            for wanted, found in zip(batches, held.batches(), strict=True):
                assert found.dtype == wanted.dtype
                np.testing.assert_array_equal(found, wanted)
        assert held.size == sum(each.nbytes for each in batches)


def test_rows_that_do_not_lie_together_come_back(tmp_path: Path) -> None:
    values, held = np.arange(24, dtype=np.float32).reshape(4, 6), Held(tmp_path / "tensor.bin")
    held.append(values[:, ::3])
    held.append(values.T)
    first, second = held.batches()
    np.testing.assert_array_equal(first, values[:, ::3])
    np.testing.assert_array_equal(second, values.T)
