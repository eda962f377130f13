"""Every command and the Python example of the README run as they stand."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest
from shown import ROOT, blocks, lines_of, run, written_by

README = (ROOT / "README.md").read_text(encoding="utf-8")
COMMANDS = [line for line in lines_of(README, "sh") if line.startswith("onnxcalib ")]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that looks like a checkout, for files that the commands write."""
    folder = tmp_path_factory.mktemp("readme")
    (folder / "models").symlink_to(ROOT / "models", target_is_directory=True)
    return folder


@pytest.mark.xdist_group("readme")
def test_commands_in_their_order(checkout: Path) -> None:
    assert len(COMMANDS) >= 8
    for command in COMMANDS:
        done = run([sys.executable, "-m", "onnxcalib.cli.main", *shlex.split(command)[1:]], checkout)
        assert done.returncode == 0, f"{command}\n{done.stderr}"
    for name in written_by(COMMANDS):
        assert (checkout / name).stat().st_size > 0, name


@pytest.mark.xdist_group("readme")
def test_python_example(checkout: Path) -> None:
    (example,) = blocks(README, "python")
    done = run([sys.executable, "-c", example], checkout)
    assert done.returncode == 0, done.stderr


def test_demo_improves_on_rounding(tmp_path: Path) -> None:
    done = run([sys.executable, "-m", "onnxcalib.cli.main", "demo", "--out", str(tmp_path)], ROOT)
    assert done.returncode == 0, done.stderr
    rows = {line.split()[0].rsplit("/", 1)[-1]: line.split() for line in done.stdout.splitlines() if ".onnx" in line}
    loss = {name: float(row[5]) for name, row in rows.items()}
    top1 = {name: float(row[2]) for name, row in rows.items()}
    assert loss["w4a4_light.onnx"] < loss["w4a4_plain.onnx"]
    assert loss["w4a4_advanced.onnx"] < loss["w4a4_light.onnx"]
    assert loss["mixed_advanced.onnx"] < loss["w4a4_advanced.onnx"]
    assert top1["w8a8_plain.onnx"] > top1["fashion_mobilenet.onnx"] - 0.5


def test_make_knows_the_targets_that_the_readme_names() -> None:
    for target in ("demo", "test"):
        assert f"`make {target}`" in README
        assert run(["make", "-n", target], ROOT).returncode == 0
