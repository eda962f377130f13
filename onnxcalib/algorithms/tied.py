"""Layers whose weight is an embedding table too: both take the same codes, which are stored once."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from onnxcalib.model.layers import Layer, weights_of
from onnxcalib.model.prepare import Model
from onnxcalib.numerics.quant_params import Array, QuantParams, quantize, transposed
from onnxcalib.plan import QuantPlan, StoredConstant

SHARED_BITS = 8  # of a table, unless the layer that shares it is asked to have fewer


@dataclass(frozen=True)
class Tied:
    """A layer and the table that holds its weight."""

    table: StoredConstant
    turned: bool  # the layer has a column a channel
    alone: bool  # no other layer shares the table

    @property
    def quantized(self) -> Array:
        """The table's codes as the layer has them."""
        return np.ascontiguousarray(self.table.quantized.T) if self.turned else self.table.quantized

    @property
    def qparams(self) -> QuantParams:
        """Their grid."""
        return transposed(self.table.qparams) if self.turned else self.table.qparams

    def with_codes(self, quantized: Array, qparams: QuantParams) -> StoredConstant:
        """The table with a layer's codes."""
        if self.turned:
            quantized, qparams = np.ascontiguousarray(quantized.T), transposed(qparams)
        return replace(self.table, quantized=quantized, qparams=qparams)

    def can_have(self, qparams: QuantParams, table_bits: Collection[int]) -> bool:
        """Whether both can have codes on a layer's grid: of four bits, two lie in a byte."""
        if qparams.bits == SHARED_BITS:
            return True
        known = min(table_bits) < SHARED_BITS and not qparams.zero_point.any() and not self.table.quantized.shape[1] % 2
        return self.alone and known


def tied_layers(model: Model, layers: Sequence[Layer], constants: Iterable[StoredConstant]) -> dict[str, Tied]:
    """By layer: the table, looked up row by row, that holds its weight with a row an output channel."""
    tables = [it for it in constants if it.op == "Gather" and it.quantized.ndim == 2 and it.qparams.axis == 0]
    tables = [it for it in tables if it.qparams.bits == SHARED_BITS and it.qparams.block is None]
    shapes = {it.quantized.shape for it in tables}
    alike = [layer for layer in layers if layer.has_sums and _rows(layer) in shapes]
    values = weights_of(model, [layer.weight for layer in alike]) if alike else {}
    found: dict[str, Tied] = {}
    for layer in alike:
        rows = values[layer.weight] if layer.transposed else values[layer.weight].T
        for table in tables:
            if rows.shape == table.quantized.shape and np.array_equal(quantize(rows, table.qparams), table.quantized):
                found[layer.name] = Tied(table, not layer.transposed, alone=True)
    names = [it.table.name for it in found.values()]
    return {name: replace(it, alone=names.count(it.table.name) == 1) for name, it in found.items()}


def sharing_tables(plan: QuantPlan) -> set[str]:
    """The layers that have a table's codes in a plan."""
    return {name for name, params in plan.layers.items() if params.table is not None}


def _rows(layer: Layer) -> tuple[int, ...]:
    return layer.weight_shape if layer.transposed else layer.weight_shape[::-1]
