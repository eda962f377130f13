"""onnxcalib runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from rich.table import Table

from onnxcalib.cache.prune import Use
from onnxcalib.cache.prune import prune as prune_values
from onnxcalib.cache.show import show as read
from onnxcalib.cli.options import FILE, console, echo
from onnxcalib.pipeline.stages import STAGES
from onnxcalib.reports.comparison import write_comparison
from onnxcalib.runtime.memory import parse_size

SAID = {
    Use.NONE: "which are damaged",
    Use.OTHERS: "of other models, data or versions",
    Use.PARTS: "parts of stages that are finished",
    Use.RESUME: "which a resumed run would use",
}


@click.group()
def runs() -> None:
    """Look into run directories, make them smaller, and compare finished runs."""


@runs.command()
@click.argument("reports", nargs=-1, required=True, type=FILE)
@click.option("-o", "--output", required=True, type=FILE, help="The page to write: FILE.html.")
def compare(reports: tuple[Path, ...], output: Path) -> None:
    """Write one page that compares the runs of REPORTS, which --report wrote.

    \b
    onnxcalib runs compare w4a8.html mixed.html -o runs.html
    """
    write_comparison(reports, output)
    console().print(f"{len(reports)} runs: {output}", markup=False)


@runs.command()
@click.argument("folder", type=FILE)
def show(folder: Path) -> None:
    """Say what the run directory FOLDER holds.

    \b
    onnxcalib runs show small.onnx.run
    """
    found, screen = read(folder, [stage.name for stage in STAGES]), console()
    about = found.about
    for name in ("model", "data", "samples", "target", "version", "runtime", "started", "finished"):
        screen.print(f"{name:9} {about.get(name, 'not yet')}")
    screen.print(f"recipe    {'; '.join(about['recipe'].split(chr(10))).rstrip('; ')}", soft_wrap=True)
    table = Table(box=None, pad_edge=False)
    for name in ("stage", "state", "values", "parts", "bytes", "last"):
        table.add_column(name, justify="right" if name in ("values", "parts", "bytes") else "left")
    for row in (*found.stages.values(), found.others):
        if row.values or row.parts:
            table.add_row(row.stage, row.state, str(row.values), str(row.parts), f"{row.bytes:,}", row.when)
    screen.print(table)
    for path in found.damaged:
        screen.print(f"damaged: {path}; the next run computes it again", soft_wrap=True)


class Size(click.ParamType):  # type: ignore[type-arg]
    """Bytes, as 500MB or 2GB."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """The number of bytes."""
        found = parse_size(str(value))
        if found is None:
            self.fail(f"{value!r} is no size. Write 500MB or 2GB.", param, ctx)
        return found


@runs.command()
@click.argument("folder", type=FILE)
@click.option("--keep", type=Size(), help="Leave so much at the most: 500MB, 2GB; even what a resume needs may go.")
@click.option("--older-than", type=click.FloatRange(0), metavar="DAYS", help="Remove only values of so many days.")
@click.option("--dry-run", is_flag=True, help="Say what would be removed, and remove nothing.")
def prune(folder: Path, keep: int | None, older_than: float | None, dry_run: bool) -> None:
    """Remove from the run directory FOLDER what the run does not need any more.

    That is damaged values, those of other models, data or versions, and the parts of finished stages.

    \b
    onnxcalib runs prune small.onnx.run
    onnxcalib runs prune small.onnx.run --keep 500MB --older-than 7
    """
    found = prune_values(folder, keep, older_than, dry=dry_run)
    would = "would be " if dry_run else ""
    for use, count in sorted(found.removed.items()):
        echo(f"{would}removed: {count} values, {SAID[use]}")
    if found.stages:
        order = [stage.name for stage in STAGES]
        echo(f"the next run computes again: {', '.join(sorted(found.stages, key=order.index))}")
    echo(f"{found.freed:,} bytes {would}freed, {found.kept} values of {found.left:,} bytes {would}left")
    if keep is not None and found.left > keep:
        echo(f"that is more than {keep:,} bytes: the others are younger than {older_than:g} days")
