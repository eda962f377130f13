"""What follows layers in a model: up to the next border it is opened for each, from border to border once for all."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise

from onnxcalib.model.bottlenecks import bottlenecks
from onnxcalib.model.subgraph import Cutter
from onnxcalib.runtime.session import Session, Tensors

LAYERS = 16  # between borders at least: to open what follows a layer takes longer than to run it


class Following:
    """Borders are tensors through which everything passes; where there are none, all that follows a layer is opened."""

    def __init__(
        self, model: Cutter, layers: Iterable[str], least: int = LAYERS, borders: Sequence[str] | None = None
    ) -> None:
        """Requires the tensors after which models are to be opened; borders are chosen of those given, or of all."""
        self._model, self._lock = model, threading.Lock()
        found = bottlenecks(model.model.graph) if borders is None else borders
        self._borders = self._chosen(sorted(map(model.place, layers)), found, least)
        self._places = [model.place(name) for name in self._borders]
        self._spans: list[Session | None] = [None] * len(self._borders)  # what lies between a border and the next one

    def fed(self, tensor: str) -> tuple[str, ...]:
        """The other tensors that what depends on a tensor must be fed: none is read after the next border."""
        return self._model.fed_after(tensor, self._until(tensor))

    def open(self, tensor: str) -> Callable[[Tensors], Tensors]:
        """Makes outputs, those that depend on a tensor, of that tensor and what else is read after it."""
        first, near = self._first(tensor), self._opened(tensor, self._until(tensor))

        def run(feed: Tensors) -> Tensors:
            made = {} if near is None else near.run({name: feed[name] for name in near.inputs})
            for place, border in enumerate(self._borders[first:], first):
                if border in made:
                    made |= self._span(place).run({border: made[border]})
            return made

        return run

    def _first(self, tensor: str) -> int:
        return bisect_right(self._places, self._model.place(tensor))

    def _until(self, tensor: str) -> str | None:
        return (*self._borders, None)[self._first(tensor)]

    def _chosen(self, layers: list[int], found: Iterable[str], least: int) -> list[str]:
        """Of all borders those with so many layers since the last one, and as many after them."""
        chosen, done = list[str](), 0
        for name in found:
            before = bisect_right(layers, self._model.place(name))
            if before - done >= least and len(layers) - before >= least:
                chosen.append(name)
                done = before
        return chosen

    def _span(self, place: int) -> Session:
        with self._lock:
            session = self._spans[place]
            if session is None:
                begin, end = [*pairwise(self._borders), (self._borders[-1], None)][place]
                session = self._spans[place] = self._opened(begin, end)
            assert session is not None, "a border is read by what comes after it"
            return session

    def _opened(self, tensor: str, until: str | None) -> Session | None:
        rest, _ = self._model.after(tensor, until)
        # Several of these run at a time, each on a core of its own.
        return None if rest is None else Session(rest, threads=1)
