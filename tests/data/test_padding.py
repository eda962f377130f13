"""Padding is told by the mask among the inputs, and by nothing else."""

from __future__ import annotations

import numpy as np
import pytest

from onnxcalib.data import open_data
from onnxcalib.data.padding import find_mask, positions_that_count
from onnxcalib.data.spec import InputSpec
from onnxcalib.numerics.positions import counted, counts_for

IDS = np.array([[5, 6, 7, 0], [8, 9, 0, 0]])
MASK = (IDS != 0).astype(np.int64)
TYPES = np.array([[0, 0, 1, 0], [0, 1, 0, 0]])


@pytest.mark.parametrize("name", ["attention_mask", "input_2"])
@pytest.mark.parametrize("dtype", [np.int64, np.int32, np.bool_])
def test_a_mask_is_found_by_its_name_or_by_the_ids_beside_it(name: str, dtype: type) -> None:
    found = positions_that_count({"ids": IDS, "types": TYPES, name: MASK.astype(dtype)})
    assert found is not None
    np.testing.assert_array_equal(found, MASK == 1)


def test_a_named_mask_counts_whatever_the_ids_are() -> None:
    mask = np.array([[0, 1, 1, 1], [1, 1, 0, 1]])
    np.testing.assert_array_equal(positions_that_count({"ids": IDS + 3, "Attention_Mask": mask}), mask == 1)


@pytest.mark.parametrize(
    "feed",
    [
        {"ids": IDS},  # an id of zero may be a word
        {"ids": IDS, "types": TYPES},
        {"ids": IDS, "types": np.zeros_like(IDS)},
        {"ids": IDS, "mask": np.ones_like(IDS)},
        {"ids": IDS, "mask": MASK[:, :3]},
        {"ids": IDS, "mask": MASK.astype(np.float32)},
        {"mask": MASK},
        {"ids": IDS[:0], "mask": MASK[:0]},
        {"pixels": np.zeros((2, 3, 4, 4), np.float32)},
    ],
)
def test_everything_counts_without_a_mask(feed: dict[str, np.ndarray]) -> None:
    assert positions_that_count(feed) is None


def test_rows_of_padding_are_left_out_of_tensors_that_have_positions() -> None:
    counts = MASK == 1
    values = np.arange(2 * 4 * 3).reshape(2, 4, 3)
    expected = np.stack([values[0, 0], values[0, 1], values[0, 2], values[1, 0], values[1, 1]])
    np.testing.assert_array_equal(counted(values, counts), expected)
    np.testing.assert_array_equal(counted(values.reshape(8, 3), counts), expected)
    np.testing.assert_array_equal(counted(values.reshape(2, 4, 3, 1), counts)[..., 0], expected)


@pytest.mark.parametrize("shape", [(2, 3), (2, 4), (4, 2, 3), (2, 3, 4), (2, 4, 4, 3), (2,), ()])
def test_tensors_without_positions_are_whole(shape: tuple[int, ...]) -> None:
    values = np.zeros(shape)
    assert counts_for(values, MASK == 1) is None
    assert counted(values, MASK == 1) is values


def test_a_mask_without_a_name_is_found_among_samples_that_pad_nothing() -> None:
    full = {"ids": np.array([[5, 6, 7, 8]] * 2), "input_2": np.ones((2, 4), np.int64)}
    specs = [InputSpec(name, np.dtype(np.int64), (None, None)) for name in full]
    data = open_data([full, {"ids": IDS, "input_2": MASK}], specs)
    assert find_mask(data) == "input_2"
    assert find_mask(open_data([full], specs)) is None
