"""One row a quantized layer: its bits, its bytes, what it loses, and what to type about it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from onnxcalib.analysis.advice import advice
from onnxcalib.analysis.diagnose import Diagnosis
from onnxcalib.model.layers import LayerList
from onnxcalib.model.quantized import QuantizedFile
from onnxcalib.recipe import Recipe

WORST = 8

ReportData = dict[str, Any]  # as JSON holds it


def layer_rows(file: QuantizedFile, listed: LayerList, diagnosis: Diagnosis | None) -> list[ReportData]:
    """One row a quantized layer: bits, bytes, and what the diagnosis says of it."""
    known = {layer.name: layer for layer in listed.layers}
    found = {each.layer: each for each in diagnosis.layers} if diagnosis is not None else {}
    total = max(sum(layer.stored for layer in file.layers), 1)
    lost = max(sum(each.alone_loss for each in found.values()), 1e-30)
    rows = []
    for layer in file.layers:
        float_layer, seen = known.get(layer.name), found.get(layer.name)
        rows.append(
            {
                "layer": layer.name,
                "op": "depthwise Conv" if layer.depthwise else layer.op,
                "bits": layer.told,
                "weight_bits": layer.weight.bits,
                "activation_bits": layer.activation_bits,
                "parameters": layer.quantized.size,
                "macs": float_layer.macs if float_layer is not None else None,
                "bytes": layer.stored,
                "byte_share": layer.stored / total,
                "sqnr_db": finite(seen.sqnr_db) if seen else None,
                "alone_db": finite(seen.alone_db) if seen else None,
                "alone_loss": seen.alone_loss if seen else None,
                "loss_share": seen.alone_loss / lost if seen else None,
            }
        )
    return rows


def worst_rows(rows: Sequence[ReportData], count: int = WORST) -> list[ReportData]:
    """The layers that hurt the most, worst first."""
    hurting = [row for row in rows if row["loss_share"] is not None and row["loss_share"] > 0]
    return sorted(hurting, key=lambda row: -row["loss_share"])[:count]


def with_advice(rows: Sequence[ReportData], recipe: Recipe) -> None:
    """Adds to the worst rows what to type about them."""
    for row in worst_rows(rows):
        row["advice"] = advice(row, recipe)


def finite(value: Any) -> Any:
    """JSON has no infinity: None in its place, in all that the value holds."""
    if isinstance(value, Mapping):
        return {name: finite(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
