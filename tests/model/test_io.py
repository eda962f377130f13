"""Reading with clear refusals, and writing so that a half-written file never stands there."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import external_data_helper
from said import refused

from models import build, conv_net, feed_for, initializer, normal, run
from onnxcalib import quantize
from onnxcalib.errors import ModelError, OutputError
from onnxcalib.files import check_writable, replacing
from onnxcalib.model import io
from onnxcalib.model.io import NEWEST_OPSET, file_bytes, load, read_model, write_model
from onnxcalib.runtime import handing
from onnxcalib.runtime.session import Session


def large_model() -> onnx.ModelProto:
    """Weights of more than a kilobyte, and a small bias that stays in the file."""
    return build(
        "net (float[N,32] x) => (float[N,32] y) { [one] h = Gemm (x, w, b) [two] y = Gemm (h, v, b) }",
        w=normal(32, 32), v=normal(32, 32, seed=1), b=normal(32),
    )  # fmt: skip


def external_file(folder: Path) -> Path:
    """The model with its weights in a file beside it."""
    path = folder / "model.onnx"
    onnx.save(large_model(), path, save_as_external_data=True, location="weights.bin", size_threshold=100)
    return path


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with refused(ModelError, tmp_path / "none.onnx"):
        read_model(tmp_path / "none.onnx")


def test_a_folder_is_no_model(tmp_path: Path) -> None:
    with refused(ModelError, tmp_path, "folder"):
        read_model(tmp_path)


CONTENTS = {
    "empty": b"",
    "text": b"This is a text, not a model.\n" * 40,
    "random": np.random.default_rng(0).bytes(5000),
    "zeros": bytes(1000),
    "only a version": onnx.ModelProto(ir_version=8).SerializeToString(),
    "no nodes": onnx.ModelProto(ir_version=8, graph=onnx.GraphProto(name="net")).SerializeToString(),
}


@pytest.mark.parametrize("content", CONTENTS)
def test_what_is_not_onnx_is_refused(content: str, tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(CONTENTS[content])
    with refused(ModelError, path, "ONNX"):
        read_model(path)


@pytest.mark.parametrize("suffix", ["onnx", "json", "textproto", "onnxtxt"])
def test_the_name_of_a_file_does_not_change_how_it_is_read(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"model.{suffix}"
    path.write_bytes(b"This is a text.")
    with pytest.raises(ModelError):
        read_model(path)


@pytest.mark.parametrize("share", [0.001, 0.05, 0.2, 0.5, 0.8, 0.95, 0.999])
def test_truncated_files_are_refused(share: float, tmp_path: Path) -> None:
    content = conv_net().SerializeToString()
    path = tmp_path / "model.onnx"
    path.write_bytes(content[: int(len(content) * share)])
    with refused(ModelError, path):
        read_model(path)


QUANTIZED = {
    "QuantizeLinear": "q = QuantizeLinear (x, s, z) y = DequantizeLinear (q, s, z)",
    "QLinearConv": "y = QLinearConv (x, s, z, w, s, z, s, z)",
    "DynamicQuantizeLinear": "a, b, c = DynamicQuantizeLinear (x) y = DequantizeLinear (a, b, c)",
}


@pytest.mark.parametrize("op", QUANTIZED)
def test_quantized_models_are_refused(op: str) -> None:
    kind = "uint8" if op == "QLinearConv" else "float"
    model = build(
        f"net ({kind}[N,2,4,4] x) => ({kind}[N,2,4,4] y) {{ {QUANTIZED[op]} }}",
        s=np.float32(0.1), z=np.uint8(3), w=np.ones((2, 2, 1, 1), np.uint8),
    )  # fmt: skip
    with refused(ModelError, "already quantized", op):
        read_model(model)


def test_our_own_output_is_refused_as_input() -> None:
    model = conv_net()
    with pytest.raises(ModelError, match="already quantized"):
        read_model(quantize(model, feed_for(model)).model)


@pytest.mark.parametrize("opset", [6, NEWEST_OPSET + 1])
def test_opsets_out_of_range_are_refused(opset: int) -> None:
    model = build("net (float[2,3] x) => (float[2,3] y) { y = Relu (x) }", opset, 10)
    with refused(ModelError, f"opset {opset}", 7, NEWEST_OPSET):
        read_model(model)


def test_invalid_models_are_refused() -> None:
    model = build("net (float[2,3] x) => (float[2,3] y) { y = Relu (nowhere) }")
    with refused(ModelError, "nowhere"):
        read_model(model)


def test_a_given_proto_is_copied() -> None:
    model = conv_net()
    copy = read_model(model)
    del copy.graph.node[:]
    assert len(model.graph.node) == 14


def test_external_data_is_read(tmp_path: Path) -> None:
    model = read_model(external_file(tmp_path))
    for name in ("w", "v", "b"):
        np.testing.assert_array_equal(initializer(model, name), initializer(large_model(), name))


@pytest.mark.parametrize("damage", ["missing", "short"])
def test_broken_external_data_is_a_model_error(damage: str, tmp_path: Path) -> None:
    path = external_file(tmp_path)
    weights = tmp_path / "weights.bin"
    if damage == "missing":
        weights.unlink()
    else:
        weights.write_bytes(weights.read_bytes()[:1000])
    with refused(ModelError, path):
        read_model(path)


def test_file_bytes_counts_external_data(tmp_path: Path) -> None:
    path = external_file(tmp_path)
    assert file_bytes(path) == sum(entry.stat().st_size for entry in tmp_path.iterdir())
    assert (tmp_path / "weights.bin").stat().st_size >= 2 * 32 * 32 * 4
    plain = tmp_path / "plain.onnx"
    onnx.save(large_model(), plain)
    assert file_bytes(plain) == plain.stat().st_size


def test_a_written_model_reads_back_equal(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    write_model(conv_net(), path)
    assert onnx.load(path) == conv_net()
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o027, 0o640), (0o077, 0o600), (0o002, 0o664)])
def test_permissions_follow_the_umask(mask: int, mode: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a call of umask, which would hold for what other threads write meanwhile."""
    path, set_mask = tmp_path / "model.onnx", os.umask
    before = set_mask(mask)
    try:
        monkeypatch.delattr(os, "umask")
        write_model(conv_net(), path)
    finally:
        set_mask(before)
    assert path.stat().st_mode & 0o777 == mode


def test_a_name_that_is_too_long_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OutputError):
        write_model(conv_net(), tmp_path / ("x" * 300))


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt(), RuntimeError("bug")])
def test_a_failed_write_leaves_the_old_file_and_nothing_else(
    error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(b"old")

    def fail(self: Path, content: bytes) -> int:
        with self.open("wb") as file:
            file.write(content[:100])
        raise error

    monkeypatch.setattr(Path, "write_bytes", fail)
    with pytest.raises(OutputError if isinstance(error, OSError) else type(error)):
        write_model(conv_net(), path)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_replacing_shows_the_new_content_only_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    with replacing(path) as temporary:
        temporary.write_text("new")
        assert path.read_text() == "old"
        assert temporary.parent == tmp_path
    assert path.read_text() == "new"


def test_places_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "none" / "model.onnx", tmp_path / "file" / "model.onnx", tmp_path):
        with pytest.raises(OutputError) as caught:
            check_writable(path)
        assert caught.value.exit_code == 6
        with pytest.raises(OutputError):
            write_model(conv_net(), path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_checking_leaves_nothing_behind(tmp_path: Path) -> None:
    check_writable(tmp_path / "model.onnx")
    assert list(tmp_path.iterdir()) == []


SMALL = 2048  # as if protobuf held no more than two kilobytes


def test_models_beyond_the_limit_get_external_data(tmp_path: Path) -> None:
    path, model = tmp_path / "model.onnx", large_model()
    write_model(model, path, SMALL)
    assert {entry.name for entry in tmp_path.iterdir()} == {"model.onnx", "model.onnx.data"}
    bare = onnx.load(path, load_external_data=False)
    assert [external_data_helper.uses_external_data(tensor) for tensor in bare.graph.initializer] == [True, True, False]
    assert path.stat().st_size < SMALL
    back = load(path)
    for name in ("w", "v", "b"):
        np.testing.assert_array_equal(initializer(back, name), initializer(model, name))
    assert file_bytes(path) == path.stat().st_size + 2 * 32 * 32 * 4
    assert not external_data_helper.uses_external_data(model.graph.initializer[0])


def test_sessions_run_models_beyond_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    written = []
    original = handing.write_model

    def noted(model: onnx.ModelProto, path: Path, limit: int) -> None:
        original(model, path, limit)
        written.append(path)

    monkeypatch.setattr(handing, "write_model", noted)
    model = large_model()
    feed = feed_for(model)
    outputs = Session(model, limit=SMALL).run(feed)
    assert len(written) == 1
    assert not written[0].exists()
    np.testing.assert_allclose(outputs["y"], run(model, feed)["y"], rtol=1e-5, atol=1e-5)


def test_a_failed_write_of_external_data_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_model: onnx.ModelProto) -> bytes:
        raise RuntimeError("bug")

    monkeypatch.setattr(io, "serialized_outside", fail)
    with pytest.raises(RuntimeError):
        write_model(large_model(), tmp_path / "model.onnx", SMALL)
    assert list(tmp_path.iterdir()) == []


def test_a_model_with_external_data_is_quantized(tmp_path: Path) -> None:
    model = large_model()
    path = tmp_path / "model.onnx"
    write_model(model, path, SMALL)
    small = tmp_path / "small.onnx"
    quantize(path, feed_for(model), output=small)
    noise = run(small, feed_for(model))["y"] - run(model, feed_for(model))["y"]
    assert np.abs(noise).max() < 0.05 * np.abs(run(model, feed_for(model))["y"]).max()


def test_weights_kept_as_numbers_move_to_external_data_too(tmp_path: Path) -> None:
    """Some exporters write float_data instead of raw bytes."""
    model, values = large_model(), normal(32, 32)
    tensor = onnx.helper.make_tensor("w", onnx.TensorProto.FLOAT, [32, 32], values.reshape(-1))
    model.graph.initializer[0].CopyFrom(tensor)
    path = tmp_path / "model.onnx"
    write_model(model, path, SMALL)
    np.testing.assert_array_equal(initializer(load(path), "w"), values)
    assert path.stat().st_size < SMALL
