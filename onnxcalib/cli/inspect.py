"""onnxcalib inspect."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import click

from onnxcalib.analysis.inspect import inspect as inspect_model
from onnxcalib.cli.options import FILE, console, with_runtime
from onnxcalib.cli.tables import constant_table, float_table, layer_table
from onnxcalib.model.layers import Layer


@click.command()
@click.argument("model", type=FILE)
@click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")
@with_runtime
def inspect(model: Path, as_json: bool) -> None:
    """List the layers of MODEL, and what stays float and why.

    \b
    onnxcalib inspect model.onnx
    onnxcalib inspect model.onnx --json
    """
    layers = inspect_model(model)
    if as_json:
        listed = {
            "layers": [*map(_as_dict, layers.layers)],
            "float": [*map(dataclasses.asdict, layers.float_nodes)],
            "constants": [it.told for it in layers.constants],
        }
        click.echo(json.dumps(listed, indent=1))
        return
    screen = console()
    screen.print(layer_table(layers))
    if layers.float_nodes:
        screen.print(float_table(layers))
    if layers.constants:
        screen.print(constant_table(layers.constants))
    total = sum(layer.parameters for layer in layers.layers)
    screen.print(f"{len(layers.layers)} layers, {total:,} parameters")


def _as_dict(layer: Layer) -> dict[str, Any]:
    values = {field.name: getattr(layer, field.name) for field in dataclasses.fields(layer)}
    return values | {"batch_norm": layer.batch_norm is not None, "depthwise": layer.is_depthwise}
