"""A run says once when no samples are left to judge tuning and training by."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from command_line import said_by

from models import build, conv_net, feed_for, normal
from onnxcalib import Pipeline, RangeMethod, Recipe, quantize
from onnxcalib.data import Feed, InputSpec, open_data, train_validation_split
from onnxcalib.data.split import FEWEST, why_not_parted
from onnxcalib.recipe import parse_bits


def recipe(pipeline: Pipeline) -> Recipe:
    more = {"steps": 2} if pipeline is Pipeline.ADVANCED else {}
    return Recipe(pipeline, parse_bits("w4a8"), ranges=RangeMethod.MINMAX, **more)


def gemm(batch: str = "N") -> onnx.ModelProto:
    text = f"net (float[{batch},6] x) => (float[{batch},3] y) {{ [one] y = Gemm (x, w, b) }}"
    return build(text, w=normal(6, 3), b=normal(3))


def warned(model: onnx.ModelProto, data: Any, pipeline: Pipeline) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        quantize(model, data, recipe(pipeline))
    return [str(each.message) for each in caught if "judged" in str(each.message)]


@pytest.mark.parametrize("pipeline", [Pipeline.LIGHT, Pipeline.ADVANCED])
def test_few_samples_are_told_once(pipeline: Pipeline) -> None:
    (message,) = warned(gemm(), {"x": normal(5, 6)}, pipeline)
    assert "5" in message
    assert str(FEWEST) in message
    assert warned(gemm(), {"x": normal(FEWEST, 6)}, pipeline) == []


def test_one_fixed_batch_is_told() -> None:
    (message,) = warned(gemm("32"), {"x": normal(40, 6)}, Pipeline.LIGHT)
    assert "32 samples" in message
    assert "one batch" in message
    assert warned(gemm("16"), {"x": normal(40, 6)}, Pipeline.LIGHT) == []


def test_nothing_is_told_where_nothing_is_tuned() -> None:
    assert warned(gemm(), {"x": normal(5, 6)}, Pipeline.PLAIN) == []


def test_a_branch_that_few_samples_take_is_named() -> None:
    text = """
    net (float[N,6] x, int64 mode) => (float[N,4] y) {
        c = Equal (mode, one)
        [choice] y = If (c) <
            then_branch = then_body () => (float[N,4] t) { t = MatMul (x, v) },
            else_branch = else_body () => (float[N,4] e) { e = MatMul (x, v) }
        >
    }"""
    data = {"x": normal(40, 6), "mode": np.arange(40) % 10}
    (message,) = warned(build(text, 17, one=np.int64(1), v=normal(6, 4)), data, Pipeline.LIGHT)
    for word in ("choice", "then_branch", "4"):
        assert word in message


@pytest.mark.parametrize(("pipeline", "samples", "told"), [("light", 5, 1), ("plain", 5, 0), ("light", 8, 0)])
def test_the_command_says_it(
    pipeline: str, samples: int, told: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    onnx.save(conv_net(), tmp_path / "model.onnx")
    np.savez(tmp_path / "data.npz", **feed_for(conv_net(), samples))
    words = ("quantize", tmp_path / "model.onnx", "-c", tmp_path / "data.npz", "-o", tmp_path / "out.onnx")
    code, _, err = said_by(capsys, *words, "--pipeline", pipeline, "--ranges", "minmax")
    assert code == 0
    assert err.count("Warning: only 5") == told
    assert err.count("judged") == told


class Own:
    """Somebody's own dataset."""

    labels, source = None, "own"

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def batches(self, size: int) -> Iterator[Feed]:
        return ({"x": np.zeros((min(size, self.samples - at), 1), "f")} for at in range(0, self.samples, size))


GIVEN = [
    {"x": np.zeros((9, 1), "f")}, {"x": np.zeros((7, 1), "f")}, Own(9), Own(7),
    [{"x": np.zeros((20, 1), "f")}], [{"x": np.zeros((20, 1), "f")}, {"x": np.zeros((2, 1), "f")}] * 2,
]  # fmt: skip


@pytest.mark.parametrize("given", GIVEN)
def test_it_is_told_where_and_only_where_nothing_is_held_out(given: Any) -> None:
    data = open_data(given, [InputSpec("x", np.dtype("f"), (None, 1))])
    kept, held_out = train_validation_split(data)
    assert (why_not_parted(data) is not None) == (kept is held_out)
    assert kept is held_out or len(kept) + len(held_out) == len(data)
