"""How commands end when something unforeseen happens: one sentence, an exit code, nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest
from command_line import COMMAND, ENVIRONMENT, case_in, said_by
from said import one_error

from onnxcalib.cli import inspect as command
from onnxcalib.cli.ending import TRACEBACK


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (KeyError("odd\x1b[31m"), 70),
        (RecursionError(), 70),
        (MemoryError(), 7),
        (OSError(28, "No space left on device", "x.bin"), 6),
        (OSError("100 requested and 3 written"), 6),
        (AssertionError("line one\nline two"), 70),
    ],
)
def test_an_unforeseen_error_is_one_sentence(
    error: Exception, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(_path: Path, _samples: Path | None) -> None:
        raise error

    monkeypatch.delenv(TRACEBACK, raising=False)
    monkeypatch.setattr(command, "inspect_model", fails)
    found, out, err = said_by(capsys, "inspect", "model.onnx")
    assert (found, out) == (code, "")
    one_error(err, *([TRACEBACK] if code == 70 else []))
    assert err[:-1].isprintable()
    monkeypatch.setenv(TRACEBACK, "1")
    with pytest.raises(type(error)):
        said_by(capsys, "inspect", "model.onnx")


def test_a_reader_that_leaves_early_is_no_traceback(tmp_path: Path) -> None:
    case_in(tmp_path, 8)
    process = subprocess.Popen(
        [*COMMAND, "inspect", str(tmp_path / "model.onnx"), "--json"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT,
    )  # fmt: skip
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    err = process.stderr.read()
    assert process.wait(60) != 0
    assert "Traceback" not in err


def test_a_name_that_the_terminal_cannot_encode(tmp_path: Path) -> None:
    case_in(tmp_path, 8)
    odd = tmp_path / "m\u00fc\u4e2d.onnx"
    (tmp_path / "model.onnx").rename(odd)
    words = [*COMMAND, "evaluate", str(odd), "-d", str(tmp_path / "data.npz")]
    environment = {**ENVIRONMENT, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    done = subprocess.run(words, capture_output=True, text=True, env=environment, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "m\\xfc\\u4e2d.onnx" in done.stdout


def test_terminated_it_cleans_up(tmp_path: Path) -> None:
    where, spool = case_in(tmp_path, 8), tmp_path / "spool"
    spool.mkdir()
    with np.load(where / "data.npz") as arrays:
        repeated = {name: np.repeat(arrays[name], 2000, axis=0) for name in arrays.files}
    np.savez_compressed(where / "packed.npz", **repeated)
    words = [*COMMAND, "quantize", str(where / "model.onnx"), "-c", str(where / "packed.npz"), "-o", "small.onnx", "-v"]
    environment = {**ENVIRONMENT, "TMPDIR": str(spool)}
    assert tempfile.gettempdir() != str(spool)
    process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True, env=environment, cwd=where)
    assert process.stderr is not None
    said = ""
    while "statistics begins" not in said:  # by now the data is unpacked
        said += process.stderr.readline()
    time.sleep(0.2)
    process.send_signal(signal.SIGTERM)
    said += process.stderr.read()
    assert process.wait(60) == 128 + signal.SIGTERM, said
    assert said.splitlines()[-1].startswith("interrupted")
    assert "Traceback" not in said
    assert [path.name for path in spool.iterdir() if path.name != ".ses"] == []  # which onnxruntime leaves
    assert not (where / "small.onnx").exists()
    assert not list(where.rglob("*.part"))


def test_what_is_no_file_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = case_in(tmp_path, 8)
    os.mkfifo(where / "pipe")
    deep = where / "deep.toml"
    deep.write_text(f"bits = {'[' * 5000}{']' * 5000}\n")
    quantize = ("-c", where / "data.npz", "-o", where / "small.onnx")
    for code, arguments in (
        (3, ("quantize", where / "pipe", *quantize)),
        (3, ("quantize", "a" * 5000, *quantize)),
        (3, ("inspect", where)),
        (2, ("quantize", where / "model.onnx", *quantize, "--recipe", where / "pipe")),
        (2, ("quantize", where / "model.onnx", *quantize, "--recipe", deep)),
        (2, ("quantize", where / "model.onnx", *quantize, "--target", deep)),
        (2, ("quantize", where / "model.onnx", *quantize, "--seed", "-1")),
        (2, ("quantize", where / "model.onnx", *quantize, "--bits", "9" * 5000)),
        (2, ("allocate", where / "pipe", "--compression", "0.5")),
    ):
        found, _, err = said_by(capsys, *arguments)
        assert found == code, err
        one_error(err)
    assert not (where / "small.onnx").exists()


def test_what_was_typed_is_repeated_harmlessly(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = said_by(capsys, "inspect", "model.onnx", "--\x1b[31m")
    assert code == 2
    assert "\\x1b[31m" in err
    assert "\x1b" not in err
