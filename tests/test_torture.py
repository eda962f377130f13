"""tools/torture.py on a small model with a few kills and a full disk."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
from command_line import case_in

TOOL = Path(__file__).parents[1] / "tools" / "torture.py"
RECIPE = ("--pipeline", "light", "--bits", "w4a4,w8a8", "--compression", "0.6", "--ranges", "minmax")


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    """The tool as a module."""
    spec = importlib.util.spec_from_file_location("torture", TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["torture"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_killed_and_on_a_full_disk(
    tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "inputs").mkdir()
    case = tool.Case(case_in(tmp_path / "inputs", 16), RECIPE)
    monkeypatch.setattr(tool, "can_mount", lambda _folder: False)  # a limit on files works for everybody
    assert tool.torture(case, tmp_path, kills=3, disks=1) == []
    said = capsys.readouterr().out
    assert said.count("the same bytes") >= 2
    assert "3 kills, 1 full disks" in said


def test_breaches_are_told(tool: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "inputs").mkdir()
    case = tool.Case(case_in(tmp_path / "inputs", 4), RECIPE)
    case.whole = b"whole"
    assert case.breaches(tmp_path, ended=True) == []
    (tmp_path / tool.OUTPUT).write_bytes(b"who")
    (tmp_path / ".out.onnx.part").touch()
    case.model.write_bytes(b"")
    assert len(case.breaches(tmp_path, ended=True)) == 3
