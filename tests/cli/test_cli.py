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
from command_line import COMMAND, ENVIRONMENT, call

from models import conv_net, feed_for, initializer, run, transformer_block
from onnxcalib.autodiff.gradients import choose_engine
from onnxcalib.recipe import Engine


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, calibration data and labelled test data."""
    where = tmp_path_factory.mktemp("cli")
    model = conv_net()
    onnx.save(model, where / "model.onnx")
    np.savez(where / "calibration.npz", **feed_for(model, 64))
    test = feed_for(model, 40, seed=1)
    np.savez(where / "test.npz", **test, labels=run(model, test)["y"].argmax(axis=1))
    return where


def test_inspect_prints_the_layers(folder: Path) -> None:
    done = call("inspect", folder / "model.onnx")
    assert done.returncode == 0, done.stderr
    for word in ("stem", "depthwise Conv", "8x3x3x3", "bias+BN+Clip", "4,608"):
        assert word in done.stdout
    assert "5 layers, 605 parameters" in done.stdout


def test_inspect_prints_json(folder: Path) -> None:
    onnx.save(transformer_block(), folder / "block.onnx")
    listed = json.loads(call("inspect", folder / "block.onnx", "--json").stdout)
    assert [layer["name"] for layer in listed["layers"]] == ["query", "key", "value", "up", "down"]
    assert listed["layers"][0]["weight_shape"] == [6, 6]
    assert listed["layers"][0]["batch_norm"] is False
    assert [node["name"] for node in listed["float"]] == ["scores", "mix"]


def test_quantize_and_evaluate(folder: Path, tmp_path: Path) -> None:
    small = tmp_path / "small.onnx"
    done = call("quantize", folder / "model.onnx", "-c", folder / "calibration.npz", "-o", small)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    assert "5 layers quantized (5 at w8a8)" in done.stderr
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


def test_options_reach_the_file_and_the_command_line_goes_on_top_of_the_recipe(folder: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('bits = "w4a8"\nexclude = ["stem"]\nranges = "minmax"\ntarget = "paper"\n')
    small = tmp_path / "small.onnx"
    done = call(
        "quantize", folder / "model.onnx", "-c", folder / "calibration.npz", "-o", small, "--recipe", recipe,
        "--ranges", "entropy", "--edge-bits", "6",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "4 layers quantized (2 at w4a8, 2 at w6a6), ranges entropy, target paper" in done.stderr
    model = onnx.load(small)
    stem = next(node for node in model.graph.node if node.name == "stem")
    assert initializer(model, stem.input[1]).dtype == np.float32


def test_two_runs_write_the_same_bytes(folder: Path, tmp_path: Path) -> None:
    for name in ("one", "two"):
        done = call(
            "quantize", folder / "model.onnx", "-c", folder / "calibration.npz", "-o", tmp_path / name, "--bits", "w4a6"
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
    tensor = next(tensor for tensor in bad.graph.initializer if tensor.name == "w4")
    values = onnx.numpy_helper.to_array(tensor).copy()
    values[0] = np.inf
    tensor.CopyFrom(onnx.numpy_helper.from_array(values, "w4"))
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

BAD: dict[str, tuple[Callable[[Path], list[str | Path]], int, str]] = {
    "missing model": (lambda where: [where / "none.onnx"], 3, "does not exist"),
    "a folder": (lambda where: [where], 3, "is a folder"),
    "not ONNX": (model(b"hello, I am a text\n" * 20), 3, "is not an ONNX file, or it is cut short"),
    "empty": (model(b""), 3, "is not an ONNX file, or it is cut short"),
    "truncated": (model(lambda content: content[: len(content) // 2]), 3, "is not an ONNX file, or it is cut short"),
    "already quantized": (model(already_quantized), 3, "already quantized: node 'quantizer' is a QuantizeLinear"),
    "infinite weights": (model(infinite), 3, "of layer 'head' holds NaN or infinite values"),
    "missing data": (lambda where: ["-c", where / "none.npz"], 4, "does not exist"),
    "wrong input name": (data("bad.npz", image=X), 4, "The input 'x' has no array"),
    "wrong shape": (data("bad.npz", x=X[:, :, :7]), 4, "its axis 2 is 7 and must be 8"),
    "wrong dtype": (data("bad.npz", x=X.astype(np.float64)), 4, "is float64, but the input 'x' is float32"),
    "no samples": (data("bad.npz", x=X[:0]), 4, ""),
    "no arrays": (data("bad.npz"), 4, ""),
    "NaN data": (data("bad.npz", x=WITH_NAN), 4, "sample 2"),
    "unknown target": (option("--target", "orrt"), 2, "'orrt' is not a target. Near names: ort"),
    "1 bit": (option("--bits", "1"), 2, "1 weight bits are out of range. Choose 2 to 8."),
    "9 bits": (option("--bits", "w8a9"), 2, "9 activation bits are out of range"),
    "no bits at all": (option("--bits", "w4x"), 2, "'w4x' is not a precision"),
    "edge bits": (option("--edge-bits", "9"), 2, "out of range"),
    "a list with plain": (option("--bits", "w4a4,w8a8", "--pipeline", "plain"), 2, "mixed precision"),
    "unknown pipeline": (option("--pipeline", "lite"), 2, "'lite' is not a"),
    "unknown ranges": (option("--ranges", "kl"), 2, "'kl' is not a"),
    "exclude nothing": (option("--exclude", "sten"), 2, "--exclude 'sten' matches no layer. Near names: stem"),
    "exclude all": (option("--exclude", "*"), 2, "every layer is excluded"),
    "unknown key": (recipe("bit = 4\n"), 2, "has an unknown key 'bit'. Near names: bits"),
    "broken recipe": (recipe("bits = [\n"), 2, "is not valid TOML"),
    "missing recipe": (lambda where: ["--recipe", where / "none.toml"], 2, "cannot be read"),
    "image options with arrays": (option("--resize", "256"), 4, ""),
    "mean that is no number": (option("--mean", "a,b"), 2, "--mean 'a,b' is not a list of numbers"),
    "missing folder": (lambda where: ["-o", where / "none" / "small.onnx"], 6, "does not exist"),
    "a file as folder": (lambda where: ["-o", where / "model.onnx" / "small.onnx"], 6, "does not exist"),
    "output is a folder": (lambda where: ["-o", where], 6, "is a folder"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_sentence_and_an_exit_code(case: str, folder: Path, tmp_path: Path) -> None:
    spoil, code, words = BAD[case]
    for name in ("model.onnx", "calibration.npz"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    given = spoil(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    arguments: list[str | Path] = [] if given and isinstance(given[0], Path) else [tmp_path / "model.onnx"]
    arguments += given
    if "-c" not in given:
        arguments += ["-c", tmp_path / "calibration.npz"]
    if "-o" not in given:
        arguments += ["-o", tmp_path / "small.onnx"]
    done = call("quantize", *arguments)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.startswith("Error: ")
    assert done.stderr.count("\n") == 1
    assert words in done.stderr
    assert done.stdout == ""
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize(
    ("command", "arguments", "code"),
    [
        ("inspect", ["none.onnx"], 3),
        ("evaluate", ["none.onnx", "-d", "calibration.npz"], 3),
        ("evaluate", ["model.onnx", "-d", "none.npz"], 4),
        ("evaluate", ["model.onnx", "-d", "calibration.npz", "--reference", "none.onnx"], 3),
    ],
)
def test_bad_input_of_other_commands(command: str, arguments: list[str], code: int, folder: Path) -> None:
    done = call(command, *arguments, cwd=folder)
    assert done.returncode == code, done.stderr
    assert done.stderr.startswith("Error: ")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "arguments", [["--help"], ["quantize", "-h"], ["inspect", "-h"], ["evaluate", "-h"], ["--version"]]
)
def test_help_needs_no_model(arguments: list[str]) -> None:
    done = call(*arguments)
    assert done.returncode == 0
    assert "onnxcalib" in done.stdout or "version" in done.stdout


def test_unknown_options_are_named() -> None:
    done = call("quantize", "model.onnx", "--bit", "4")
    assert done.returncode == 2
    assert "--bit" in done.stderr
    assert "Traceback" not in done.stderr


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
