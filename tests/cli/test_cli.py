"""The command as a person runs it: in a process of its own."""

from __future__ import annotations

import importlib.metadata
import json
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from command_line import COMMAND, ENVIRONMENT, call, case_in, said_by
from said import names, one_error

from models import change, conv_net, feed_for, initializer, transformer_block
from onnxcalib.autodiff.gradients import choose_engine
from onnxcalib.recipe import Engine


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, calibration data and labelled test data."""
    return case_in(tmp_path_factory.mktemp("cli"), 64, 40)


def test_inspect_prints_the_layers(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = said_by(capsys, "inspect", folder / "model.onnx")
    assert (code, err) == (0, "")
    names(out, "stem", "depthwise Conv", "8x3x3x3", "bias+BN+Clip", "4,608", "5 layers", "605 parameters")


def test_inspect_prints_json(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    onnx.save(transformer_block(), folder / "block.onnx")
    listed = json.loads(said_by(capsys, "inspect", folder / "block.onnx", "--json")[1])
    assert [layer["name"] for layer in listed["layers"]] == ["query", "key", "value", "up", "down"]
    assert listed["layers"][0]["weight_shape"] == [6, 6]
    assert listed["layers"][0]["batch_norm"] is False
    assert [node["name"] for node in listed["products"]] == ["scores", "mix"]


def test_quantize_and_evaluate(folder: Path, tmp_path: Path) -> None:
    small = tmp_path / "small.onnx"
    done = call("quantize", folder / "model.onnx", "-c", folder / "data.npz", "-o", small)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    names(done.stderr, "5 layers", "5 at w8a8")
    onnx.checker.check_model(str(small))
    assert {path.name for path in tmp_path.iterdir()} == {"small.onnx", "small.onnx.run"}

    options = ("-d", folder / "test.npz", "--reference", folder / "model.onnx")
    rows = json.loads(call("evaluate", folder / "model.onnx", small, *options, "--json").stdout)
    assert [row["samples"] for row in rows] == [40, 40]
    assert rows[0]["top1"] == rows[0]["agreement"] == 100.0
    assert rows[0]["sqnr_db"] is None  # no noise at all
    assert rows[0]["distillation_loss"] == 0.0
    assert rows[1]["agreement"] == rows[1]["top1"] >= 85.0
    assert 15 < rows[1]["sqnr_db"] < 60
    assert rows[1]["bytes"] == small.stat().st_size

    table = call("evaluate", small, *options).stdout
    assert "small.onnx" in table
    assert f"{rows[1]['sqnr_db']:.1f}" in table
    assert len([line for line in table.splitlines() if "model.onnx" in line and "100.00" in line]) == 1  # the float one


def test_labels_that_are_not_the_model_s_are_doubted(folder: Path, tmp_path: Path) -> None:
    arrays = dict(np.load(folder / "test.npz"))
    shifted = tmp_path / "shifted.npz"
    np.savez(shifted, **{**arrays, "labels": (arrays["labels"] + 1) % 5})
    model = folder / "model.onnx"
    done = call("evaluate", model, "-d", shifted, "--reference", model)
    assert done.returncode == 0
    names(done.stderr, "0.00 %", "shifted.npz", "classes")
    assert "itself" not in call("evaluate", model, "-d", folder / "test.npz", "--reference", model).stderr


def test_options_reach_the_file_and_the_command_line_goes_on_top_of_the_recipe(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('bits = "w4a8"\nexclude = ["stem"]\nranges = "minmax"\ntarget = "paper"\n')
    small = tmp_path / "small.onnx"
    code, _, err = said_by(
        capsys, "quantize", folder / "model.onnx", "-c", folder / "data.npz", "-o", small, "--recipe", recipe,
        "--ranges", "entropy", "--edge-bits", "6",
    )  # fmt: skip
    assert code == 0, err
    names(err, "4 layers", "2 at w4a8", "2 at w6a6", "entropy", "paper")
    model = onnx.load(small)
    stem = next(node for node in model.graph.node if node.name == "stem")
    assert initializer(model, stem.input[1]).dtype == np.float32


def test_two_runs_write_the_same_bytes(folder: Path, tmp_path: Path) -> None:
    for name in ("one", "two"):
        done = call(
            "quantize", folder / "model.onnx", "-c", folder / "data.npz", "-o", tmp_path / name, "--bits", "w4a6"
        )
        assert done.returncode == 0, done.stderr
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


def test_doctor_prints_the_runtime() -> None:
    done = call("doctor")
    assert done.returncode == 0
    assert ort.__version__ in done.stdout
    assert f"onnx {importlib.metadata.version('onnx')}" in done.stdout


def test_doctor_names_the_engine_that_gives_gradients_and_how_to_get_the_other() -> None:
    said = call("doctor").stdout
    assert "not available" not in said
    assert f"gradients by engine {choose_engine(Engine.AUTO)}" in said
    other = "--engine standard" if choose_engine(Engine.AUTO) is Engine.TRAINING else "'onnxcalib[training]'"
    assert other in said


def data(name: str, **arrays: np.ndarray) -> Callable[[Path], list[str | Path]]:
    def spoil(where: Path) -> list[str | Path]:
        np.savez(where / name, **arrays)
        return ["-c", where / name]

    return spoil


def model(content: Callable[[bytes], bytes] | bytes) -> Callable[[Path], list[str | Path]]:
    def spoil(where: Path) -> list[str | Path]:
        source = (where / "model.onnx").read_bytes()
        (where / "bad.onnx").write_bytes(content if isinstance(content, bytes) else content(source))
        return [where / "bad.onnx"]

    return spoil


def infinite(content: bytes) -> bytes:
    bad = onnx.load_from_string(content)
    values = initializer(bad, "w4").copy()
    values[0] = np.inf
    change(bad, "w4", values)
    return bad.SerializeToString()


def already_quantized(content: bytes) -> bytes:
    bad = onnx.load_from_string(content)
    scale, zero = np.array(0.1, np.float32), np.array(0, np.uint8)
    bad.graph.initializer.extend([onnx.numpy_helper.from_array(scale, "s"), onnx.numpy_helper.from_array(zero, "z")])
    bad.graph.node.insert(0, onnx.helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"], "quantizer"))
    return bad.SerializeToString()


def option(*words: str) -> Callable[[Path], list[str | Path]]:
    return lambda _where: [*words]


def recipe(text: str) -> Callable[[Path], list[str | Path]]:
    def spoil(where: Path) -> list[str | Path]:
        (where / "recipe.toml").write_text(text)
        return ["--recipe", where / "recipe.toml"]

    return spoil


X = np.zeros((4, 3, 8, 8), np.float32)
WITH_NAN = np.where(np.arange(4).reshape(4, 1, 1, 1) == 2, np.float32(np.nan), X)

BAD: dict[str, tuple[Callable[[Path], list[str | Path]], int, tuple[object, ...]]] = {
    "missing model": (lambda where: [where / "none.onnx"], 3, ("none.onnx",)),
    "a folder": (lambda where: [where], 3, ("folder", ".onnx")),
    "not ONNX": (model(b"hello, I am a text\n" * 20), 3, ("bad.onnx", "ONNX")),
    "empty": (model(b""), 3, ("bad.onnx", "ONNX")),
    "truncated": (model(lambda content: content[: len(content) // 2]), 3, ("bad.onnx", "cut short")),
    "already quantized": (model(already_quantized), 3, ("bad.onnx", "already quantized", "'quantizer'")),
    "infinite weights": (model(infinite), 3, ("'head'", "infinite")),
    "missing data": (lambda where: ["-c", where / "none.npz"], 4, ("none.npz",)),
    "wrong input name": (data("bad.npz", image=X), 4, ("bad.npz", "'x'", "image")),
    "wrong shape": (data("bad.npz", x=X[:, :, :7]), 4, ("bad.npz", "axis 2", 7, 8)),
    "wrong dtype": (data("bad.npz", x=X.astype(np.float64)), 4, ("bad.npz", "float64", "'x'", "float32")),
    "no samples": (data("bad.npz", x=X[:0]), 4, ("bad.npz",)),
    "no arrays": (data("bad.npz"), 4, ("bad.npz",)),
    "NaN data": (data("bad.npz", x=WITH_NAN), 4, ("bad.npz", "sample 2")),
    "unknown target": (option("--target", "orrt"), 2, ("'orrt'", "ort")),
    "1 bit": (option("--bits", "1"), 2, ("1 weight bits", "2 to 8")),
    "9 bits": (option("--bits", "w8a9"), 2, ("9 activation bits", "2 to 8")),
    "no bits at all": (option("--bits", "w4x"), 2, ("'w4x'", "w4a8")),
    "edge bits": (option("--edge-bits", "9"), 2, (9, "2 to 8")),
    "a list with plain": (option("--bits", "w4a4,w8a8", "--pipeline", "plain"), 2, ("plain", "--pipeline light")),
    "unknown pipeline": (option("--pipeline", "lite"), 2, ("'lite'", "light")),
    "unknown ranges": (option("--ranges", "kl"), 2, ("'kl'", "entropy")),
    "exclude nothing": (option("--exclude", "sten"), 2, ("--exclude 'sten'", "stem")),
    "exclude all": (option("--exclude", "*"), 2, ("--exclude",)),
    "unknown key": (recipe("bit = 4\n"), 2, ("recipe.toml", "'bit'", "bits")),
    "broken recipe": (recipe("bits = [\n"), 2, ("recipe.toml", "TOML")),
    "missing recipe": (lambda where: ["--recipe", where / "none.toml"], 2, ("none.toml",)),
    "image options with arrays": (option("--resize", "256"), 4, ("data.npz",)),
    "mean that is no number": (option("--mean", "a,b"), 2, ("--mean 'a,b'",)),
    "missing folder": (lambda where: ["-o", where / "none" / "small.onnx"], 6, ("none",)),
    "a file as folder": (lambda where: ["-o", where / "model.onnx" / "small.onnx"], 6, ("model.onnx",)),
    "output is a folder": (lambda where: ["-o", where], 6, ("folder",)),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_sentence_and_an_exit_code(
    case: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spoil, code, facts = BAD[case]
    for name in ("model.onnx", "data.npz"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    given = spoil(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    arguments: list[str | Path] = [] if given and isinstance(given[0], Path) else [tmp_path / "model.onnx"]
    arguments += given
    if "-c" not in given:
        arguments += ["-c", tmp_path / "data.npz"]
    if "-o" not in given:
        arguments += ["-o", tmp_path / "small.onnx"]
    found, out, err = said_by(capsys, "quantize", *arguments)
    assert (found, out) == (code, ""), err
    one_error(err, *facts)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ("inspect none.onnx", 3),
        ("evaluate none.onnx -d data.npz", 3),
        ("evaluate model.onnx -d none.npz", 4),
        ("evaluate model.onnx -d data.npz --reference none.onnx", 3),
    ],
)
def test_bad_input_of_other_commands(words: str, code: int, folder: Path) -> None:
    done = call(*words.split(), cwd=folder)
    assert (done.returncode, done.stdout) == (code, ""), done.stderr
    one_error(done.stderr, "none.onnx" if code == 3 else "none.npz")


@pytest.mark.parametrize(
    ("words", "fact"),
    [
        ("--help", "quantize"),
        ("quantize -h", "--calibration"),
        ("inspect -h", "--json"),
        ("evaluate -h", "--reference"),
        ("--version", importlib.metadata.version("onnxcalib")),
    ],
)
def test_help_needs_no_model(words: str, fact: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = said_by(capsys, *words.split())
    assert (code, err) == (0, "")
    names(out, fact)


def test_unknown_options_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = said_by(capsys, "quantize", "model.onnx", "--bit", "4")
    assert code == 2
    names(err, "--bit", "--bits")


@pytest.mark.parametrize("delay", [0.3, 1.0, 1.8])
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_run_leaves_no_half_written_file(
    how: signal.Signals, delay: float, folder: Path, tmp_path: Path
) -> None:
    many, small = tmp_path / "many.npz", tmp_path / "small.onnx"
    np.savez(many, **feed_for(conv_net(), 3000))
    words = [*COMMAND, "quantize", str(folder / "model.onnx"), "-c", str(many), "-o", str(small)]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=ENVIRONMENT)
    time.sleep(delay)
    process.send_signal(how)
    _out, err = process.communicate(timeout=60)
    if b"init_import_site" in err:
        pytest.skip("the interpreter itself was still starting")
    assert b"Traceback" not in err
    if small.exists():
        onnx.checker.check_model(str(small), full_check=True)
    else:
        assert process.returncode != 0
    if how is signal.SIGINT:
        assert {path.name for path in tmp_path.iterdir()} <= {"many.npz", "small.onnx", "small.onnx.run"}
