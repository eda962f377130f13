"""Every command and the Python example of the README run as they stand, and the demo keeps its promise."""

from __future__ import annotations

import shlex
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from shown import ROOT, blocks, lines_of, run, stand_in, written_by

from models import feed_for
from onnxcalib import evaluate, quantize
from onnxcalib.cli.demo import CALIBRATION, MODEL, RECIPES, TEST

README = (ROOT / "README.md").read_text(encoding="utf-8")
COMMANDS = [line for line in lines_of(README, "sh") if line.startswith("onnxcalib ")]
PROGRAM = [sys.executable, "-m", "onnxcalib.cli.main"]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that looks like a checkout with fewer samples, for files that the commands write."""
    folder = tmp_path_factory.mktemp("readme")
    (folder / "models").mkdir()
    (folder / "models" / MODEL).symlink_to(ROOT / "models" / MODEL)
    for name, count in ((CALIBRATION, 64), (TEST, 500)):
        whole = np.load(ROOT / "models" / name)
        np.savez(folder / "models" / name, **{key: values[:count] for key, values in whole.items()})
    return folder


@pytest.mark.xdist_group("readme")
def test_commands_in_their_order(checkout: Path) -> None:
    assert len(COMMANDS) >= 8
    for command in COMMANDS:
        done = run([*PROGRAM, *shlex.split(command)[1:]], checkout)
        assert done.returncode == 0, f"{command}\n{done.stderr}"
    for name in written_by(COMMANDS):
        assert (checkout / name).stat().st_size > 0, name


@pytest.mark.xdist_group("readme")
def test_python_example(checkout: Path) -> None:
    (example,) = blocks(README, "python")
    done = run([sys.executable, "-c", example], checkout)
    assert done.returncode == 0, done.stderr


def test_demo_compares_its_files_with_float(tmp_path: Path) -> None:
    """On a small model in place of its own, which takes minutes to train."""
    model, folder = stand_in(), tmp_path / "models"
    folder.mkdir()
    onnx.save(model, folder / MODEL)
    np.savez(folder / CALIBRATION, **feed_for(model, 24))
    np.savez(folder / TEST, **feed_for(model, 20, seed=1), labels=np.arange(20) % 5)
    done = run([*PROGRAM, "demo", "--out", "out"], tmp_path)
    assert done.returncode == 0, done.stderr
    shown = [Path(line.split()[0]).name for line in done.stdout.splitlines() if ".onnx" in line]
    assert shown == [MODEL, *(f"{name}.onnx" for name in RECIPES)]
    assert all((tmp_path / "out" / name).stat().st_size > 0 for name in (*shown[1:], "report.html"))


def test_what_the_demo_does_improves_on_rounding(checkout: Path) -> None:
    model, calibration, test = (checkout / "models" / name for name in (MODEL, CALIBRATION, TEST))
    for name, recipe in RECIPES.items():
        short = recipe if recipe.steps is None else replace(recipe, steps=5)
        quantize(model, calibration, short, output=checkout / f"{name}.onnx")
    rows = evaluate([checkout / f"{name}.onnx" for name in RECIPES], test, model)
    eight, plain, light, advanced, mixed = (row.distillation_loss for row in rows)
    # Few steps on few samples may train nothing that is kept, or change no more than chance.
    assert eight < mixed < min(advanced, light)
    assert max(advanced, light) < 0.8 * plain
    assert rows[0].agreement > 98


def test_make_knows_the_targets_that_the_readme_names() -> None:
    for target in ("demo", "test"):
        assert f"`make {target}`" in README
        assert run(["make", "-n", target], ROOT).returncode == 0
