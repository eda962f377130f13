"""What a run directory holds, in rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from onnxcalib.cache.folder import read_about
from onnxcalib.cache.store import Store


@dataclass
class StageRow:
    """The values of one stage."""

    stage: str
    values: int = 0
    parts: int = 0
    bytes: int = 0
    when: str = ""

    @property
    def state(self) -> str:
        """How far the stage came."""
        return "finished" if self.values else "begun" if self.parts else "-"

    def add(self, header: dict[str, Any], size: int) -> None:
        """Counts one value."""
        if "part_of" in header:
            self.parts += 1
        else:
            self.values += 1
        self.bytes += size
        self.when = max(self.when, header["when"])


@dataclass(frozen=True)
class Shown:
    """A run directory: what it is about, its stages, and what else lies there."""

    about: dict[str, Any]
    stages: dict[str, StageRow]
    others: StageRow = field(default_factory=lambda: StageRow("of other models, data or versions"))
    damaged: list[Path] = field(default_factory=list)


def show(folder: Path, stages: Sequence[str]) -> Shown:
    """Reads and checks everything in the directory."""
    about = read_about(folder)
    shown = Shown(about, {stage: StageRow(stage) for stage in stages})
    for entry in Store(folder / "values").entries():
        if entry.header is None:
            shown.damaged.append(entry.path)
            continue
        own = entry.header["about"] == about["about"]
        stage = entry.header.get("part_of", entry.header["stage"])
        row = shown.stages.setdefault(stage, StageRow(stage)) if own else shown.others
        row.add(entry.header, entry.bytes)
    return shown
