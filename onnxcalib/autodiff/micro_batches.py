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

# Sums are made lane by lane, however many workers there are, so that they come out alike to the last bit.
LANES = 4


class Lanes:
    """A loss and its gradients over the pieces of a batch, with one thread a piece.

    Graphs of many small nodes gain next to nothing from several threads inside a node.
    """

    def __init__(self, model: onnx.ModelProto, parameters: Mapping[str, Array], engine: Engine, workers: int) -> None:
        first = Gradients(model, parameters, engine, threads=1)
        self.parameters = first.parameters
        workers = min(workers, LANES)
        self._free: SimpleQueue[Gradients] = SimpleQueue()
        for gradients in (first, *(first.twin() for _ in range(workers - 1))):
            self._free.put(gradients)
        self._pool = ThreadPoolExecutor(workers)

    def run(self, pieces: Sequence[Tensors], completed: Callable[[Tensors], Tensors] = dict) -> dict[str, Array]:
        """The gradients summed over the pieces, each of which is completed to what the loss reads."""
        lanes = [pieces[lane::LANES] for lane in range(LANES)]
        work = [(lane, completed) for lane in lanes if lane]
        first, *others = self._pool.map(self._lane, work)
        for other in others:
            for name, gradient in other.items():
                first[name] += gradient
        return first

    def _lane(self, work: tuple[Sequence[Tensors], Callable[[Tensors], Tensors]]) -> dict[str, Array]:
        pieces, completed = work
        gradients = self._free.get()
        try:
            gradients.run(completed(pieces[0]))
            total = {name: value.copy() for name, value in gradients.gradients.items()}
            for piece in pieces[1:]:
                gradients.run(completed(piece))
                for name, value in gradients.gradients.items():
                    total[name] += value
            return total
        finally:
            self._free.put(gradients)
