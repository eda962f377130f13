"""Gradients of a batch in pieces."""

from __future__ import annotations

import numpy as np
import onnx.parser
import pytest

from onnxcalib.autodiff.gradients import Gradients
from onnxcalib.autodiff.micro_batches import MicroBatchGradients
from onnxcalib.recipe import Engine

LOSS = """<ir_version: 8, opset_import: ["" : 17]>
loss (float[N,5] x, float[5,3] w) => (float l) {
    y = MatMul (x, w)
    z = Tanh (y)
    l = ReduceSum <keepdims = 0> (z)
}"""


def parts(pieces: int) -> tuple[onnx.ModelProto, dict[str, np.ndarray], list[dict[str, np.ndarray]]]:
    rng = np.random.default_rng(3)
    start = {"w": rng.standard_normal((5, 3)).astype(np.float32)}
    feeds = [{"x": rng.standard_normal((2, 5)).astype(np.float32)} for _ in range(pieces)]
    return onnx.parser.parse_model(LOSS), start, feeds


@pytest.mark.parametrize("pieces", [1, 3, 7, 16])
@pytest.mark.parametrize("engine", [Engine.AUTO, Engine.STANDARD])
def test_the_sum_over_pieces_is_the_gradient_of_the_whole(pieces: int, engine: Engine) -> None:
    model, start, feeds = parts(pieces)
    whole = Gradients(model, start, engine)
    whole.run({"x": np.concatenate([feed["x"] for feed in feeds])})
    found = MicroBatchGradients(model, start, engine, workers=2).run(feeds, dict)
    np.testing.assert_allclose(found["w"], whole.gradients["w"], rtol=1e-5, atol=1e-5)


def test_sums_do_not_depend_on_the_number_of_workers() -> None:
    model, start, feeds = parts(13)
    found = [
        MicroBatchGradients(model, start, Engine.AUTO, workers).run(feeds, dict)["w"].tobytes()
        for workers in (1, 2, 3, 9)
    ]
    assert len(set(found)) == 1


def test_all_workers_read_the_parameters_in_place() -> None:
    model, start, feeds = parts(4)
    lanes = MicroBatchGradients(model, start, Engine.AUTO, workers=4)
    before = lanes.run(feeds, dict)["w"]
    lanes.parameters["w"] += np.float32(0.5)
    moved = MicroBatchGradients(model, {"w": start["w"] + np.float32(0.5)}, Engine.AUTO, workers=1).run(feeds, dict)[
        "w"
    ]
    np.testing.assert_array_equal(lanes.run(feeds, dict)["w"], moved)
    assert not np.array_equal(before, moved)
