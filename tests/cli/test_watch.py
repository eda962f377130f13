"""What a command shows: nothing to a file, a log to a bug report, events to a program."""

from __future__ import annotations

import io
import json
import platform
from pathlib import Path

import onnx
import pytest
from command_line import case_in, said_by
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn
from said import names

from onnxcalib.cli.watch import Watch
from onnxcalib.progress import Event


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return case_in(tmp_path_factory.mktemp("watch"), 32)


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
    assert [end["stage"] for end in ends] == [
        "equalization",
        "statistics",
        "ranges",
        "output noise",
        "sensitivity",
        "allocation",
        "batch norm",
        "output noise",
    ]
    assert ends[1]["found"]["samples"] == 32
    assert {"before", "after", "rounds"} <= set(ends[-2]["found"])
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
    names(err, f"python: {platform.python_version()}", f"onnx: {onnx.__version__}", "runtime: onnxruntime")
    names(err, "stem", "depth", 'pipeline = "light"', "statistics", "sensitivity", "rounds")
    assert "run directory" not in err
    code, out, err = said_by(capsys, *light(folder, tmp_path / "small.onnx"), "-v")
    names(err, "run directory", "equalization, statistics, ranges, output noise, sensitivity, allocation, batch norm")


def test_quiet_otherwise(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = said_by(capsys, *light(folder, tmp_path / "small.onnx"))
    assert (code, out) == (0, "")
    lines = err.splitlines()
    assert len(lines) == 7
    names(lines[1], "equalization")
    names(lines[-2], "lost", "y", "dB")
    names(lines[-1], "next", "onnxcalib")
    code, _out, err = said_by(capsys, *light(folder, tmp_path / "small.onnx"), "-v", "--json")
    assert code == 2
    names(err, "--verbose", "--json")


def test_show(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "kept"
    assert said_by(capsys, *light(folder, tmp_path / "small.onnx"), "--run-dir", run)[0] == 0
    assert {path.name for path in tmp_path.iterdir()} == {"small.onnx", "kept"}
    damaged = next((run / "values").glob("allocation*"))
    damaged.write_bytes(b"")
    code, out, _err = said_by(capsys, "runs", "show", run)
    assert code == 0
    names(out, folder / "model.onnx", folder / "data.npz", 'bits = ["w4a4", "w8a8"]', damaged)
    rows = {line.split()[0]: line.split() for line in out.splitlines() if line}
    assert rows["statistics"][1:4] == ["finished", "1", "0"]
    assert "allocation" not in rows
    assert said_by(capsys, "runs", "show", tmp_path / "none")[0] == 6
    assert said_by(capsys, "runs", "show", folder)[0] == 6


def test_bars_on_a_terminal() -> None:
    screen = Console(file=io.StringIO(), force_terminal=True, width=100)
    with Progress(TextColumn("{task.description}"), MofNCompleteColumn(), console=screen) as bar:
        watch = Watch(bar)

        def shown() -> dict[str, tuple[float, float | None]]:
            return {task.description: (task.completed, task.total) for task in bar.tasks}

        watch.event(Event("stage_start", {"stage": "statistics"}))
        assert shown() == {"statistics": (0, None)}  # it moves, but nobody knows yet how far
        watch("calibrate", 5, 50)
        assert shown() == {"calibrate": (5, 50)}
        watch.event(Event("stage_end", {"stage": "statistics"}))
        assert shown() == {"calibrate": (5, 5)}
        watch.event(Event("stage_start", {"stage": "allocation"}))
        watch.event(Event("stage_end", {"stage": "allocation"}))
        assert shown() == {"calibrate": (5, 5), "allocation": (1, 1)}
        watch("calibrate", 2, 50)  # of the next model
        assert shown()["calibrate"] == (2, 50)
        watch.event(Event("resumed", {"reused": ["statistics", "2 of 9 layers of parallel training"]}))
    names(screen.file.getvalue(), "2 of 9 layers of parallel training")
