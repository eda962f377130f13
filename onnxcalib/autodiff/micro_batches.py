"""Gradients of a batch in pieces, several at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import onnx

from onnxcalib.autodiff.gradients import Gradients, SharedLoss
from onnxcalib.recipe import Engine
from onnxcalib.runtime.session import Tensors

Array = npt.NDArray[np.float32]
Piece = TypeVar("Piece")

# Sums are made group by group, however many workers there are, so that they come out alike to the last bit.
GROUPS = 4


class MicroBatchGradients:
    """A loss and its gradients over the pieces of a batch, with one thread a piece.

    Graphs of many small nodes gain next to nothing from several threads inside a node.
    """

    def __init__(
        self,
        model: onnx.ModelProto,
        parameters: Mapping[str, Array],
        engine: Engine,
        workers: int,
        shares: SharedLoss | None = None,
    ) -> None:
        first = Gradients(model, parameters, engine, threads=1, shares=shares)
        self.parameters, self._prepare = first.parameters, first.prepare
        workers = min(workers, GROUPS)
        self._free: SimpleQueue[Gradients] = SimpleQueue()
        for gradients in (first, *(first.twin() for _ in range(workers - 1))):
            self._free.put(gradients)
        self._pool = ThreadPoolExecutor(workers)

    def run(self, pieces: Sequence[Piece], feed_of: Callable[[Piece], Tensors]) -> dict[str, Array]:
        """The gradients summed over the pieces; what the loss reads of each is made in the thread that takes it."""
        self._prepare()
        groups = [pieces[group::GROUPS] for group in range(min(GROUPS, len(pieces)))]
        if len(groups) == 1:
            return self._group_sum(groups[0], feed_of)
        sums = self._pool.map(lambda group: self._group_sum(group, feed_of), groups)
        first = next(sums)
        for other in sums:  # in their order, each let go of at once: a sum is as large as the model
            for name, gradient in other.items():
                first[name] += gradient
        return first

    def _group_sum(self, pieces: Sequence[Piece], feed_of: Callable[[Piece], Tensors]) -> dict[str, Array]:
        gradients = self._free.get()
        try:
            gradients.run_prepared(feed_of(pieces[0]))
            total = {name: value.copy() for name, value in gradients.gradients.items()}
            for piece in pieces[1:]:
                gradients.run_prepared(feed_of(piece))
                for name, value in gradients.gradients.items():
                    total[name] += value
            return total
        finally:
            self._free.put(gradients)
