"""Where training spills its tensors."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for temporary files, that must be empty at the end."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path
