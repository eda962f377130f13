"""onnxcalib inspect."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import click

from onnxcalib.analysis.inspect import inspect as inspect_model
from onnxcalib.cli.options import FILE, console, with_runtime
from onnxcalib.cli.tables import constant_table, float_table, layer_table, product_table
from onnxcalib.model.layers import Layer, LayerList


@click.command()
@click.argument("model", type=FILE)
@click.option("-c", "--calibration", type=FILE, help="Samples; the first one tells sizes that the file leaves open.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")
@with_runtime
def inspect(model: Path, calibration: Path | None, as_json: bool) -> None:
    """List the layers of MODEL, its products of attention, and what stays float and why.

    \b
    onnxcalib inspect model.onnx
    onnxcalib inspect model.onnx -c calibration.npz
    onnxcalib inspect model.onnx --json
    """
    layers = inspect_model(model, calibration)
    if as_json:
        listed = {
            "layers": [*map(_as_dict, layers.layers)],
            "products": [*map(dataclasses.asdict, layers.products)],
            "patterns": [*map(dataclasses.asdict, layers.patterns)],
            "float": [*map(dataclasses.asdict, layers.float_nodes)],
            "constants": [it.told for it in layers.constants],
        }
        click.echo(json.dumps(listed, indent=1))
        return
    screen = console()
    screen.print(layer_table(layers))
    if layers.products:
        screen.print(product_table(layers))
    if layers.float_nodes:
        screen.print(float_table(layers))
    if layers.constants:
        screen.print(constant_table(layers.constants))
    screen.print(_summary(layers))


def _summary(layers: LayerList) -> str:
    total = sum(layer.parameters for layer in layers.layers)
    parts = [f"{len(layers.layers)} layers, {total:,} parameters"]
    known = [*(layer.macs for layer in layers.layers), *(product.macs for product in layers.products)]
    if None not in known:
        parts.append(f"{sum(macs for macs in known if macs is not None):,} MACs a sample")
    kinds = [pattern.kind.value for pattern in layers.patterns]
    parts += [f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds)]
    return ", ".join(parts)


def _as_dict(layer: Layer) -> dict[str, Any]:
    values = {field.name: getattr(layer, field.name) for field in dataclasses.fields(layer)}
    return values | {"batch_norm": layer.batch_norm is not None, "depthwise": layer.is_depthwise}
