"""quantize --report, explain and compare as a person runs them."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from command_line import said_by

from models import conv_net, feed_for, run
from onnxcalib.cli.commands import cli

MIX = ("--pipeline", "light", "--bits", "w4a4,w8a8", "--ranges", "minmax", "--compression", "0.55")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with its data, one file with a report and one without."""
    where = tmp_path_factory.mktemp("told")
    model = conv_net()
    onnx.save(model, where / "model.onnx")
    np.savez(where / "data.npz", **feed_for(model, 32))
    test = feed_for(model, 24, seed=1)
    np.savez(where / "test.npz", **test, labels=run(model, test)["y"].argmax(axis=1))
    start = ["quantize", str(where / "model.onnx"), "-c", str(where / "data.npz"), "-o"]
    report = ["--report", str(where / "run.html"), "--test-data", str(where / "test.npz")]
    with contextlib.redirect_stderr(io.StringIO()) as said:
        cli.main([*start, str(where / "mixed.onnx"), *MIX, *report], standalone_mode=False)
        cli.main([*start, str(where / "plain.onnx"), "--ranges", "minmax"], standalone_mode=False)
    assert f"report: {where / 'run.html'}" in said.getvalue()
    return where


def test_quantize_writes_page_numbers_and_figures(folder: Path) -> None:
    assert {path.name for path in folder.iterdir()} == {
        "model.onnx", "data.npz", "test.npz", "mixed.onnx", "mixed.onnx.run", "plain.onnx", "plain.onnx.run",
        "run.html", "run.json", "run_figures",
    }  # fmt: skip
    numbers = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    assert numbers["outcome"]["quantized"]["samples"] == 24
    assert numbers["outcome"]["float"]["top1"] == 100
    assert numbers["outcome"]["data"] == str(folder / "test.npz")
    assert len(list((folder / "run_figures").iterdir())) == 16


def test_explain_finds_the_report_beside_the_file(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = said_by(capsys, "explain", folder / "mixed.onnx")
    assert (code, err) == (0, "")
    for title in ("loses the accuracy?", "still float?", "not smaller?", "not faster?", "one more bit buy?"):
        assert title in out
    assert "loses the most: " in out
    assert "% of the float file's" in out
    assert "Measured by the run: " in out
    assert "w4a4 to w8a8 saves " in out
    assert "The file alone does not tell" not in out


def test_explain_without_a_report_says_what_to_add(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = said_by(capsys, "explain", folder / "plain.onnx")
    assert code == 0
    assert out.count("Add --model FLOAT.onnx -d DATA, or quantize with --report.") == 2
    options = ("--model", folder / "model.onnx", "-d", folder / "data.npz", "--question", "accuracy")
    code, out, _ = said_by(capsys, "explain", folder / "plain.onnx", *options)
    assert code == 0
    assert "(w8a8) loses the most: " in out
    assert "to help it: --exclude " in out
    assert "smaller" not in out


def test_compare_prints_a_table_and_writes_csv(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = (folder / "plain.onnx", folder / "mixed.onnx", "-d", folder / "test.npz")
    table = folder.parent / "layers.csv"
    code, out, err = said_by(capsys, "compare", *files, "--model", folder / "model.onnx", "--csv", table)
    assert (code, err) == (0, "")
    assert "SQNR A, dB  SQNR B, dB  B - A, dB" in out
    assert "mixed.onnx" in out
    rows = list(csv.DictReader(table.open(encoding="utf-8")))
    assert sorted(row["layer"] for row in rows) == ["depth", "fc", "head", "project", "stem"]
    changes = [abs(float(row["difference_db"])) for row in rows]
    assert changes == sorted(changes, reverse=True)
    assert {row["bits_a"] for row in rows} == {"w8a8"}
    assert "w4a4" in {row["bits_b"] for row in rows}
    code, out, _ = said_by(capsys, "compare", *files)
    assert code == 0
    assert "SQNR of B against A, dB" in out


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ("explain none.onnx", 3, "model none.onnx does not exist."),
        ("explain data.npz", 3, "data.npz is not an ONNX file"),
        ("explain plain.onnx --model model.onnx", 2, "--model has no effect alone. Add -d DATA."),
        ("explain plain.onnx -d data.npz", 2, "-d has no effect alone. Add --model FLOAT.onnx."),
        ("explain plain.onnx --report none.json", 4, "report none.json does not exist."),
        ("explain plain.onnx --report run.html", 4, "run.json tells of another file than plain.onnx."),
        ("explain mixed.onnx --report run.json --model model.onnx -d data.npz", 2, "Give one of them."),
        ("compare plain.onnx model.onnx -d none.npz", 4, "none.npz does not exist."),
        ("compare plain.onnx mixed.onnx -d data.npz --csv out.txt", 6, "the table out.txt does not end in .csv."),
        ("quantize model.onnx -c data.npz -o x.onnx --report x.pdf", 6, "x.pdf does not end in .html."),
        ("quantize model.onnx -c data.npz -o x.onnx --test-data test.npz", 2, "--test-data has no effect without"),
    ],
)
def test_bad_input_is_one_sentence(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, words: str, code: int, said: str
) -> None:
    monkeypatch.chdir(folder)
    found, out, err = said_by(capsys, *words.split())
    assert (found, out) == (code, "")
    assert said in err
    assert len(err.strip().splitlines()) == 1
    assert not (folder / "x.onnx").exists()


def test_a_number_file_that_is_no_report_is_refused(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "other.json").write_text('{"format": "something else"}')
    code, _, err = said_by(capsys, "explain", folder / "plain.onnx", "--report", tmp_path / "other.json")
    assert code == 4
    assert "is not a report's numbers" in err


def test_without_matplotlib_the_run_does_not_begin(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.chdir(folder)
    code, _, err = said_by(capsys, *["quantize", "model.onnx", "-c", "data.npz", "-o", "x.onnx", "--report", "x.html"])
    assert code == 6
    assert err == "Error: plots need matplotlib. Type: pip install 'onnxcalib[report]'\n"
    assert not (folder / "x.onnx").exists()
