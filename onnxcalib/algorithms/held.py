"""Batches of tensors that wait on disk."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from onnxcalib.numerics.quant_params import Array


@dataclass
class Held:
    """The batches of one tensor in a file, of any shape and type; without headers, which take long to read."""

    path: Path
    size: int = 0
    _kinds: list[tuple[np.dtype[Any], tuple[int, ...]]] = field(default_factory=list)

    def append(self, values: Array) -> None:
        """Takes the next batch."""
        with self.path.open("ab", buffering=0) as file:
            values.tofile(file)
        self._kinds.append((values.dtype, values.shape))
        self.size += values.nbytes

    def batches(self) -> Iterator[Array]:
        """All batches in their order."""
        with self.path.open("rb", buffering=0) as file:
            for kind, shape in self._kinds:
                yield np.fromfile(file, kind, int(np.prod(shape))).reshape(shape)
