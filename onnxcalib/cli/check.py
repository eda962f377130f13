"""onnxcalib check."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import click

from onnxcalib.checks.check import Finding, check_file, matters
from onnxcalib.cli.options import FILE, console, echo
from onnxcalib.cli.target_tables import findings_table
from onnxcalib.cli.wording import as_typed
from onnxcalib.errors import ModelError
from onnxcalib.targets import NAMES, Severity, find_target

FOUND, UNREADABLE = 1, 2


@click.command()
@click.argument("model", type=FILE)
@click.option("--target", default="ort", show_default=True, help=f"{', '.join(NAMES)}, or a TOML file.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")
def check(model: Path, target: str, as_json: bool) -> None:
    """List what a target will refuse, keep in float or run slowly in a quantized MODEL, ours or another tool's.

    The exit code is 0 if nothing is refused or kept in float, 1 if something is, 2 if the file cannot be read.

    \b
    onnxcalib check small.onnx --target tensorrt
    onnxcalib check small.onnx --target my.toml --json
    """
    chosen = find_target(target)
    try:
        findings = check_file(model, chosen)
    except ModelError as error:
        echo(f"Error: {as_typed(str(error))}", err=True)
        sys.exit(UNREADABLE)
    if as_json:
        listed = [dataclasses.asdict(it) for it in findings]
        click.echo(json.dumps({"file": str(model), "target": chosen.name, "findings": listed}, indent=1))
    else:
        if findings:
            console().print(findings_table(findings))
        echo(f"{model} on {chosen.name}: {_counted(findings)}")
    if matters(findings):
        sys.exit(FOUND)


def _counted(findings: list[Finding]) -> str:
    counts = {severity: sum(it.severity is severity for it in findings) for severity in Severity}
    return ", ".join(f"{count} {severity}" for severity, count in counts.items() if count) or "nothing found"
