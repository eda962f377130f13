"""Samples mixed in pairs."""

from __future__ import annotations

import numpy as np

from onnxcalib.data import InputSpec, MixedPairs, can_be_mixed, open_data

FLOAT = (InputSpec("x", np.dtype(np.float32), (None, 2)),)


def test_each_sample_is_mixed_with_one_some_places_before_it() -> None:
    x = np.arange(12, dtype=np.float32).reshape(6, 2)
    data = open_data({"x": x}, FLOAT)
    mixed = MixedPairs(data, 2)
    assert len(mixed) == 6
    assert mixed.labels is None
    (whole,) = mixed.batches(6)
    np.testing.assert_allclose(whole["x"], 0.6 * x + 0.4 * x[[4, 5, 0, 1, 2, 3]], rtol=1e-6)
    assert whole["x"].dtype == np.float32
    # Again and again the same, and the data stays as it was.
    np.testing.assert_array_equal(next(mixed.batches(6))["x"], whole["x"])
    np.testing.assert_array_equal(next(data.batches(6))["x"], x)


def test_single_samples_are_mixed_with_the_one_before() -> None:
    x = np.arange(6, dtype=np.float32).reshape(3, 2)
    feeds = [feed["x"] for feed in MixedPairs(open_data({"x": x}, FLOAT), 3).batches(1)]
    np.testing.assert_allclose(np.concatenate(feeds), [x[0], 0.6 * x[1] + 0.4 * x[0], 0.6 * x[2] + 0.4 * x[1]])


def test_feeds_of_other_shapes_stay_as_they_are() -> None:
    specs = (InputSpec("x", np.dtype(np.float32), (1, None)),)
    feeds = [{"x": np.ones((1, 2), np.float32)}, {"x": np.zeros((1, 3), np.float32)}]
    made = [feed["x"] for feed in MixedPairs(open_data(feeds, specs), 1).batches(1)]
    np.testing.assert_array_equal(made[0], feeds[0]["x"])
    np.testing.assert_array_equal(made[1], feeds[1]["x"])


def test_tokens_have_no_mixture() -> None:
    both = (*FLOAT, InputSpec("ids", np.dtype(np.int64), (None, 3)))
    x, ids = np.ones((4, 2), np.float32), np.ones((4, 3), np.int64)
    assert can_be_mixed(open_data({"x": x}, FLOAT))
    assert not can_be_mixed(open_data({"x": x, "ids": ids}, both))
