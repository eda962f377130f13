"""The table and the figure of tools/peers.py, from its rows alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

OURS = "onnxcalib"
LEAST_SPAN = 3.0  # points of top-1 in a panel: less would show noise as if it were distance


@dataclass(frozen=True)
class Row:
    """What became of one model by one tool; without figures where the note says why."""

    part: str
    bits: str
    tool: str
    samples: int  # for calibration
    steps: int | None  # of methods that train; 0: the tool's default
    version: str = "-"
    n: int | None = None  # test images
    top1: float | None = None
    agreement: float | None = None
    wall: float | None = None  # seconds
    cpu: float | None = None
    peak: int | None = None  # bytes of memory
    bytes: int | None = None
    latency: float | None = None  # beside float
    loads: bool | None = None
    note: str = ""

    @property
    def key(self) -> tuple[Any, ...]:
        """What makes a row the same row."""
        return self.part, self.bits, self.tool, self.samples, self.steps

    @property
    def ours(self) -> bool:
        """By onnxcalib."""
        return self.tool.startswith(OURS)


@dataclass(frozen=True)
class Column:
    """A figure of a row, how it is written, and which way it is better."""

    head: str
    field: str
    text: Callable[[Any], str]
    most: bool = False  # the most is best

    def of(self, row: Row) -> Any:
        """The row's figure, None where there is none."""
        return getattr(row, self.field)

    def best(self, rows: Iterable[Row]) -> Row | None:
        """The row with the best figure, of files that load and are no float model."""
        having = [row for row in rows if self.of(row) is not None and row.loads and row.bits != "float"]
        return max(having, key=lambda row: self.of(row) if self.most else -self.of(row)) if having else None


def _seconds(value: float) -> str:
    return f"{value:.1f}" if value < 10 else f"{value:.0f}"


COLUMNS = (
    Column("top-1", "top1", "{:.2f}".format, most=True),
    Column("agreement", "agreement", "{:.2f}".format, most=True),
    Column("wall, s", "wall", _seconds),
    Column("CPU, s", "cpu", _seconds),
    Column("peak memory", "peak", lambda value: f"{value / 1e9:.2f} GB"),
    Column("bytes", "bytes", "{:,}".format),
    Column("latency / float", "latency", "{:.2f}".format),
)
JUDGED = tuple(column for column in COLUMNS if column.field != "wall")  # other work on the machine is in that


def groups(rows: Iterable[Row]) -> list[tuple[tuple[str, str], list[Row]]]:
    """The rows by model and bits, float first, then the most bits; onnxcalib stands before the others."""

    def place(row: Row) -> tuple[Any, ...]:
        bits = 0 if row.bits == "float" else -int(row.bits[1])
        return row.part, bits != 0, bits, *_order(row)

    return [(key, list(found)) for key, found in groupby(sorted(rows, key=place), key=lambda row: (row.part, row.bits))]


def _order(row: Row) -> tuple[bool, str]:
    return not row.ours, row.tool.lower()


def table(rows: Iterable[Row]) -> str:
    """Markdown: a table, the best of each column bold in each group, then where another tool beats onnxcalib."""
    heads = ["model, bits", "tool", *(column.head for column in COLUMNS), "loads", "note"]
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    beaten = []
    for (part, bits), found in groups(rows):
        best = {column.head: column.best(found) for column in JUDGED}
        for place, row in enumerate(found):
            counted = "" if row.n is None else f", n = {row.n:,}"
            cells = [f"{part}, {bits}{counted}" if place == 0 else "", row.tool]
            cells += [_cell(column, row, best.get(column.head)) for column in COLUMNS]
            cells += ["" if row.loads is None else "yes" if row.loads else "no", row.note.replace("|", "/")]
            lines.append(f"| {' | '.join(cells)} |")
        if sentence := rivals(found):
            beaten.append(f"- {part}, {bits}: {sentence}")
    return "\n".join([*lines, "", "Where another tool beats every row of onnxcalib:", "", *(beaten or ["- nowhere"])])


def _cell(column: Column, row: Row, best: Row | None) -> str:
    value = column.of(row)
    if value is None:
        return ""
    text = column.text(value)
    return f"**{text}**" if best is not None and value == column.of(best) else text


def rivals(rows: Sequence[Row]) -> str:
    """What others do better than all of onnxcalib's rows of a group, in words."""
    said = []
    for column in JUDGED:
        best, own = column.best(row for row in rows if not row.ours), column.best(row for row in rows if row.ours)
        if best is None or own is None:
            continue
        better = column.of(best) > column.of(own) if column.most else column.of(best) < column.of(own)
        if better and column.text(column.of(best)) != column.text(column.of(own)):
            said.append(
                f"{column.head} {best.tool} {column.text(column.of(best))} "
                f"(best onnxcalib: {own.tool.removeprefix(OURS).strip()} {column.text(column.of(own))})"
            )
    return "; ".join(said) + "." if said else ""


def figure(rows: Iterable[Row], path: Path) -> None:
    """Top-1 against CPU seconds, a dot a tool, a panel for each model and bits, and the float model as a line."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot as plt
    from matplotlib import ticker

    rows = list(rows)
    floats = {row.part: row.top1 for row in rows if row.bits == "float"}
    panels = [(key, [row for row in found if row.top1 is not None]) for key, found in groups(rows) if key[1] != "float"]
    panels = [(key, found) for key, found in panels if found]
    if not panels:
        return
    tools = sorted({row.tool: row for _, found in panels for row in found}.values(), key=_order)
    looks = _looks(row.tool for row in tools)
    across, down = min(2, len(panels)), -(-len(panels) // 2)
    drawn, axes = plt.subplots(down, across, figsize=(4.2 * across + 0.6, 3.5 * down + 1.2), squeeze=False)
    for axis in axes.flat[len(panels) :]:
        axis.remove()
    handles: dict[str, Any] = {}
    for axis, ((part, bits), found) in zip(axes.flat, panels, strict=False):
        for row in found:
            colour, marker = looks[row.tool]
            (dot,) = axis.plot([row.cpu], [row.top1], marker, color=colour, ms=8, mec="white", mew=0.6, alpha=0.85)
            handles.setdefault(row.tool, dot)
        if floats.get(part) is not None:
            axis.axhline(floats[part], color="grey", lw=1, ls="--")
        low, high = axis.get_ylim()
        spare = max(0.0, LEAST_SPAN - (high - low)) / 2
        axis.set_ylim(low - spare, high + spare)
        axis.set_xscale("log")
        axis.xaxis.set_major_locator(ticker.LogLocator(subs=(1.0, 2.0, 5.0)))
        axis.xaxis.set_major_formatter("{x:g}")
        axis.xaxis.set_minor_formatter("")
        axis.set_title(f"{part}, {bits}", fontsize=10)
        axis.set_xlabel("CPU seconds")
        axis.grid(alpha=0.3)
    for axis in axes[:, 0]:
        axis.set_ylabel("top-1, % (dashed: float)")
    drawn.legend(
        [handles[name] for name in looks], looks.keys(), loc="lower center", ncols=4, fontsize=8, frameon=False
    )
    inches = 0.3 + 0.19 * -(-len(handles) // 4)  # of the legend
    drawn.tight_layout(rect=(0, inches / drawn.get_figheight(), 1, 1))
    drawn.savefig(path, dpi=110)
    plt.close(drawn)


def _looks(tools: Iterable[str]) -> dict[str, tuple[str, str]]:
    """A colour for each family of tools, which is the first word, and a marker for each of its methods."""
    families: dict[str, list[str]] = {}
    for tool in tools:
        families.setdefault(tool.split()[0], []).append(tool)
    return {
        tool: (f"C{place}", "o^sDvP"[number % 6])
        for place, members in enumerate(families.values())
        for number, tool in enumerate(members)
    }
