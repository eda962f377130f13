"""Batches of tensors that wait on disk."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from onnxcalib.numerics.quant_params import Array


@dataclass
class Held:
    """The batches of one tensor in a file, of any shape and type."""

    path: Path
    size: int = 0

    def append(self, values: Array) -> None:
        """Takes the next batch."""
        with self.path.open("ab") as file:
            np.save(file, values)
        self.size += values.nbytes

    def batches(self) -> Iterator[Array]:
        """All batches in their order."""
        with self.path.open("rb") as file:
            while file.peek(1):
                yield np.load(file)
