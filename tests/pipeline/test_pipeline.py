"""The Python API: every kind of calibration data, figures against NumPy's own, and memory that does not grow."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from by_hand import divergence, relative_error
from said import refused

from models import Arrays, build, conv_net, feed_for, normal, run, transformer_block
from onnxcalib import DataError, ModelError, OutputError, Precision, RangeMethod, Recipe, Result, evaluate, quantize

MINMAX = Recipe(ranges=RangeMethod.MINMAX)


def feeds_of(data: Arrays, size: int = 4) -> list[Arrays]:
    count = len(data["x"])
    return [{"x": data["x"][start : start + size]} for start in range(0, count, size)]


class Reader:
    """An object with get_next, as onnxruntime's own quantizer takes."""

    def __init__(self, feeds: list[Arrays]) -> None:
        self.feeds = iter(feeds)

    def get_next(self) -> Arrays | None:
        return next(self.feeds, None)


SOURCES: dict[str, Callable[[list[Arrays]], Any]] = {
    "list": lambda feeds: feeds,
    "tuple": tuple,
    "generator": lambda feeds: (feed for feed in feeds),
    "reader": Reader,
}


@pytest.mark.parametrize("source", SOURCES)
def test_feeds_give_the_plan_of_the_same_arrays(source: str) -> None:
    model = conv_net()
    data = feed_for(model, 24)
    whole, pieces = quantize(model, data, MINMAX).plan, quantize(model, SOURCES[source](feeds_of(data)), MINMAX).plan
    assert set(pieces.shared) == set(whole.shared)
    assert set(pieces.inputs) == set(whole.inputs)
    for tensor in (*whole.shared, *whole.inputs):
        np.testing.assert_allclose(pieces.layer_input(tensor).scale, whole.layer_input(tensor).scale, rtol=1e-5)
    for name, params in whole.layers.items():
        np.testing.assert_array_equal(pieces.layers[name].quantized, params.quantized)


@pytest.mark.parametrize(
    "recipe", [MINMAX, Recipe(bits=(Precision(4, 6),)), Recipe(target="paper")], ids=["minmax", "auto", "paper"]
)
def test_the_given_model_and_data_are_not_changed(recipe: Recipe) -> None:
    model, data = conv_net(), feed_for(conv_net(), 24)
    before, values = model.SerializeToString(deterministic=True), data["x"].copy()
    quantize(model, data, recipe)
    assert model.SerializeToString(deterministic=True) == before
    np.testing.assert_array_equal(data["x"], values)


def test_equal_calls_give_equal_bytes() -> None:
    model, recipe = conv_net(), Recipe(bits=(Precision(3, 6),))
    files = {quantize(model, feed_for(model, 24), recipe).model.SerializeToString(deterministic=True) for _ in range(2)}
    assert len(files) == 1


def test_save_writes_the_model(tmp_path: Path) -> None:
    model = conv_net()
    given = tmp_path / "given.onnx"
    result = quantize(model, feed_for(model), MINMAX, output=given)
    saved = tmp_path / "saved.onnx"
    result.save(saved)
    assert saved.read_bytes() == given.read_bytes()
    assert onnx.load(saved) == result.model
    assert {path.name for path in tmp_path.iterdir()} == {"given.onnx", "saved.onnx"}


def test_a_path_is_as_good_as_a_proto(tmp_path: Path) -> None:
    path, model = tmp_path / "model.onnx", conv_net()
    onnx.save(model, path)
    np.savez(tmp_path / "data.npz", **feed_for(model))
    assert quantize(path, tmp_path / "data.npz", MINMAX).model == quantize(model, feed_for(model), MINMAX).model


def test_edge_bits_go_to_the_first_and_the_last_layer() -> None:
    model = conv_net()
    plan = quantize(
        model, feed_for(model), Recipe(bits=(Precision(3, 4),), edge_bits=8, ranges=RangeMethod.MINMAX)
    ).plan
    assert {name: str(precision) for name, precision in plan.precisions.items()} == {
        "stem": "w8a8", "depth": "w3a4", "project": "w3a4", "head": "w3a4", "fc": "w8a8",
    }  # fmt: skip


def test_layers_that_read_one_tensor_share_its_bits() -> None:
    model = transformer_block()
    plan = quantize(
        model, feed_for(model), Recipe(bits=(Precision(4, 4),), edge_bits=8, ranges=RangeMethod.MINMAX)
    ).plan
    assert [str(plan.precisions[name]) for name in ("query", "key", "value")] == ["w8a8", "w4a8", "w4a8"]
    assert plan.layer_input("x").bits == 8
    assert plan.layer_input("h").bits == 4


def test_evaluation_agrees_with_numpy(tmp_path: Path) -> None:
    model = conv_net()
    result = quantize(model, feed_for(model, 32), Recipe(bits=(Precision(3, 4),), ranges=RangeMethod.MINMAX))
    paths = [tmp_path / "float.onnx", tmp_path / "small.onnx"]
    onnx.save(model, paths[0])
    result.save(paths[1])
    data = feed_for(model, 130, seed=5)
    labels = np.random.default_rng(1).integers(0, 5, 130)
    rows = evaluate(list(paths), data | {"labels": labels}, paths[0])
    reference, guess = run(model, data)["y"], run(result.model, data)["y"]
    same, right = guess.argmax(1) == reference.argmax(1), guess.argmax(1) == labels
    row = rows[1]
    assert row.samples == 130
    assert row.model == str(paths[1])
    assert row.top1 == pytest.approx(100 * right.mean())
    assert row.agreement == pytest.approx(100 * same.mean())
    assert row.sqnr_db == pytest.approx(-10 * np.log10(relative_error(reference, guess)), rel=1e-4)
    assert row.distillation_loss == pytest.approx(divergence(reference, guess), rel=1e-4)
    assert row.bytes == paths[1].stat().st_size
    assert rows[0].top1 == pytest.approx(100 * (reference.argmax(1) == labels).mean())
    assert (rows[0].agreement, rows[0].sqnr_db, rows[0].distillation_loss) == (100, np.inf, 0)


def test_figures_that_need_labels_or_a_reference_are_left_out(tmp_path: Path) -> None:
    path, model = tmp_path / "model.onnx", conv_net()
    onnx.save(model, path)
    (row,) = evaluate([path], feed_for(model))
    assert (row.top1, row.agreement, row.sqnr_db, row.distillation_loss, row.latency_ratio) == (None,) * 5
    assert row.latency_ms > 0


def test_values_are_compared_by_relative_error(tmp_path: Path) -> None:
    model = transformer_block()
    result = quantize(model, feed_for(model), MINMAX)
    onnx.save(model, tmp_path / "float.onnx")
    result.save(tmp_path / "small.onnx")
    data = feed_for(model, 20, seed=4)
    (row,) = evaluate([tmp_path / "small.onnx"], data, tmp_path / "float.onnx")
    assert row.distillation_loss == pytest.approx(
        relative_error(run(model, data)["y"], run(result.model, data)["y"]), rel=1e-3
    )
    assert row.agreement is None


def test_models_with_other_inputs_are_not_compared(tmp_path: Path) -> None:
    onnx.save(conv_net(), tmp_path / "one.onnx")
    other = build("net (float[N,3,8,8] image) => (float[N,3,8,8] y) { y = Relu (image) }")
    onnx.save(other, tmp_path / "two.onnx")
    with refused(DataError, tmp_path / "one.onnx", tmp_path / "two.onnx", "image", "x"):
        evaluate([tmp_path / "one.onnx", tmp_path / "two.onnx"], feed_for(conv_net()))


def test_a_model_without_layers_says_what_it_has() -> None:
    text = "net (float[N,4] x) => (float[N,N] y) { t = Transpose (x) y = MatMul (x, t) }"
    with refused(ModelError, "no layer", "MatMul", "both operands are computed"):
        quantize(build(text), {"x": normal(4, 4)})


def test_activations_that_overflow_are_named() -> None:
    text = "net (float[N,4] x) => (float[N,4] y) { [one] h = Gemm (x, w) [grow] e = Exp (h) [two] y = Gemm (e, w) }"
    with refused(ModelError, "'e'", "NaN"):
        quantize(build(text, w=np.full((4, 4), 100, np.float32)), {"x": np.ones((2, 4), np.float32)})


def test_the_output_place_is_checked_before_any_work(tmp_path: Path) -> None:
    read = []

    def feeds() -> Iterator[Arrays]:
        read.append(True)
        yield feed_for(conv_net(), 1)

    with refused(OutputError, tmp_path / "none"):
        quantize(conv_net(), feeds(), output=tmp_path / "none" / "small.onnx")
    assert read == []


def test_progress_counts_up_to_its_total() -> None:
    seen: list[tuple[str, int, int]] = []
    model = conv_net()
    quantize(model, feed_for(model, 100), MINMAX, progress=lambda *step: seen.append(step))
    calibration = [(done, total) for stage, done, total in seen if stage == "calibrate"]
    assert calibration[-1][0] == calibration[-1][1]
    assert [done for done, _ in calibration] == sorted(done for done, _ in calibration)


def peak_of(work: Callable[[], Result]) -> int:
    gc.collect()
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def generated(samples: int) -> Iterator[Arrays]:
    rng = np.random.default_rng(0)
    for _ in range(0, samples, 8):
        yield {"x": rng.standard_normal((8, 3, 32, 32), np.float32)}


SAMPLES = (192, 2752)  # with the fewer of them every thread has a batch in hand already


@pytest.mark.parametrize("kind", ["npz", "generator"])
def test_memory_does_not_grow_with_the_samples(kind: str, tmp_path: Path) -> None:
    text = """net (float[N,3,32,32] x) => (float[N,5] y) {
        [one] c = Conv <pads=[1,1,1,1]> (x, w1, b1)
        r = Relu (c)
        [two] d = Conv <strides=[2,2]> (r, w2, b2)
        p = GlobalAveragePool (d)
        f = Flatten (p)
        [three] y = Gemm (f, w3)
    }"""
    model = build(
        text, w1=normal(8, 3, 3, 3), b1=normal(8), w2=normal(8, 8, 3, 3, scale=0.2), b2=normal(8), w3=normal(8, 5)
    )

    def work(samples: int) -> Result:
        if kind == "generator":
            return quantize(model, generated(samples), MINMAX)
        return quantize(model, tmp_path / f"{samples}.npz", MINMAX)

    for samples in SAMPLES:
        np.savez(tmp_path / f"{samples}.npz", x=np.concatenate([feed["x"] for feed in generated(samples)]))
    work(SAMPLES[0])  # caches and imports
    # The lesser of two: when garbage is collected, and what other threads do, is worth megabytes; so are the samples.
    few, many = (min(peak_of(lambda count=count: work(count)) for _ in range(2)) for count in SAMPLES)
    added = (SAMPLES[1] - SAMPLES[0]) * 3 * 32 * 32 * 4
    assert many - few <= added / 2
