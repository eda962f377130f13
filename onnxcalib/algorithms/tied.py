"""Layers whose weight is an embedding table too: at eight bits both take the same codes, which are stored once."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from onnxcalib.model.layers import Layer, weights_of
from onnxcalib.model.prepare import Model
from onnxcalib.numerics.quant_params import Array, QuantParams, quantize, transposed
from onnxcalib.plan import QuantPlan, StoredConstant

SHARED_BITS = 8


@dataclass(frozen=True)
class Tied:
    """A layer's weight as the table has it."""

    quantized: Array
    qparams: QuantParams


def tied_layers(model: Model, layers: Sequence[Layer], constants: Iterable[StoredConstant]) -> dict[str, Tied]:
    """By layer: the codes of the table, looked up row by row, that holds its weight with a row an output channel."""
    tables = [it for it in constants if it.op == "Gather" and it.quantized.ndim == 2 and it.qparams.axis == 0]
    tables = [it for it in tables if it.qparams.bits == SHARED_BITS and it.qparams.block is None]
    shapes = {it.quantized.shape for it in tables}
    alike = [layer for layer in layers if layer.has_sums and _rows(layer) in shapes]
    values = weights_of(model, [layer.weight for layer in alike]) if alike else {}
    found = {}
    for layer in alike:
        rows = values[layer.weight] if layer.transposed else values[layer.weight].T
        for table in tables:
            if rows.shape == table.quantized.shape and np.array_equal(quantize(rows, table.qparams), table.quantized):
                found[layer.name] = _of(table, layer)
    return found


def at_shared_bits(plan: QuantPlan, tied: Collection[str]) -> set[str]:
    """Which of these layers have the table's codes in a plan."""
    return {name for name in tied if name in plan.layers and plan.layers[name].qparams.bits == SHARED_BITS}


def _rows(layer: Layer) -> tuple[int, ...]:
    return layer.weight_shape if layer.transposed else layer.weight_shape[::-1]


def _of(table: StoredConstant, layer: Layer) -> Tied:
    if layer.transposed:
        return Tied(table.quantized, table.qparams)
    return Tied(np.ascontiguousarray(table.quantized.T), transposed(table.qparams))
