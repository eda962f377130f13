"""docs/targets.md: its commands run as they stand, and its tables know every target and key."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from command_line import said_by

from onnxcalib.targets import NAMES, find_target
from onnxcalib.targets.reading import KEYS

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "docs" / "targets.md").read_text(encoding="utf-8")
COMMANDS = [
    line
    for block in re.findall(r"```sh\n(.*?)```", TEXT, re.DOTALL)
    for line in block.splitlines()
    if line.startswith("onnxcalib ")
]


def test_the_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "models").symlink_to(ROOT / "models", target_is_directory=True)
    monkeypatch.chdir(tmp_path)
    symmetric, own = re.findall(r"```toml\n(.*?)```", TEXT, re.DOTALL)
    Path("symmetric.toml").write_text(symmetric, encoding="utf-8")
    assert find_target("symmetric.toml").weight_scheme(4).symmetric
    Path("my.toml").write_text(own, encoding="utf-8")
    assert len(COMMANDS) == 8
    for command in COMMANDS:
        code, _, said = said_by(capsys, *shlex.split(command)[1:])
        assert code == 0, f"{command}\n{said}"
    assert Path("vitis.onnx").stat().st_size > 0
    assert Path("mine.onnx").stat().st_size > 0


def test_the_tables_are_complete() -> None:
    for name in NAMES:
        (row,) = re.findall(rf"^\| `{name}` .*$", TEXT, re.MULTILINE)
        assert f"| {find_target(name).bias} |" in row
    keys = set(re.findall(r"`(\w+\.\w+)`", TEXT))
    assert {key for key in KEYS if "." in key} <= keys
