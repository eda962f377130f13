"""onnxcalib runs."""

from __future__ import annotations

from pathlib import Path

import click
from rich.table import Table

from onnxcalib.cache.show import show as read
from onnxcalib.cli.options import FILE, console
from onnxcalib.pipeline.stages import STAGES
from onnxcalib.reports.comparison import write_comparison


@click.group()
def runs() -> None:
    """Look into run directories, and compare finished runs."""


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
