"""Weights of large models stay in files, and nothing that is made of them is any different."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from said import refused

from models import build, normal, run
from onnxcalib import Recipe, quantize
from onnxcalib.cache.fingerprint import model_digest
from onnxcalib.cache.store import Store
from onnxcalib.errors import ModelError
from onnxcalib.executors.wire import packed, unpacked
from onnxcalib.model.external import embedded, has_external, is_external, model_bytes, values_of
from onnxcalib.model.io import PROTOBUF_LIMIT, load, write_model
from onnxcalib.model.read import read_prepared
from onnxcalib.runtime.session import Session
from onnxcalib.targets import find_target

WIDE = 520  # a matrix of so many rows and columns takes more than a megabyte


def wide_model() -> onnx.ModelProto:
    """A weight as layers read it, one that is turned first, a table, and a small bias."""
    return build(
        "net (int64[N,4] ids) => (float[N,4,520] y) {"
        "[look] x = Gather (table, ids) [one] h = MatMul (x, w) [biased] a = Add (h, b) [cut] r = Relu (a)"
        "[turn] t = Transpose <perm = [1, 0]> (v) [two] y = MatMul (r, t) }",
        table=normal(600, WIDE), w=normal(WIDE, WIDE, seed=1) / 20, v=normal(WIDE, WIDE, seed=2) / 20, b=normal(WIDE),
    )  # fmt: skip


def samples() -> dict[str, np.ndarray[tuple[int, ...], np.dtype[np.int64]]]:
    return {"ids": np.random.default_rng(0).integers(0, 600, (24, 4))}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The model with its weights in a file beside it."""
    onnx.save(wide_model(), tmp_path / "wide.onnx", save_as_external_data=True, location="wide.bin", size_threshold=100)
    return tmp_path / "wide.onnx"


def test_weights_stay_in_their_file(path: Path) -> None:
    kept, whole = load(path, large=0), load(path)
    assert kept.ByteSize() < 10_000 < whole.ByteSize()
    assert not has_external(whole)
    assert abs(model_bytes(kept) - model_bytes(whole)) < 1000
    for tensor, same in zip(kept.graph.initializer, whole.graph.initializer, strict=True):
        assert is_external(tensor) is (tensor.name != "b")
        np.testing.assert_array_equal(values_of(tensor), values_of(same))


def test_weights_within_a_file_go_to_one_of_their_own(tmp_path: Path) -> None:
    onnx.save(wide_model(), tmp_path / "whole.onnx")
    kept = load(tmp_path / "whole.onnx", large=0)
    assert kept.ByteSize() < 10_000
    assert embedded(kept).SerializeToString(deterministic=True) == wide_model().SerializeToString(deterministic=True)


def test_prepared_graphs_compute_the_same(path: Path) -> None:
    kept, whole = (read_prepared(model, find_target("ort")).proto for model in (load(path, large=0), load(path)))
    assert has_external(kept)  # also the one that was turned
    assert kept.ByteSize() < 10_000
    np.testing.assert_array_equal(Session(kept).run(samples())["y"], Session(whole).run(samples())["y"])


RECIPES = {
    "plain": Recipe(),
    "mixed": Recipe("light", "w4a8,w8a8", compression=0.25),
    "weights alone": Recipe(bits="w4", block_size=32),
    "narrow": Recipe(bits="w4a8"),
}


@pytest.mark.parametrize("name", RECIPES)
def test_files_are_byte_for_byte_those_of_weights_in_memory(name: str, path: Path, tmp_path: Path) -> None:
    made = []
    for large in (0, PROTOBUF_LIMIT):
        written = tmp_path / f"{large}.onnx"
        result = quantize(load(path, large), samples(), RECIPES[name], output=written)
        assert not has_external(result.model)  # the caller may serialize it
        made.append(written.read_bytes())
    assert made[0] == made[1]


def test_what_is_written_above_the_limit_has_files_of_its_own(path: Path, tmp_path: Path) -> None:
    kept = load(path, large=0)
    (tmp_path / "copy").mkdir()
    write_model(kept, tmp_path / "copy" / "wide.onnx", limit=1000)
    path.unlink()
    path.with_name("wide.bin").unlink()
    np.testing.assert_array_equal(
        run(tmp_path / "copy" / "wide.onnx", samples())["y"], run(wide_model(), samples())["y"]
    )


def test_models_are_known_by_their_values_and_sent_with_them(path: Path) -> None:
    kept = load(path, large=0)
    whole = embedded(kept)
    assert model_digest(kept) == model_digest(whole)
    assert unpacked(packed(kept)).SerializeToString(deterministic=True) == whole.SerializeToString(deterministic=True)
    data = path.with_name("wide.bin")
    data.write_bytes(data.read_bytes()[::-1])
    assert model_digest(load(path, large=0)) != model_digest(whole)


DAMAGES = {
    "cut": ("offset", None),
    "elsewhere": ("location", "../wide.bin"),
    "absolute": ("location", "/etc/hostname"),
    "too short": ("length", "100"),
    "beyond": ("offset", str(2**40)),
    "no number": ("offset", "first"),
    "missing": ("location", "none.bin"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_file_that_does_not_hold_the_weights_is_refused(damage: str, path: Path) -> None:
    proto = onnx.load(path, load_external_data=False)
    weight = next(tensor for tensor in proto.graph.initializer if tensor.name == "v")
    key, value = DAMAGES[damage]
    entry = next(entry for entry in weight.external_data if entry.key == key)
    entry.value = entry.value if value is None else value
    path.write_bytes(proto.SerializeToString())
    if damage == "cut":
        data = path.with_name("wide.bin")
        data.write_bytes(data.read_bytes()[:-4096])
    with refused(ModelError, path):
        load(path, large=0)


def test_branches_have_their_weights_in_memory(tmp_path: Path) -> None:
    model = build(
        "net (float[2,520] x, bool c) => (float[2,520] y) {"
        "y = If (c) <then_branch = g1 () => (float[2,520] p) { p = MatMul (x, w) },"
        " else_branch = g2 () => (float[2,520] q) { q = Relu (x) }> }",
        w=normal(WIDE, WIDE),
    )  # fmt: skip
    onnx.save(model, tmp_path / "if.onnx", save_as_external_data=True, location="w.bin", size_threshold=100)
    assert not has_external(load(tmp_path / "if.onnx", large=0))


def test_large_values_of_stages_are_mapped(tmp_path: Path) -> None:
    values = {"large": normal(300, 300), "small": normal(3)}
    Store(tmp_path).put("stage", "key", values)
    read, mapped = Store(tmp_path).get("stage", "key"), Store(tmp_path, large=0).get("stage", "key")
    assert read is not None
    assert mapped is not None
    assert isinstance(mapped["large"].base, np.memmap)
    assert read["large"].base is None
    for name, value in values.items():
        np.testing.assert_array_equal(mapped[name], value)
        np.testing.assert_array_equal(read[name], value)
