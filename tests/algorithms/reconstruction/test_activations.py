"""Captured tensors: rows in files, read in any order, and memory that does not hold them."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from models import Arrays, build, conv_net, feed_for, normal, run, transformer_block
from onnxcalib.algorithms.reconstruction import activations as stage
from onnxcalib.algorithms.reconstruction.activations import DiskActivations, capture
from onnxcalib.data import Dataset, open_data
from onnxcalib.model.prepare import Model
from onnxcalib.model.read import read_prepared
from onnxcalib.model.shapes import input_specs
from onnxcalib.model.subgraph import Cutter, with_outputs
from onnxcalib.numerics.quant_params import QuantScheme, fake_quantize, make_qparams
from onnxcalib.targets import find_target


def data_for(model: Model, arrays: Arrays) -> Dataset:
    return open_data(arrays, input_specs(model.proto))


def test_any_samples_in_any_order(tmp_path: Path) -> None:
    values = normal(11, 3, 2)
    held = DiskActivations(tmp_path / "values")
    for part in (values[:4], values[4:5], values[5:]):
        assert held.append(part, len(part))
        assert np.array_equal(held.read([0]), values[:1])  # reading between writing does no harm
    assert held.samples == 11
    assert held.shape == (1, 3, 2)
    for chosen in ([0], [10], list(range(11)), [7, 2, 9], [3, 3, 0], list(range(10, -1, -1))):
        read = held.read(chosen)
        assert read.dtype == np.float32
        assert np.array_equal(read, values[chosen])
    assert held.read([]).shape == (0, 3, 2)
    assert np.array_equal(held.read(np.array([5, 1])), values[[5, 1]])
    assert held.energy == pytest.approx(np.mean(values.astype(np.float64) ** 2), rel=1e-6)


def test_what_is_read_is_the_readers_own(tmp_path: Path) -> None:
    values = normal(4, 2)
    held = DiskActivations(tmp_path / "values")
    held.append(values, 4)
    values[:] = 0
    held.read([1])[:] = 7
    assert np.array_equal(held.read([1]), normal(4, 2)[1:2])


def test_a_sample_of_several_rows(tmp_path: Path) -> None:
    values = normal(12, 5)
    held = DiskActivations(tmp_path / "values")
    assert held.append(values[:6], 2)
    assert held.append(values[6:], 2)
    assert held.shape == (3, 5)
    assert held.samples == 4
    assert np.array_equal(held.read([2, 0]), values[[6, 7, 8, 0, 1, 2]])
    assert held.energy == pytest.approx(np.mean(values.astype(np.float64) ** 2), rel=1e-6)


def test_rows_that_do_not_belong_to_samples_are_refused(tmp_path: Path) -> None:
    held = DiskActivations(tmp_path / "values")
    assert not held.append(np.float32(3), 1)
    assert not held.append(normal(5, 2), 2)
    assert held.append(normal(4, 2), 2)
    assert not held.append(normal(3, 2), 3)  # one row a sample, after two
    assert not held.append(normal(4, 3), 2)
    assert held.samples == 2
    assert np.array_equal(held.read([0, 1]), normal(4, 2))


def test_other_layouts_and_types_become_rows_of_floats(tmp_path: Path) -> None:
    values = normal(3, 4, 5)
    held = DiskActivations(tmp_path / "values")
    assert held.append(np.asfortranarray(values)[:, ::-1], 3)
    assert held.append(values.astype(np.float64), 3)
    assert np.array_equal(held.read(range(6)), np.concatenate([values[:, ::-1], values]))


def test_the_file_vanishes(tmp_path: Path) -> None:
    held = DiskActivations(tmp_path / "values")
    held.append(normal(3, 2), 3)
    assert (tmp_path / "values").exists()
    held.close()
    held.close()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("builder", [conv_net, transformer_block])
def test_tensors_are_those_of_the_model(builder, tmp_path: Path) -> None:
    model = read_prepared(builder(), find_target("ort"))
    feed = feed_for(model.proto, 37)
    names = [name for node in model.proto.graph.node for name in node.output]
    reference = run(with_outputs(model.proto, names), feed)
    found = capture(model.proto, [*names, names[0]], data_for(model, feed), tmp_path)
    assert found.keys() == set(names)
    for name, held in found.items():
        assert held.samples == 37
        np.testing.assert_allclose(held.read(range(37)), reference[name], rtol=1e-4, atol=1e-4)
        assert held.energy == pytest.approx(np.mean(reference[name].astype(np.float64) ** 2), rel=1e-3)


def test_model_inputs_can_be_captured(tmp_path: Path) -> None:
    model = read_prepared(conv_net(), find_target("ort"))
    feed = feed_for(model.proto, 21)
    (tmp_path / "both").mkdir()
    for folder, names in ((tmp_path, ["x"]), (tmp_path / "both", ["y", "x"])):
        found = capture(model.proto, names, data_for(model, feed), folder)
        assert set(found) == set(names)
        assert np.array_equal(found["x"].read(range(21)), feed["x"])


def test_only_what_makes_the_tensors_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = read_prepared(conv_net(), find_target("ort"))
    opened = []

    class Watched(stage.Session):
        def __init__(self, proto, **options) -> None:
            opened.append([node.name for node in proto.graph.node])
            super().__init__(proto, **options)

    monkeypatch.setattr(stage, "Session", Watched)
    capture(model.proto, ["r1"], data_for(model, feed_for(model.proto, 3)), tmp_path)
    assert opened == [["stem", "clip1"]]


@pytest.mark.parametrize("samples", [5, 70])
def test_known_tensors_are_read_from_their_files(samples: int, tmp_path: Path) -> None:
    model = read_prepared(conv_net(), find_target("ort"))
    data = data_for(model, feed_for(model.proto, samples))
    values = np.abs(normal(samples, 8, 8, 8, seed=9))
    known = DiskActivations(tmp_path / "known")
    known.append(values, samples)
    rest, others = Cutter(model.proto).after("r1")
    assert others == ()
    found = capture(model.proto, ["y", "x"], data, tmp_path, {}, {"r1": known})
    assert found.keys() == {"x", "y"}
    np.testing.assert_allclose(found["y"].read(range(samples)), run(rest, {"r1": values})["y"], rtol=1e-4, atol=1e-4)
    # A tensor that is asked for is made, even if an older form of it is known.
    again = capture(model.proto, ["r1"], data, tmp_path, {}, {"r1": known})
    assert not np.array_equal(again["r1"].read([0]), values[:1])


def test_grids_move_the_values(tmp_path: Path) -> None:
    model = read_prepared(conv_net(), find_target("ort"))
    feed = feed_for(model.proto, 19)
    qparams = make_qparams(-1, 2, QuantScheme(4, signed=False, symmetric=False))
    found = capture(model.proto, ["x", "r1"], data_for(model, feed), tmp_path, {"x": qparams})
    assert np.array_equal(found["x"].read(range(19)), fake_quantize(feed["x"], qparams))
    assert len(np.unique(found["r1"].read(range(19)))) > 16
    assert found["x"].energy == pytest.approx(
        np.mean(fake_quantize(feed["x"], qparams).astype(np.float64) ** 2), rel=1e-6
    )


def test_a_copy_on_a_grid(tmp_path: Path) -> None:
    values = normal(2 * 37, 3)
    held = DiskActivations(tmp_path / "values")
    held.append(values, 37)
    qparams = make_qparams(-1, 2, QuantScheme(4, signed=False, symmetric=False))
    moved = held.fake_quantized(qparams, tmp_path / "moved")
    assert (moved.samples, moved.shape) == (37, (2, 3))
    assert np.array_equal(moved.read(range(37)), fake_quantize(values, qparams))
    assert np.array_equal(held.read(range(37)), values)


def folded() -> Model:
    """Rows that are samples (x), several a sample (rows), across samples (turned), and none (total)."""
    text = """
    net (float[N,4,6] x) => (float[M,3] y, float[6,K] turned, float total) {
        [fold] rows = Reshape (x, shape)
        [layer] y = MatMul (rows, w)
        [turn] turned = Transpose <perm=[1,0]> (rows)
        [sum] total = ReduceSum <keepdims=0> (x)
    }"""
    return read_prepared(build(text, w=normal(6, 3), shape=np.array([-1, 6])), find_target("ort"))


def test_tensors_whose_rows_are_no_samples_are_left_out(tmp_path: Path) -> None:
    model, samples = folded(), 21
    feed = feed_for(model.proto, samples)
    found = capture(model.proto, ["rows", "turned", "total", "y", "x"], data_for(model, feed), tmp_path)
    assert found.keys() == {"x", "rows", "y"}
    assert found["rows"].shape == (4, 6)
    assert np.array_equal(found["rows"].read([3, 1]), feed["x"][[3, 1]].reshape(8, 6))
    np.testing.assert_allclose(
        found["y"].read([20]), run(model.proto, {"x": feed["x"][20:]})["y"], rtol=1e-4, atol=1e-5
    )
    assert len(list(tmp_path.iterdir())) == 3


def test_feeds_of_different_lengths_are_left_out(tmp_path: Path) -> None:
    text = "net (float[N,S,6] x) => (float[N,S,3] y) { [layer] y = MatMul (x, w) }"
    model = read_prepared(build(text, w=normal(6, 3)), find_target("ort"))
    feeds = [{"x": normal(2, length, 6)} for length in (4, 5, 4)]
    assert capture(model.proto, ["x", "y"], open_data(feeds, input_specs(model.proto)), tmp_path) == {}
    assert not list(tmp_path.iterdir())


def test_memory_does_not_hold_the_tensors(tmp_path: Path) -> None:
    text = """
    net (float[N,4,16,16] x) => (float[N,32,16,16] y) {
        [layer] c = Conv <pads=[1,1,1,1]> (x, w)
        [relu] y = Relu (c)
    }"""
    model = read_prepared(build(text, w=normal(32, 4, 3, 3)), find_target("ort"))
    data = data_for(model, feed_for(model.proto, 320))
    tracemalloc.start()
    found = capture(model.proto, ["c", "y"], data, tmp_path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.reset_peak()
    held = tracemalloc.get_traced_memory()[0]
    found["y"].read([7, 300, 5])
    grown = tracemalloc.get_traced_memory()[1] - held
    tracemalloc.stop()
    total = 2 * 320 * 32 * 16 * 16 * 4
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) == total
    assert peak < total / 5
    assert grown < 3 * 3 * 32 * 16 * 16 * 4


def test_many_tensors_need_few_open_files(tmp_path: Path) -> None:
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    held = []
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(list(Path("/proc/self/fd").iterdir())) + 20, before[1]))
        for number in range(60):
            held.append(DiskActivations(tmp_path / str(number)))
            held[-1].append(normal(3, 2, seed=number), 3)
        assert np.array_equal(held[41].read([1, 2]), normal(3, 2, seed=41)[1:])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
