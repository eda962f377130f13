"""Lines of the benchmark's part `floor`: measured figures beside their bounds; measurements are kept in a file."""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onnxcalib.files import replacing
from onnxcalib.runtime.software import software

Row = dict[str, Any]
UNITS = {"x": "{:.2f} x", "%": "{:.1f} %", "GB": "{:.2f} GB", "s": "{:.1f} s", "passes": "{:.1f}", "cores": "{:.2f}"}


class MissingError(Exception):
    """Something to measure with is not there."""


@dataclass(frozen=True)
class Line:
    """One figure and what is asked of it."""

    part: str
    what: str
    figure: float
    bound: float
    unit: str
    note: str = ""
    at_least: bool = False

    @property
    def kept(self) -> bool:
        """Whether the bound holds; a figure that is no number holds none."""
        return self.figure >= self.bound if self.at_least else self.figure <= self.bound

    def cells(self) -> list[str]:
        """What tables show."""
        shown = UNITS[self.unit].format
        asked = f"{'at least' if self.at_least else 'at most'} {shown(self.bound)}"
        return [self.part, self.what, shown(self.figure), asked, "kept" if self.kept else "missed", self.note]

    def __str__(self) -> str:
        part, what, figure, asked, verdict, note = self.cells()
        return f"{part:9} {what}: {figure}, asked {asked}: {verdict}{f' ({note})' if note else ''}"


def table(lines: Sequence[Line]) -> str:
    """All lines in Markdown."""
    rows = [["part", "what", "measured", "asked", "", "from"], ["---"] * 6, *(line.cells() for line in lines)]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


class Kept:
    """Measurements by name; a file holds them, so that what was interrupted goes on."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._rows: dict[str, Row] = {}
        self._seen: dict[str, Row] = {}  # those that this run asked for
        if path.exists():
            try:
                self._rows = dict(json.loads(path.read_text(encoding="utf-8")))
            except ValueError as error:
                raise SystemExit(f"Error: {path} holds no measurements ({error}). Remove it.") from error

    def measured(self, name: str, measure: Callable[[], Row]) -> Row:
        """What was measured under a name, or is now."""
        if name not in self._rows:
            around = {"load": os.getloadavg()[0], **{key: software()[key] for key in ("runtime", "code")}}
            self._rows[name] = measure() | around
            self._write()
        self._seen[name] = self._rows[name]
        return self._rows[name]

    def forget(self, parts: Sequence[str]) -> None:
        """Drops what was measured for some parts."""
        self._rows = {name: row for name, row in self._rows.items() if name.split(":")[0] not in parts}
        self._write()

    def _write(self) -> None:
        with replacing(self._path) as path:
            path.write_text(json.dumps(self._rows, indent=1), encoding="utf-8")

    def circumstances(self) -> str:
        """Under what everything was measured that this run asked for."""
        if not self._seen:
            return "Nothing was measured."
        loads, runtimes, codes = (
            sorted({row[key] for row in self._seen.values()}) for key in ("load", "runtime", "code")
        )
        told = (
            f"Measured with {' and '.join(runtimes)} on {os.cpu_count()} cores, load {loads[0]:.1f} to {loads[-1]:.1f}."
        )
        if codes != [software()["code"]]:
            told += " Some of it was measured with other code than this: --again measures anew."
        return told


def medians(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The median of each figure over runs of one kind."""
    return {key: statistics.median(row[key] for row in rows) for key in ("seconds", "cpu", "MB")}
