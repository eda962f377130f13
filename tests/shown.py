"""What documents show: their code blocks, and running them as a reader would."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[1]


def blocks(text: str, language: str) -> list[str]:
    """The code blocks of a language in a Markdown text."""
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def lines_of(text: str, language: str) -> list[str]:
    """The lines of a language's code blocks, those joined that a backslash parts; without comments."""
    joined = "".join(blocks(text, language)).replace("\\\n", " ").splitlines()
    return [line for line in joined if line and not line.startswith("#")]


def written_by(commands: list[str]) -> list[str]:
    """The files that the commands say they write."""
    return re.findall(r"(?:-o|--output|--plot) (\S+)", "\n".join(commands))


def run(arguments: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """A program, in a folder."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(arguments, cwd=folder, env=environment, capture_output=True, text=True, check=False)
