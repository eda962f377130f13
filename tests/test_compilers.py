"""The proof by foreign compilers: its own parts always, the compilers where ONNXCALIB_COMPILERS names their folder."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
import pytest
from said import names

from models import conv_net, feed_for
from onnxcalib import Precision, Recipe, quantize, write_model
from onnxcalib.model.shapes import with_fixed_batch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))
compilers = pytest.importorskip("compilers")

WORK = Path(os.environ.get("ONNXCALIB_COMPILERS", "no-such-folder")).resolve()
needs_tools = pytest.mark.skipif(not WORK.is_dir(), reason="ONNXCALIB_COMPILERS names no folder of environments")


def test_agreement_counts_steps_of_the_reference() -> None:
    reference = np.arange(256, dtype=np.float32).reshape(16, 16)  # one step is one
    found = reference.copy()
    found[0, :4] += [0.5, -1.0, 1.5, 3.0]
    within, most = compilers.agreement(reference, found)
    assert within == 254 / 256
    assert most == 3.0
    with pytest.raises(ValueError, match="shapes"):
        compilers.agreement(reference, found[:4])


@pytest.mark.parametrize(("target", "has_grid"), [("ort", False), ("rknn", True)])
def test_the_step_is_that_of_the_output_grid(target: str, has_grid: bool, tmp_path: Path) -> None:
    model = conv_net()
    result = quantize(model, feed_for(model), Recipe(bits=(Precision.parse("w8a8"),), target=target))
    write_model(result.model, tmp_path / "file.onnx")
    step = compilers.output_step(tmp_path / "file.onnx")
    assert step == (float(result.plan.shared["y"].scale) if has_grid else None)
    reference = np.array([[0.0, 255.0]])
    assert compilers.agreement(reference, reference + 2, 4.0) == (1.0, 0.5)


def test_the_table_hides_nothing() -> None:
    rows = [
        compilers.Row("one", "1.0", "net 8", True, 20, 19, 0.99375, 1.25),
        compilers.Row("two", "-", "net 8", False, note="does not install: no wheel"),
    ]
    head, one, two = compilers.table(rows).splitlines()
    assert head.split()[:4] == ["tool", "version", "file", "loads"]
    assert "19 of 20" in one
    assert "99.38 %" in one
    assert one.endswith("1.25")
    assert two.endswith("does not install: no wheel")


def test_nominal_bytes_shrink_the_codes_alone() -> None:
    result = quantize(conv_net(), feed_for(conv_net()), Recipe(bits=(Precision(4, 8),), edge_bits=8))
    quantized = {name: params.quantized.size for name, params in result.plan.layers.items()}
    inner = sum(size for name, size in quantized.items() if name not in ("stem", "fc"))
    assert compilers.nominal_bytes(result.plan, 10_000) == 10_000 - inner / 2


def a_probe(folder: Path, text: str, longest: float = 60) -> dict:
    (folder / "probe_own.py").write_text(text)
    tool, files = compilers.Tool("own", "ort", (), "own"), (Path("m.onnx"), Path("f.npz"), folder / "out.npz")
    return compilers.ask(tool, Path(sys.executable), *files, folder, longest)


def test_a_probe_that_crashes_says_so(tmp_path: Path) -> None:
    answer = a_probe(tmp_path, "import sys; sys.exit('illegal instruction')")
    row = compilers.row_of("own", "net", answer, tmp_path / "out.npz", tmp_path / "reference.npz")
    assert not row.loads
    names(row.note, "code 1", "illegal instruction")


def test_a_probe_that_never_ends_is_stopped(tmp_path: Path) -> None:
    answer = a_probe(tmp_path, "import time; time.sleep(60)", longest=1)
    assert answer["loads"] is False
    names(answer["error"], "1 s")


def test_an_environment_that_does_not_install_gives_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(command: list, **_: object) -> object:
        code = 1 if "pip" in command else 0
        return compilers.subprocess.CompletedProcess(command, code, "", "WARNING: a\nERROR: no wheel for it\nERROR: b")

    monkeypatch.setattr(compilers.subprocess, "run", failing)
    python, words = compilers.environment(compilers.TOOLS["rknn-2.3"], tmp_path)
    assert python is None
    names(words, "no wheel for it")


def file_for(target: str, folder: Path) -> tuple[Path, Path]:
    feeds = feed_for(conv_net(), 8)
    result = quantize(conv_net(), feeds, Recipe(target=target))
    write_model(with_fixed_batch(result.model), folder / "model.onnx")
    np.savez(folder / "feeds.npz", **feeds)
    return folder / "model.onnx", folder / "feeds.npz"


def answer_of(name: str, folder: Path) -> dict:
    """What a tool says of its own target's file, which it must load."""
    tool = compilers.TOOLS[name]
    if not (WORK / tool.environment / ".ready").exists():
        pytest.skip(f"{tool.environment} is not installed")
    python, _ = compilers.environment(tool, WORK)
    answer = compilers.ask(tool, python, *file_for(tool.target, folder), folder / "out.npz")
    assert answer["loads"], answer
    return answer


INTEGER_TOOLS = ["onnxruntime-1.15", "onnxruntime-1.19", "onnxruntime-newest", "openvino", "rknn-2.3", "rknn-2.5"]
ROUNDS_ANEW = pytest.mark.xfail(reason="it rounds weights anew, on 128/127 of the file's step")


@pytest.mark.compilers
@needs_tools
@pytest.mark.parametrize("name", [*INTEGER_TOOLS, "qonnx"])
def test_every_layer_is_int8_by_its_own_report(name: str, tmp_path: Path) -> None:
    answer = answer_of(name, tmp_path)
    assert answer["layers"] >= 5
    assert answer["int8"] == answer["layers"], answer["note"]


@pytest.mark.compilers
@needs_tools
@pytest.mark.parametrize("name", [*INTEGER_TOOLS[:-1], pytest.param("rknn-2.5", marks=ROUNDS_ANEW)])
def test_outputs_agree_with_the_newest_onnxruntime(name: str, tmp_path: Path) -> None:
    answer = answer_of(name, tmp_path)
    reference, _ = compilers.environment(compilers.TOOLS[compilers.REFERENCE], WORK)
    files = (tmp_path / "model.onnx", tmp_path / "feeds.npz", tmp_path / "reference.npz")
    compilers.ask(compilers.TOOLS[compilers.REFERENCE], reference, *files)
    row = compilers.row_of(name, "net", answer, tmp_path / "out.npz", tmp_path / "reference.npz")
    assert row.within is not None
    assert row.within >= 0.95


@pytest.mark.compilers
@needs_tools
@pytest.mark.parametrize("name", ["iree", "tvm", "qonnx"])
def test_compilers_without_a_report_agree(name: str, tmp_path: Path) -> None:
    answer_of(name, tmp_path)
    target = "ort" if name == "qonnx" else compilers.TOOLS[name].target
    quantized = quantize(conv_net(), feed_for(conv_net(), 8), Recipe(target=target))
    write_model(with_fixed_batch(quantized.model), tmp_path / "reference.onnx")
    (expected,) = compilers.run_file(tmp_path / "reference.onnx", feed_for(conv_net(), 8))
    within, _ = compilers.agreement(expected, np.load(tmp_path / "out.npz")["arr_0"])
    assert within >= 0.95
