"""onnxcalib targets."""

from __future__ import annotations

import click

from onnxcalib.cli.options import console
from onnxcalib.cli.target_tables import constraints_table, target_table, verdicts_table
from onnxcalib.targets import TARGETS, find_target


@click.command()
@click.argument("name", required=False)
def targets(name: str | None) -> None:
    """List the targets, or show what NAME (or a TOML file) demands and who says so.

    \b
    onnxcalib targets
    onnxcalib targets vitis
    onnxcalib targets my.toml
    """
    screen = console()
    if name is None:
        screen.print(target_table(TARGETS.values()))
        return
    target = find_target(name)
    screen.print(f"{target.name}: {target.summary}")
    screen.print(constraints_table(target))
    screen.print(verdicts_table(target))
