"""The command as a person runs it, in a process of its own or in this one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest

from models import conv_net, feed_for, run
from onnxcalib.cli.main import main

COMMAND = [sys.executable, "-m", "onnxcalib"]
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}


def case_in(where: Path, samples: int, tested: int = 0) -> Path:
    """A folder with a model, its calibration data, and test data that the model is always right about."""
    model = conv_net()
    onnx.save(model, where / "model.onnx")
    np.savez(where / "data.npz", **feed_for(model, samples))
    if tested:
        test = feed_for(model, tested, seed=1)
        np.savez(where / "test.npz", **test, labels=run(model, test)["y"].argmax(axis=1))
    return where


def call(*arguments: str | Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own."""
    words = [*COMMAND, *map(str, arguments)]
    return subprocess.run(words, capture_output=True, text=True, cwd=cwd, env=ENVIRONMENT, timeout=120, check=False)


def said_by(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, str, str]:
    """The command in this process, which starts sooner: its exit code and what it printed."""
    before = sys.argv
    sys.argv = ["onnxcalib", *map(str, arguments)]
    try:
        main()
        code = 0
    except SystemExit as stop:
        code = int(stop.code or 0)
    finally:
        sys.argv = before
    printed = capsys.readouterr()
    return code, printed.out, printed.err
