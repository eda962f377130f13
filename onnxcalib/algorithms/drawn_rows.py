"""The rows that layers read of a tensor, drawn alike of every network that makes it."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from onnxcalib.algorithms.layer_matrix import LayerMatrix
from onnxcalib.data import Dataset
from onnxcalib.data.padding import positions_that_count
from onnxcalib.numerics.positions import Counts
from onnxcalib.numerics.quant_params import Array

# Samples that are run at a time: they share the positions that are drawn.
BATCH = 8
# Rows that the moments of a layer, or of a group, are taken of: so many, and more where its sums are wide.
ROWS, GROUP_ROWS, ROWS_A_COLUMN = 16384, 4096, 8

Reads = tuple[Any, ...]  # what decides the rows that a layer reads of a tensor
RowsByReads = dict[Reads, Array]


def counts_of(data: Dataset) -> list[Counts | None]:
    """The positions that count in every batch, so that later passes need not read the data for them."""
    return [positions_that_count(feed) for feed in data.batches(BATCH)]


@dataclass(frozen=True)
class DrawnRows:
    """What some layers read of one tensor; those that read the same rows share them."""

    tensor: str
    matrices: Mapping[Reads, LayerMatrix]
    samples: int  # that all rows come from

    @classmethod
    def of(cls, tensor: str, matrices: Sequence[LayerMatrix], samples: int) -> DrawnRows:
        """The rows of those layers that can be taken as products of matrices."""
        return cls(tensor, {matrix.reads: matrix for matrix in matrices if matrix.skip_reason is None}, samples)

    def most(self, matrix: LayerMatrix) -> int:
        """How many rows of a sample are drawn."""
        least = ROWS if matrix.layer.groups == 1 else GROUP_ROWS
        return -(-max(least, ROWS_A_COLUMN * matrix.columns) // self.samples)

    def draw(self, values: Array, batch: int, counts: Counts | None, fill: int = 0) -> RowsByReads:
        """The rows of a batch, which is known by its number; `fill` is the zero of its values."""
        drawn = {}
        for reads, matrix in self.matrices.items():
            # Whoever else reads the tensor, and whatever was drawn before.
            seed = [zlib.crc32(self.tensor.encode()), zlib.crc32(repr(reads).encode()), batch]
            drawn[reads] = matrix.rows(values, self.most(matrix), np.random.default_rng(seed), counts, fill)
        return drawn
