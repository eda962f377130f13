"""Every command and every Python example of docs/ runs, for a reader whose model is a small one."""

from __future__ import annotations

import re
import shlex
import sys
import tomllib
from pathlib import Path

import numpy as np
import onnx
import pytest
from command_line import said_by
from PIL import Image
from shown import ROOT, blocks, lines_of, run, stand_in, written_by

from models import feed_for
from onnxcalib.recipe import KEYS, PRESETS, read_options
from onnxcalib.targets import TARGETS

PAGES = {path.stem: path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs").glob("*.md"))}
README = (ROOT / "README.md").read_text(encoding="utf-8")
FOREIGN = ("olive", "optimum")  # need packages that few have, and have a test file of their own
RUN = [name for name, text in PAGES.items() if name not in FOREIGN and (blocks(text, "bash") or blocks(text, "python"))]
LANGUAGES = {"bash", "python", "toml", "text"}
CLASSES = 5


@pytest.fixture
def reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a reader: a model, images to calibrate with, and a folder of test images for each class."""
    model = stand_in()
    for name in ("model.onnx", "mobilenet_v2.onnx"):
        onnx.save(model, tmp_path / name)
    np.savez(tmp_path / "calibration.npz", **feed_for(model, 24))
    rng = np.random.default_rng(0)
    for place in range(24 + 4 * CLASSES):
        kind = f"test/class_{place % CLASSES}" if place >= 24 else "calibration"
        (tmp_path / kind).mkdir(parents=True, exist_ok=True)
        pixels = rng.integers(0, 256, (12, 12, 3), np.uint8)
        Image.fromarray(pixels).save(tmp_path / kind / f"{place}.png")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def assert_runs(text: str, reader: Path, capsys: pytest.CaptureFixture[str]) -> None:
    commands = [line for line in lines_of(text, "bash") if not line.startswith("pip install ")]
    for command in commands:
        program, *words = shlex.split(command)
        assert program == "onnxcalib", command
        code, _, said = said_by(capsys, *words)
        assert code == 0, f"{command}\n{said}"
    for name in written_by(commands):
        assert (reader / name).stat().st_size > 0, name


def test_the_readme_is_right_about_your_own_model(reader: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert len(lines_of(README, "bash")) == 3
    assert_runs(README, reader, capsys)
    assert (reader / "small.html").stat().st_size > 0


@pytest.mark.parametrize("page", RUN)
def test_a_page_runs(page: str, reader: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert_runs(PAGES[page], reader, capsys)
    code = "\n".join(blocks(PAGES[page], "python"))
    if code:
        # A process of its own: a page may teach the toolkit a target or a gradient.
        done = run([sys.executable, "-c", code], reader)
        assert done.returncode == 0, done.stderr


def test_nothing_is_shown_that_nobody_runs() -> None:
    assert {"index", "tutorial", "how-it-works", "targets", "recipes", "api", "faq", "extending", "peers"} <= set(PAGES)
    for name, text in PAGES.items():
        # These pages have test files of their own.
        own = {"targets": {"sh"}, "olive": {"json"}}.get(name, set())
        assert set(re.findall(r"^```(\w*)$", text, re.MULTILINE)) <= LANGUAGES | own | {""}, name
        assert text.count("\n```") % 2 == 0, name


def test_what_is_to_be_installed_exists() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    texts = [README, *PAGES.values()]
    lines = [line for text in texts for line in lines_of(text, "bash") if line.startswith("pip install ")]
    assert lines
    for line in lines:
        assert set(re.search(r"\[(.*?)\]", line)[1].split(",")) <= set(extras), line


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    for link in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", PAGES[page]):
        if not link.startswith("https://"):
            assert (ROOT / "docs" / link).exists(), link


def test_recipes_in_the_docs_are_recipes(tmp_path: Path) -> None:
    shown = [block for name, text in PAGES.items() if name != "targets" for block in blocks(text, "toml")]
    assert shown
    for block in shown:
        (tmp_path / "recipe.toml").write_text(block)
        assert read_options(tmp_path / "recipe.toml")


def test_the_pages_name_all_there_is() -> None:
    for page, names in (("recipes", {*KEYS, *PRESETS}), ("targets", TARGETS)):
        assert [name for name in names if f"`{name}`" not in PAGES[page]] == []
