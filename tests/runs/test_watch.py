"""What a command shows: nothing to a file, a log to a bug report, events to a program."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from command_line import said_by

from models import conv_net, feed_for


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("watch")
    onnx.save(conv_net(), where / "model.onnx")
    np.savez(where / "data.npz", **feed_for(conv_net(), 32))
    return where


def light(folder: Path, output: Path) -> list[str | Path]:
    options = ["--pipeline", "light", "--bits", "w4a4,w8a8", "--compression", "0.6", "--ranges", "minmax"]
    return ["quantize", folder / "model.onnx", "-c", folder / "data.npz", "-o", output, *options]


def test_events_for_programs(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "small.onnx"
    code, out, err = said_by(capsys, *light(folder, output), "--json")
    assert (code, err) == (0, "")
    events = [json.loads(line) for line in out.splitlines()]
    names = [event["event"] for event in events]
    assert names[0] == "start"
    assert names[-1] == "result"
    assert events[0]["layers"] == ["stem", "depth", "project", "head", "fc"]
    ends = [event for event in events if event["event"] == "stage_end"]
    assert [end["stage"] for end in ends] == ["statistics", "ranges", "sensitivity", "allocation", "batch norm"]
    assert ends[0]["found"]["samples"] == 32
    assert {"before", "after", "rounds"} <= set(ends[-1]["found"])
    assert any(event["event"] == "progress" and event["done"] == event["total"] for event in events)
    assert events[-1]["bytes"] == output.stat().st_size
    assert events[-1]["output"] == str(output)
    assert set(events[-1]["bits"]) == {"stem", "depth", "project", "head", "fc"}
    assert set(events[-1]["bits"].values()) <= {"w4a4", "w8a8"}


def test_an_error_is_an_event_too(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [*light(folder, tmp_path / "small.onnx"), "--json", "--pin", "nothing*=w8a8"]
    code, out, err = said_by(capsys, *words)
    last = json.loads(out.splitlines()[-1])
    assert code == 2
    assert last["event"] == "error"
    assert last["exit_code"] == 2
    assert err == f"Error: {last['message']}\n"


def test_a_log_for_bug_reports(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = said_by(capsys, *light(folder, tmp_path / "small.onnx"), "-v")
    assert (code, out) == (0, "")
    for words in ("python: 3.", f"onnx: {onnx.__version__}", "runtime: onnxruntime", "layers: 5: stem, depth",
                  'pipeline = "light"; bits', "statistics begins", "sensitivity: ", "rounds"):  # fmt: skip
        assert words in err, words
    code, out, err = said_by(capsys, *light(folder, tmp_path / "small.onnx"), "-v")
    assert "statistics: taken from the run directory; tensors" in err
    assert "resumed: statistics, ranges, sensitivity, allocation, batch norm" in err


def test_quiet_otherwise(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = said_by(capsys, *light(folder, tmp_path / "small.onnx"))
    assert (code, out) == (0, "")
    assert len(err.splitlines()) == 3
    code, _out, err = said_by(capsys, *light(folder, tmp_path / "small.onnx"), "-v", "--json")
    assert code == 2
    assert "--verbose has no effect with --json" in err


def test_show(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "kept"
    assert said_by(capsys, *light(folder, tmp_path / "small.onnx"), "--run-dir", run)[0] == 0
    assert {path.name for path in tmp_path.iterdir()} == {"small.onnx", "kept"}
    damaged = next((run / "values").glob("allocation*"))
    damaged.write_bytes(b"")
    code, out, _err = said_by(capsys, "runs", "show", run)
    assert code == 0
    assert f"model     {folder / 'model.onnx'}" in out
    assert f"data      {folder / 'data.npz'}" in out
    assert 'bits = ["w4a4", "w8a8"]' in out
    rows = {line.split()[0]: line.split() for line in out.splitlines() if line}
    assert rows["statistics"][1:4] == ["finished", "1", "0"]
    assert "allocation" not in rows
    assert f"damaged: {damaged}" in out
    assert said_by(capsys, "runs", "show", tmp_path / "none")[0] == 6
    assert said_by(capsys, "runs", "show", folder)[0] == 6
