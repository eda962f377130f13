"""Statistics of what is quantized: padding does not count, however it is told."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest

from models import build, conv_net, feed_for, normal
from onnxcalib.algorithms.calibration import calibrate
from onnxcalib.numerics.positions import repeated
from onnxcalib.numerics.statistics import TensorStatistics
from onnxcalib.pipeline.job import start
from onnxcalib.progress import silent
from onnxcalib.recipe import Recipe

WORDS, PAD, LOUD = 20, 0, 50.0


def encoder() -> onnx.ModelProto:
    """Ids looked up and multiplied; what padding is looked up as is far louder than words are."""
    text = """
    net (int64[N,T] ids, int64[N,T] attention_mask) => (float[N,T,4] y) {
        [look] e = Gather (table, ids)
        [first] a = MatMul (e, w1)
        [relu] r = Relu (a)
        [second] b = MatMul (r, w2)
        [cast] m = Cast <to=1> (attention_mask)
        [axes] m3 = Unsqueeze (m, last)
        [masked] y = Mul (b, m3)
    }"""
    table = normal(WORDS, 8)
    table[PAD] = LOUD
    weights = {"w1": np.abs(normal(8, 8)), "w2": normal(8, 4)}
    return build(text, table=table, last=np.array([-1]), **weights)


def sentences(count: int = 24) -> list[np.ndarray]:
    rng = np.random.default_rng(1)
    return [rng.integers(1, WORDS, rng.integers(3, 9)) for _ in range(count)]


def padded(lengths: list[np.ndarray], mask: bool = True) -> dict[str, np.ndarray]:
    ids = np.full((len(lengths), 9), PAD, np.int64)
    for row, sentence in zip(ids, lengths, strict=True):
        row[: len(sentence)] = sentence
    return {"ids": ids, "attention_mask": (ids != PAD if mask else np.ones_like(ids)).astype(np.int64)}


def alone(lengths: list[np.ndarray]) -> list[dict[str, np.ndarray]]:
    return [{"ids": each[None], "attention_mask": np.ones((1, len(each)), np.int64)} for each in lengths]


def statistics_of(data: Any) -> dict[str, TensorStatistics]:
    job = start(encoder(), data, Recipe()).jobs[0]
    return dict(calibrate(job.model, job.points, job.data, silent).tensors)


def test_a_second_pass_finds_what_one_finds_with_room_on_disk() -> None:
    job = start(conv_net(), feed_for(conv_net(), 20), Recipe()).jobs[0]
    once, twice = (calibrate(job.model, job.points, job.data, silent, most).tensors for most in (2**30, 0))
    assert once.keys() == twice.keys()
    for name, found in once.items():
        assert (found.low, found.high, found.mean_low, found.mean_high) == (
            twice[name].low, twice[name].high, twice[name].mean_low, twice[name].mean_high,
        )  # fmt: skip
        np.testing.assert_array_equal(found.counts, twice[name].counts)
        np.testing.assert_allclose(found.relative, twice[name].relative, 1e-12)  # batches are added up in another order


def test_padding_is_left_out_of_ranges() -> None:
    """Padded or each of its own length: the same sentences have the same ranges."""
    lengths = sentences()
    together, apart, unmasked = (
        statistics_of(data) for data in (padded(lengths), alone(lengths), padded(lengths, mask=False))
    )
    assert set(together) == {"e", "r"}
    for name, wanted in apart.items():
        found = together[name]
        assert (found.low, found.high) == pytest.approx((wanted.low, wanted.high))
        assert (found.mean_low, found.mean_high) == pytest.approx((wanted.mean_low, wanted.mean_high))
        assert unmasked[name].high > 5 * found.high


@pytest.mark.parametrize("shape", [(3, 4), (12, 5), (3, 4, 5), (3, 2, 4, 5), (3, 4, 2, 5)])
def test_what_counts_is_repeated_in_place_of_padding(shape: tuple[int, ...]) -> None:
    counts = np.array([[1, 1, 1, 1], [0, 1, 1, 0], [1, 0, 0, 0]], bool)
    values = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    found = repeated(values, counts)
    assert found.shape == values.shape
    if shape == (3, 4):  # no positions: three samples of four channels
        np.testing.assert_array_equal(found, values)
        return
    rows = values.reshape(3, 4, -1) if len(shape) < 4 or shape[1] == 4 else values.swapaxes(1, 2).reshape(3, 4, -1)
    kept = found.reshape(3, 4, -1) if len(shape) < 4 or shape[1] == 4 else found.swapaxes(1, 2).reshape(3, 4, -1)
    np.testing.assert_array_equal(kept[0], rows[0])
    np.testing.assert_array_equal(kept[1], rows[1][[1, 2, 1, 2]])
    np.testing.assert_array_equal(kept[2], rows[2][[0, 0, 0, 0]])


def test_nothing_changes_without_a_mask() -> None:
    values = normal(3, 4, 5)
    assert repeated(values, None) is values
