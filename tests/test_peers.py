"""The comparison with other tools: its own parts, with stand-ins in place of tools, and nothing installed."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from said import names

from models import conv_net, feed_for

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))
pytest.importorskip("matplotlib")
peers = pytest.importorskip("peers")
peer_run = pytest.importorskip("peer_run")
peer_report = pytest.importorskip("peer_report")
Row = peer_report.Row

COPIES = """
    import json, pathlib, shutil, sys
    model, calibration, output, method, bits, steps = sys.argv[1:]
    with open("ran.txt", "a") as ran:
        ran.write(method + bits + " " + steps + "\\n")
    if method == "dies":
        sys.exit("out of luck")
    shutil.copy(model, output)
    said = {"version": "copier 1.0"}
    if method == "meddles":
        pathlib.Path(model).write_bytes(b"no model")
    if method == "damages":
        pathlib.Path(output).write_bytes(b"no model")
    if method == "refuses":
        said["error"] = "ValueError: four bits"
    pathlib.Path(output).with_suffix(".json").write_text(json.dumps(said))
"""


@pytest.fixture
def stand_ins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> peers.Part:
    """A small model, and a tool that copies it, in this very environment."""
    scripts = tmp_path / "scripts"
    scripts.mkdir()
    (scripts / "tool_copier.py").write_text(textwrap.dedent(COPIES))
    (scripts / "judge.py").write_text((peers.SCRIPTS / "judge.py").read_text())
    monkeypatch.setattr(peers, "SCRIPTS", scripts)
    monkeypatch.setattr(peers, "python_of", lambda _environment, _work: (Path(sys.executable), ""))
    rivals = {
        name: peers.Peer("copier", name, peers.STOCK, (peers.W8, peers.W4), 3 if name == "trains" else None)
        for name in ("copies", "trains", "dies", "damages", "refuses", "meddles")
    }
    monkeypatch.setattr(peers, "PEERS", rivals)
    model = conv_net()
    onnx.save(model, tmp_path / "model.onnx")
    np.savez(tmp_path / "calibration.npz", **feed_for(model, 4))
    labels = np.zeros(8, np.int64)
    np.savez(tmp_path / "test.npz", **feed_for(model, 8, seed=1), labels=labels)
    return peers.Part("net", tmp_path / "model.onnx", tmp_path / "calibration.npz", tmp_path / "test.npz")


def compared(part: peers.Part, tools: list[str], rows: peers.Rows, steps: int | None = None) -> dict:
    work = part.model.parent
    return {row.tool: row for row in peers.compare(part, tools, [peers.W8], rows, work, 60.0, steps)}


def ran(part: peers.Part) -> list[str]:
    return (part.model.parent / "files" / "ran.txt").read_text().splitlines()


def test_a_file_is_judged_beside_the_float_model(stand_ins: peers.Part, tmp_path: Path) -> None:
    rows = compared(stand_ins, ["copies"], peers.Rows(tmp_path / "rows.json"))
    row, source = rows["copies"], rows["float"]
    assert (row.agreement, row.top1, row.n, row.loads) == (100.0, source.top1, 8, True)
    assert row.bytes == stand_ins.model.stat().st_size
    assert row.version == "copier 1.0"
    assert row.cpu > 0
    assert row.latency > 0


@pytest.mark.parametrize(
    ("tool", "facts"),
    [
        ("dies", ("code 1", "out of luck")),
        ("damages", ("Does not run in stock onnxruntime",)),
        ("refuses", ("Failed", "four bits")),
    ],
)
def test_a_failing_tool_gets_its_row(stand_ins: peers.Part, tmp_path: Path, tool: str, facts: tuple) -> None:
    rows = peers.Rows(tmp_path / "rows.json")
    row = compared(stand_ins, [tool, "copies"], rows)[tool]
    names(row.note, *facts)
    assert row.top1 is None
    table = (tmp_path / "rows.md").read_text()
    names(table, tool, "copies", *facts)
    assert row.loads is (False if tool == "damages" else None)


def test_a_tool_that_changes_its_input_changes_a_copy(stand_ins: peers.Part, tmp_path: Path) -> None:
    before = stand_ins.model.read_bytes()
    rows = compared(stand_ins, ["meddles", "copies"], peers.Rows(tmp_path / "rows.json"))
    assert stand_ins.model.read_bytes() == before
    names(rows["meddles"].note, "changed its input")
    assert rows["copies"].note == ""


def test_rows_done_are_not_run_again(stand_ins: peers.Part, tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    before = compared(stand_ins, ["copies", "dies"], peers.Rows(path))
    again = peers.Rows(path)
    assert compared(stand_ins, ["copies", "dies", "trains"], again).keys() == {"trains"}
    assert {row.tool: row for row in again.rows.values()}["copies"] == before["copies"]
    assert ran(stand_ins) == ["copies8 0", "dies8 0", "trains8 3"]
    again.forget_failed()
    assert compared(stand_ins, ["copies", "dies"], again).keys() == {"dies"}
    assert compared(stand_ins, ["copies", "trains"], again, steps=7).keys() == {"trains"}
    assert ran(stand_ins)[-1] == "trains8 7"
    assert {each["tool"] for each in json.loads(path.read_text())} == {"float", "copies", "dies", "trains"}


def test_a_tool_that_cannot_be_installed_gets_its_row(
    stand_ins: peers.Part, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(command: list, **_: object) -> object:
        code = 1 if "pip" in command else 0
        return subprocess.CompletedProcess(command, code, "", "WARNING: a\nERROR: no wheel for it\nERROR: b")

    monkeypatch.setattr(peer_run.subprocess, "run", failing)
    monkeypatch.setattr(peers, "python_of", peer_run.python_of)
    rows = compared(stand_ins, ["copies"], peers.Rows(tmp_path / "rows.json"))
    names(rows["copies"].note, "Cannot be installed", "no wheel for it")


@pytest.mark.parametrize("forever", ["import time; time.sleep(60)", "while True: pass"])
def test_a_process_that_never_ends_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forever: str) -> None:
    monkeypatch.setattr(peer_run, "IDLE", 2.0 if "sleep" in forever else 1000.0)
    done = peer_run.measured([sys.executable, "-c", forever], tmp_path / "log", 0.5)
    assert done.stopped
    names(peers.last_words(done), "Stopped", "CPU seconds")


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="no such account of time here")
def test_the_bound_counts_the_cpu_time_of_children_and_not_the_wall_time(tmp_path: Path) -> None:
    child = "import time\nwhile time.process_time() < 30: pass"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    assert peer_run.measured([sys.executable, "-c", parent], tmp_path / "log", 0.7).stopped
    assert not peer_run.measured([sys.executable, "-c", "import time; time.sleep(1.5)"], tmp_path / "log", 1.0).stopped


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="no such account of memory here")
def test_memory_of_children_counts(tmp_path: Path) -> None:
    child = "x = bytearray(b'1') * 150_000_000; import time; time.sleep(1.5); sum(range(3_000_000))"
    parent = (
        f"import subprocess, sys; x = bytearray(b'1') * 150_000_000; subprocess.run([sys.executable, '-c', {child!r}])"
    )
    done = peer_run.measured([sys.executable, "-c", parent], tmp_path / "log", 60.0)
    assert done.code == 0
    assert done.peak > 300_000_000
    alone = peer_run.measured([sys.executable, "-c", child], tmp_path / "log", 60.0)
    assert alone.peak < 250_000_000


ROWS = [
    Row("net", "float", "float", 4, None, n=100, top1=90.0, agreement=100.0, bytes=4000, latency=1.0, loads=True),
    Row("net", "w8a8", "onnxcalib light", 4, None, "o 1", 100, 89.0, 98.0, 9.0, 8.0, 10**9, 1000, 0.5, True),
    Row("net", "w8a8", "swift", 4, None, "s 1", 100, 88.0, 99.0, 2.0, 1.0, 2 * 10**9, 1100, 0.7, True),
    Row("net", "w8a8", "broken", 4, None, cpu=0.5, bytes=10, loads=False, note="Does not | load"),
    Row("net", "w4a8, edges 8", "onnxcalib light", 4, None, "o 1", 100, 80.0, 85.0, 9.0, 8.0, 10**9, 700, 0.5, True),
]


def test_the_table_says_where_a_rival_wins_and_hides_nothing() -> None:
    lines = peer_report.table(ROWS).splitlines()
    cells = {line.split("|")[2].strip(): [cell.strip() for cell in line.split("|")] for line in lines[3:6]}
    assert cells["onnxcalib light"][3:10] == [
        "**89.00**",
        "98.00",
        "9.0",
        "8.0",
        "**1.00 GB**",
        "**1,000**",
        "**0.50**",
    ]
    assert cells["swift"][3:7] == ["88.00", "**99.00**", "2.0", "**1.0**"]
    assert cells["broken"][10:12] == ["no", "Does not / load"]
    (beaten,) = [line for line in lines if line.startswith("- ")]
    names(beaten, "agreement swift 99.00", "light 98.00", "CPU, s swift 1.0")
    assert "top-1" not in beaten
    assert "broken" not in beaten
    assert "- nowhere" in peer_report.table([row for row in ROWS if row.tool != "swift"])


def test_the_figure_has_a_panel_for_each_precision_with_files(tmp_path: Path) -> None:
    peer_report.figure(ROWS, tmp_path / "rows.png")
    assert (tmp_path / "rows.png").read_bytes().startswith(b"\x89PNG")
    peer_report.figure([replace(ROWS[3], loads=False)], tmp_path / "none.png")
    assert not (tmp_path / "none.png").exists()


def test_a_page_gets_table_figure_and_rows(tmp_path: Path) -> None:
    rows, page = peers.Rows(tmp_path / "rows.json"), tmp_path / "page.md"
    for row in ROWS:
        rows.add(row)
    page.write_text("# Before\n\n| model, bits | old |\n|---|---|\n\n- old\n\n![a](page.png)\n\nAfter\n")
    rows.into(page)
    text = page.read_text()
    assert text == f"# Before\n\n{peer_report.table(ROWS)}\n\n![a](page.png)\n\nAfter\n"
    assert peers.Rows(tmp_path / "page.json").rows == rows.rows
    assert (tmp_path / "page.png").exists()
    page.write_text("# No table")
    with pytest.raises(SystemExit, match="no table"):
        rows.into(page)
    assert page.read_text() == "# No table"


def test_either_a_folder_or_the_demo() -> None:
    done = subprocess.run([sys.executable, peers.__file__], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    names(done.stderr, "Error", "smoke")


def test_an_environment_is_installed_once_and_again_where_it_should_hold_another_thing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = list[str]()

    def run(command: list[str | Path], **_options: object) -> subprocess.CompletedProcess[str]:
        ran.append(str(command[-1]))
        (tmp_path / "tool").mkdir(exist_ok=True)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(peer_run.subprocess, "run", run)
    for version in ("1.0", "1.0", "2.0"):
        python, trouble = peer_run.python_of(peer_run.Environment("tool", ((f"tool=={version}",),)), tmp_path)
        assert (python, trouble) == (tmp_path / "tool" / "bin" / "python", "")
    assert [word for word in ran if word.startswith("tool==")] == ["tool==1.0", "tool==2.0"]
