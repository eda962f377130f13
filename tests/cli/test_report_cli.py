"""quantize --report, explain and compare as a person runs them."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import sys
from pathlib import Path

import pytest
from command_line import case_in, said_by
from said import names, one_error

from onnxcalib.cli.commands import cli

MIX = ("--pipeline", "light", "--bits", "w4a4,w8a8", "--ranges", "minmax", "--compression", "0.55")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with its data, one file with a report and one without."""
    where = case_in(tmp_path_factory.mktemp("told"), 32, 24)
    start = ["quantize", str(where / "model.onnx"), "-c", str(where / "data.npz"), "-o"]
    report = ["--report", str(where / "run.html"), "--test-data", str(where / "test.npz")]
    with contextlib.redirect_stderr(io.StringIO()) as said:
        cli.main([*start, str(where / "mixed.onnx"), *MIX, *report], standalone_mode=False)
        cli.main([*start, str(where / "plain.onnx"), "--ranges", "minmax"], standalone_mode=False)
    names(said.getvalue(), where / "run.html")
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
    assert "--report" not in out
    names(out, "accuracy", "float", "smaller", "faster", "bit")  # the five questions
    losses = json.loads((folder / "run.json").read_text(encoding="utf-8"))["layers"]
    worst = max(losses, key=lambda row: row["loss_share"])
    names(out, f"{worst['layer']} ({worst['bits']})", "w4a4 to w8a8")


def test_explain_without_a_report_says_what_to_add(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = said_by(capsys, "explain", folder / "plain.onnx")
    assert code == 0
    told = [line for line in out.splitlines() if "--report" in line]
    assert len(told) == 2
    for line in told:
        names(line, "--model", "--data")
    options = ("--model", folder / "model.onnx", "-d", folder / "data.npz", "--question", "accuracy")
    code, out, _ = said_by(capsys, "explain", folder / "plain.onnx", *options)
    assert code == 0
    names(out, "w8a8", "--override")
    assert "smaller" not in out


def test_compare_prints_a_table_and_writes_csv(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = (folder / "plain.onnx", folder / "mixed.onnx", "-d", folder / "test.npz")
    table = folder.parent / "layers.csv"
    code, out, err = said_by(capsys, "compare", *files, "--model", folder / "model.onnx", "--csv", table)
    assert (code, err) == (0, "")
    names(out, "SQNR A, dB", "SQNR B, dB", "B - A, dB", "mixed.onnx")
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
    ("words", "code", "facts"),
    [
        ("explain none.onnx", 3, "none.onnx"),
        ("explain data.npz", 3, "data.npz ONNX"),
        ("explain plain.onnx --model model.onnx", 2, "--model --data"),
        ("explain plain.onnx -d data.npz", 2, "--data --model"),
        ("explain plain.onnx --report none.json", 4, "none.json"),
        ("explain plain.onnx --report run.html", 4, "run.json plain.onnx"),
        ("explain mixed.onnx --report run.json --model model.onnx -d data.npz", 2, "--report --model"),
        ("compare plain.onnx model.onnx -d none.npz", 4, "none.npz"),
        ("compare plain.onnx mixed.onnx -d data.npz --csv out.txt", 6, "out.txt .csv"),
        ("quantize model.onnx -c data.npz -o x.onnx --report x.pdf", 6, "x.pdf .html"),
        ("quantize model.onnx -c data.npz -o x.onnx --test-data test.npz", 2, "--test-data --report"),
    ],
)
def test_bad_input_is_one_sentence(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, words: str, code: int, facts: str
) -> None:
    monkeypatch.chdir(folder)
    found, out, err = said_by(capsys, *words.split())
    assert (found, out) == (code, "")
    one_error(err, *facts.split())
    assert not (folder / "x.onnx").exists()


def test_a_number_file_that_is_no_report_is_refused(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "other.json").write_text('{"format": "something else"}')
    code, _, err = said_by(capsys, "explain", folder / "plain.onnx", "--report", tmp_path / "other.json")
    assert code == 4
    one_error(err, tmp_path / "other.json")


def test_without_matplotlib_the_run_does_not_begin(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.chdir(folder)
    code, _, err = said_by(capsys, *["quantize", "model.onnx", "-c", "data.npz", "-o", "x.onnx", "--report", "x.html"])
    assert code == 6
    one_error(err, "matplotlib", "pip install 'onnxcalib[report]'")
    assert not (folder / "x.onnx").exists()
