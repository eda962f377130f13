"""Gradients of a batch in pieces, several at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue

import numpy as np
import numpy.typing as npt
import onnx

from onnxcalib.autodiff.gradients import Gradients
from onnxcalib.recipe import Engine
from onnxcalib.runtime.session import Tensors

Array = npt.NDArray[np.float32]

# Sums are made group by group, however many workers there are, so that they come out alike to the last bit.
GROUPS = 4


class MicroBatchGradients:
    """A loss and its gradients over the pieces of a batch, with one thread a piece.

    Graphs of many small nodes gain next to nothing from several threads inside a node.
    """

    def __init__(self, model: onnx.ModelProto, parameters: Mapping[str, Array], engine: Engine, workers: int) -> None:
        first = Gradients(model, parameters, engine, threads=1)
        self.parameters = first.parameters
        workers = min(workers, GROUPS)
        self._free: SimpleQueue[Gradients] = SimpleQueue()
        for gradients in (first, *(first.twin() for _ in range(workers - 1))):
            self._free.put(gradients)
        self._pool = ThreadPoolExecutor(workers)

    def run(self, micro_batches: Sequence[Tensors], completed: Callable[[Tensors], Tensors] = dict) -> dict[str, Array]:
        """The gradients summed over the pieces, each of which is completed to what the loss reads."""
        groups = [micro_batches[group::GROUPS] for group in range(GROUPS)]
        work = [(group, completed) for group in groups if group]
        first, *others = self._pool.map(self._group_sum, work)
        for other in others:
            for name, gradient in other.items():
                first[name] += gradient
        return first

    def _group_sum(self, work: tuple[Sequence[Tensors], Callable[[Tensors], Tensors]]) -> dict[str, Array]:
        micro_batches, completed = work
        gradients = self._free.get()
        try:
            gradients.run(completed(micro_batches[0]))
            total = {name: value.copy() for name, value in gradients.gradients.items()}
            for micro_batch in micro_batches[1:]:
                gradients.run(completed(micro_batch))
                for name, value in gradients.gradients.items():
                    total[name] += value
            return total
        finally:
            self._free.put(gradients)
