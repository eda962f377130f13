"""The bounds on time and memory: what is kept and missed, and what is measured again; nothing here takes long."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from said import names

from models import conv_net, feed_for

TOOLS = Path(__file__).resolve().parents[1] / "tools"
sys.path.insert(0, str(TOOLS))
pytest.importorskip("matplotlib")
floor = pytest.importorskip("floor")
floor_lines = pytest.importorskip("floor_lines")
own_process = pytest.importorskip("own_process")
cluster = pytest.importorskip("cluster")

LINE = floor_lines.Line("plain", "net: wall time", 1.5, 1.5, "x", "3.0 s beside 2.0")
REPORTED = [{"seconds": each, "cpu": 2.0 * each, "MB": 100} for each in (10.0, 40.0, 12.0)]
ALONE = [{"seconds": each, "cpu": 2.0 * each, "MB": 80} for each in (30.0, 10.0, 8.0)]
Row = dict[str, float]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """The ways of quantizing that were measured, in their order; figures are those above."""
    done, rows = list[str](), {floor.REPORT: iter(REPORTED), floor.LIGHT: iter(ALONE)}

    def measure(kind: str, *_files: Path) -> Row:
        done.append(kind)
        return next(rows[kind])

    def given(*_: object) -> tuple[Path, Path]:
        return tmp_path / "net.onnx", tmp_path / "data.npz"

    monkeypatch.setattr(floor.floor_cost, "measured", measure)
    monkeypatch.setattr(floor.Bench, "given", given)
    return done


def rest(work: Path) -> list[str]:
    """The table's lines with figures."""
    return [line for line in (work / "floor.md").read_text().splitlines() if line.startswith("| ")][2:]


@pytest.mark.parametrize(
    ("figure", "at_least", "kept"),
    [(1.5, False, True), (1.501, False, False), (1.499, True, False), (1.5, True, True), (float("nan"), False, False)],
)
def test_a_bound_is_kept_or_missed_by_the_figure_itself(figure: float, at_least: bool, kept: bool) -> None:
    line = replace(LINE, figure=figure, at_least=at_least)
    assert line.kept is kept
    for told in (str(line), floor_lines.table([line])):
        assert ("kept" in told, "missed" in told) == (kept, not kept)
        names(told, "plain", "net: wall time", "at least" if at_least else "at most", "1.50 x", LINE.note)


def test_the_reports_share_is_of_medians_of_runs_that_take_turns(
    asked: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert floor.floor(tmp_path, tmp_path, ["report"]) == 0
    assert asked == [floor.LIGHT, floor.REPORT] * 3
    wall, cpu = rest(tmp_path)
    names(wall, "wall time", "20.0 %", "at most 30.0 %", "kept", "12.0 s beside 10.0")
    names(cpu, "CPU time", "20.0 %", "24.0 s beside 20.0")
    assert "".join((tmp_path / "floor.md").read_text()) in capsys.readouterr().out


def test_an_interrupted_run_goes_on_and_again_measures_one_part_anew(
    asked: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure = floor.floor_cost.measured

    def interrupted(kind: str, *files: Path) -> Row:
        if len(asked) == 3:
            raise KeyboardInterrupt
        return measure(kind, *files)

    monkeypatch.setattr(floor.floor_cost, "measured", interrupted)
    with pytest.raises(KeyboardInterrupt):
        floor.floor(tmp_path, tmp_path, ["report"])
    monkeypatch.setattr(floor.floor_cost, "measured", measure)
    floor.floor(tmp_path, tmp_path, ["report"])
    assert len(asked) == 6, "three before, three after"
    floor.floor(tmp_path, tmp_path, ["report"])
    assert len(asked) == 6
    kept = floor_lines.Kept(tmp_path / "floor.json")
    kept.measured("memory: net", lambda: {"MB": 1})
    monkeypatch.setattr(floor.floor_cost, "measured", lambda *_: asked.append("again") or ALONE[0])
    floor.floor(tmp_path, tmp_path, ["report"], again=True)
    assert asked[6:] == ["again"] * 6
    kept = floor_lines.Kept(tmp_path / "floor.json")
    assert kept.measured("memory: net", pytest.fail)["MB"] == 1


def test_a_damaged_file_of_measurements_is_named(tmp_path: Path) -> None:
    (tmp_path / "floor.json").write_text('{"plain')
    with pytest.raises(SystemExit, match=r"floor\.json"):
        floor.floor(tmp_path, tmp_path, ["plain"])
    assert (tmp_path / "floor.json").read_text() == '{"plain'


def test_what_is_missing_or_fails_is_a_sentence_and_the_rest_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_bench: floor.Bench) -> Iterator[floor_lines.Line]:
        raise own_process.FailedError("out of luck")

    def sound(bench: floor.Bench) -> Iterator[floor_lines.Line]:
        yield bench.line("net: memory", 1.0, 2.0, "GB")

    monkeypatch.setitem(floor.PARTS, "memory", [broken, sound])
    assert floor.floor(tmp_path, tmp_path, ["g2p", "plain"]) == 0
    said = capsys.readouterr().out
    names(said, "g2p_unrolled.onnx is missing", "imagenet_train512.npz is missing", "nudenet_320n.onnx is missing")
    assert floor.floor(tmp_path, tmp_path, ["memory"]) == 1
    names((tmp_path / "floor.md").read_text(), "out of luck", "net: memory", "1.00 GB", "kept")


@pytest.mark.parametrize(
    ("words", "fact"),
    [
        (("floor", "--part", "magic"), "magic"),
        (("light-resnet20", "--part", "plain"), "--part"),
        (("floor", "--steps", "3"), "--steps"),
        (("floor", "--row", "w4a4"), "--row"),
    ],
)
def test_a_part_that_is_none_and_options_without_effect_are_refused(
    words: tuple[str, ...], fact: str, tmp_path: Path
) -> None:
    command = [sys.executable, str(TOOLS / "benchmark.py"), "zoo", *words, "--work", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    names(done.stderr.splitlines()[-1], fact)


def test_growth_is_of_a_layer_and_of_memory_beyond_the_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(kind: str, layers: int, samples: int, _folder: Path) -> Row:
        own = 0.1 * layers if kind == floor.scaling.RUN else 0.2 * layers
        return {"seconds": 1.0, "cpu": 0.01 * layers + 1e-6 * samples**2, "MB": 100 + own}

    monkeypatch.setattr(floor.scaling, "measured", measure)
    floor.floor(tmp_path, tmp_path, ["chains"])
    layers, memory, samples, flat = rest(tmp_path)[:4]
    names(layers, "50 to 400 layers", "kept")
    names(memory, "35 of them the model's", "1.32 x", "missed")  # (180 - 35) / 110
    names(samples, "128 to 2,048 samples", "kept")
    names(flat, "1.00 x", "kept")


def test_a_process_tells_its_figures_or_its_last_words(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        f"import sys\nsys.path.insert(0, {str(TOOLS)!r})\nfrom own_process import tell\n"
        "tell(lambda: sum(range(10**6)) if sys.argv[1] == 'well' else sys.exit('out of luck'))\n"
    )
    row = own_process.measured(script, "well")
    assert row["cpu"] > 0
    assert row["MB"] > 5
    with pytest.raises(own_process.FailedError, match="out of luck"):
        own_process.measured(script, "badly")


def test_a_real_model_is_quantized_in_a_process_of_its_own(tmp_path: Path) -> None:
    model = conv_net()
    onnx.save(model, tmp_path / "net.onnx")
    np.savez(tmp_path / "data.npz", **feed_for(model, 8))
    row = floor.floor_cost.measured("plain", tmp_path / "net.onnx", tmp_path / "data.npz")
    assert row["seconds"] > 0
    assert row["MB"] > 20


def makespan(workers: int) -> float:
    """Four jobs of a second in two chunks."""
    captured = cluster.Captured({0: 0.5, 3: 0.25}, int(cluster.BANDWIDTH))
    return float(cluster.makespan([(0, 1.0), (0, 1.0), (3, 1.0), (3, 1.0)], captured, workers))


def test_a_schedule_counts_what_each_worker_captures_and_gets() -> None:
    latency = cluster.LATENCY
    assert makespan(1) == pytest.approx(1 + 0.5 + 0.25 + 4 + 4 * latency)
    assert makespan(2) == pytest.approx(1 + 0.5 + 0.25 + 2 + 2 * latency)
    assert makespan(4) == makespan(9) == pytest.approx(1 + 0.5 + 1 + latency)


def test_jobs_and_captures_of_a_real_run_are_those_of_two_stages(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = conv_net()
    onnx.save(model, tmp_path / "net.onnx")
    np.savez(tmp_path / "data.npz", **feed_for(model, 16))
    words = f"{tmp_path / 'net.onnx'} {tmp_path / 'data.npz'} --compression 0.9 --steps 1 --simulate-only"
    monkeypatch.setattr(sys, "argv", ["cluster.py", *words.split()])
    main: Callable[[], None] = cluster.main
    main()
    said = capsys.readouterr().out
    heads = [line.split()[0] for line in said.splitlines() if "capturing" in line]
    assert heads == ["parallel", "sensitivity"]
    assert [line.split()[0] for line in said.splitlines()][-len(cluster.WORKERS) :] == [
        str(workers) for workers in cluster.WORKERS
    ]
