"""Studies of curves, calibration sizes, judging and constants: files and tables, mostly with stand-ins."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from jobs import correlated_data

from models import conv_net
from onnxcalib.algorithms.reconstruction import end_to_end
from onnxcalib.model import model_loss

ROOT = Path(__file__).resolve().parents[1]
TOOLS = ROOT / "tools"
sys.path.insert(0, str(TOOLS))
pytest.importorskip("matplotlib")
curves = pytest.importorskip("curves")
calibration_size = pytest.importorskip("calibration_size")
training_constants = pytest.importorskip("training_constants")

POINT = curves.Point("net", "light", 0.15, 512, None, 2000, 250, 0.25, 70.5, 88.25, 3.5)
RUN = calibration_size.Run("light", 64, 0, None, 10000, 91.0, 96.5, 2.25)


def test_points_come_back_from_the_file_and_are_known_again(tmp_path: Path) -> None:
    path = tmp_path / "curve.csv"
    points = [POINT, replace(POINT, method="advanced", steps=12), replace(POINT, method="greedy-accuracy", asked=0.2)]
    for point in points:
        curves.Curve(path).add(point)
    again = curves.Curve(path)
    assert [point.method for point in again.points] == ["greedy-accuracy", "light", "advanced"]
    assert set(again.points) == set(points)
    assert all(point.key in again for point in points)
    assert replace(POINT, method="advanced").key not in again, "other steps are another point"


def test_a_curve_is_drawn_with_its_float_line(tmp_path: Path) -> None:
    points = [replace(POINT, method="float", asked=1.0), POINT, replace(POINT, asked=0.2, top1=71.0)]
    curves.draw(points, tmp_path / "curve.png")
    assert (tmp_path / "curve.png").stat().st_size > 5000


def test_runs_come_back_with_mean_and_deviation(tmp_path: Path) -> None:
    runs = [RUN, replace(RUN, seed=1, top1=92.0), replace(RUN, images=1, top1=80.0), replace(RUN, method="plain")]
    path = tmp_path / "runs.csv"
    calibration_size.write(runs, path)
    assert list(calibration_size.read(path)) == runs
    assert path.with_suffix(".md").read_text() == (
        "| top-1 | 1 image | 64 images |\n| --- | --- | --- |\n"
        "| light | 80.00 ± 0.00 | 91.50 ± 0.71 |\n| plain |  | 91.00 ± 0.00 |\n"
    )
    calibration_size.draw(runs, path.with_suffix(".png"))
    assert path.with_suffix(".png").stat().st_size > 5000


@pytest.mark.parametrize("method", calibration_size.METHODS)
def test_every_method_is_asked_for_four_bits_and_by_its_seed(method: str) -> None:
    recipe = calibration_size.recipe_of(method, 3, 7)
    assert ([str(each) for each in recipe.bits], recipe.edge_bits, recipe.seed) == (["w4a4"], 8, 3)
    assert recipe.training.steps == (7 if method in ("advanced", "adaround", "end-to-end") else recipe.training.steps)


@pytest.mark.parametrize("tool", ["curves.py", "calibration_size.py"])
def test_an_unknown_method_is_named(tool: str, tmp_path: Path) -> None:
    command = [sys.executable, str(TOOLS / tool), "zoo", *(["resnet20"] if tool == "curves.py" else [])]
    command += ["--work", str(tmp_path), "--out", str(tmp_path), "--method", "magic"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "magic" in done.stderr


def study_of(tool: str, folder: Path) -> list[str]:
    """The command of a tool on a small network with forty samples."""
    onnx.save(conv_net(), folder / "net.onnx")
    np.savez(folder / "data.npz", **correlated_data(conv_net(), 40))
    return [sys.executable, str(TOOLS / tool), *(str(folder / it) for it in ("net.onnx", "data.npz"))]


def test_plans_are_judged_by_all_three_sets_of_samples(tmp_path: Path) -> None:
    """Where samples are no images, their forms are what they are."""
    command = study_of("judging.py", tmp_path)
    done = subprocess.run(
        [*command, "--calibrate", "24", "--steps", "1"], capture_output=True, text=True, check=True
    ).stdout
    heading, _, begun, trained = done.splitlines()
    assert "16 unseen" in heading
    start, *_ = (float(each) for each in begun.strip("| ").split(" | ")[1:2])
    steps, alone, forms, kept, unseen = trained.strip("| ").split(" | ")
    before, after, doubt = (float(each) for each in re.findall(r"[0-9.]+", forms))
    assert (steps, before, after) == ("1 steps", start, float(alone))
    assert kept == ("yes" if after <= before + doubt else "no")
    assert float(unseen) != float(alone)
    few = subprocess.run([*command, "--calibrate", "40"], capture_output=True, text=True, check=False)
    assert few.returncode == 1
    assert "data.npz" in few.stderr


def test_one_constant_is_changed_for_as_long_as_a_training_takes() -> None:
    before = {name: getattr(end_to_end, name) for name in ("END_TO_END", "FINAL_SCALES", "HINT_SHARE", "SHRINK")}
    seen = {}
    for name, change in training_constants.CHANGES.items():
        with training_constants.changed(change):
            seen[name] = (*(getattr(end_to_end, each) for each in before), model_loss.TEMPERATURE)
    assert {name: getattr(end_to_end, name) for name in before} == before
    assert seen["as it is"] == (*before.values(), model_loss.TEMPERATURE)
    same = [name for name in seen if seen[name] == seen["as it is"]]
    assert same == ["as it is", "steps x 0.5", "steps x 2"]
    early, late, *_ = seen["scales x 3"]
    assert (early.scale, late.scale) == (pytest.approx(3 * before["END_TO_END"].scale), None)


def test_each_change_is_measured_once_and_compared_with_none(tmp_path: Path) -> None:
    onnx.save(conv_net(), tmp_path / "net.onnx")
    np.savez(tmp_path / "data.npz", **correlated_data(conv_net(), 40))
    command = [sys.executable, str(TOOLS / "training_constants.py"), str(tmp_path / "net.onnx"), "--calibrate", "24"]
    command += [str(tmp_path / "data.npz"), "--out", str(tmp_path / "rows.csv"), "--steps", "1", "--change", "as it is"]
    told = [
        subprocess.run([*command, *more], capture_output=True, text=True, check=True).stdout
        for more in ((), ("--change", "weights x 3"))
    ]
    assert "net start" in told[0]
    assert "net start" not in told[1]
    rows = training_constants.read(tmp_path / "rows.csv")
    assert [row.change for row in rows] == ["start", "as it is", "weights x 3"]
    assert len({row.loss for row in rows}) == 3
    assert {row.unseen for row in rows} == {16}
    assert re.search(r"\| weights x 3 \| [0-9.]+ \([+-]\d+ %\), ", told[1])


def test_candidates_of_every_kind_are_judged_at_every_size(tmp_path: Path) -> None:
    onnx.save(conv_net(), tmp_path / "net.onnx")
    np.savez(tmp_path / "data.npz", **correlated_data(conv_net(), 40))
    command = [
        sys.executable,
        str(TOOLS / "candidate_tables.py"),
        str(tmp_path / "net.onnx"),
        str(tmp_path / "data.npz"),
    ]
    options = ["--calibrate", "24", "--bits", "w2a4,w8a8", "--size", "0.9", "--size", "0.48", "--steps", "1"]
    done = subprocess.run([*command, *options], capture_output=True, text=True, check=True).stdout
    heading, _, *rows = done.splitlines()
    assert "n = 16" in heading
    cells = [row.strip("| ").split(" | ") for row in rows]
    assert [(kind, size) for kind, size, *_ in cells] == [
        (kind, size) for kind in ("nearest", "second-order", "trained") for size in ("0.9", "0.48")
    ]
    assert all(float(loss) > 0 for _, _, loss, *_ in cells)
    large, small = ([int(cell[4].replace(",", "")) for cell in cells if cell[1] == size] for size in ("0.9", "0.48"))
    assert all(one != other for one, other in zip(small, large, strict=True)), "other bits are assigned"


def test_points_of_a_method_leave_out_sizes_that_it_does_not_reach(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The others are made and measured as if it had not been asked for them."""
    folder = ROOT / "models"
    names = ("fashion_mobilenet.onnx", "fashion_calibration.npz", "fashion_test.npz")
    model, calibration, test = (folder / name for name in names)
    case = curves.Case("net", model, calibration, test)
    few = replace(case, calibration=curves.fewer(case, 16, tmp_path))
    measuring = curves.Measuring(few, tmp_path)
    first, second = measuring.points("integer-program", [0.01, 0.2, 0.24])
    assert (first.asked, second.asked, first.images, first.n) == (0.2, 0.24, 16, 2000)
    assert first.of_float < second.of_float < 0.3
    assert first.bytes == round(first.of_float * model.stat().st_size)
    assert "at 0.010" in capsys.readouterr().out
    assert list(measuring.points("integer-program", [0.01])) == []


def test_equalization_is_measured_beside_none_of_it(tmp_path: Path) -> None:
    command = study_of("equalizing.py", tmp_path)
    done = subprocess.run(
        [*command, "--calibrate", "24", "--bits", "w8a4"], capture_output=True, text=True, check=True
    ).stdout
    heading, _, *rows = ([cell.strip() for cell in line.strip("|\n ").split("|")] for line in done.splitlines())
    assert "n = 16" in heading[0]
    assert [row[2] for row in rows] == ["none", "before depthwise layers", "all"]
    assert [int(row[-1]) for row in rows] == [0, 0, 4], "nothing is read by depthwise layers alone"
    assert rows[0][3] == rows[1][3] != rows[2][3]
