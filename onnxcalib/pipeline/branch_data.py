"""Calibration data for a branch of an If: what the branch captures in those feeds that take it."""

from __future__ import annotations

from collections.abc import Iterator

from onnxcalib.data import Dataset, Feed
from onnxcalib.data.check import samples_in
from onnxcalib.model.branches import Branch, outer_part
from onnxcalib.model.prepare import Model
from onnxcalib.runtime.session import Session


class BranchData:
    """A dataset of a branch model; the outer graph runs anew in every pass, and only one feed is held."""

    labels = None

    def __init__(self, model: Model, branch: Branch, data: Dataset) -> None:
        self.source = data.source
        self._branch, self._data = branch, data
        part = outer_part(model.proto, branch)
        self._session = Session(part, model.source, pool=False) if part.graph.output else None
        feeds = [None if feed is None else samples_in(feed) for feed in self._run(1)]
        self._samples = sum(samples for samples in feeds if samples is not None)
        self._always = None not in feeds

    def __len__(self) -> int:
        """The number of samples that take the branch when they come one by one."""
        return self._samples

    def batches(self, size: int) -> Iterator[Feed]:
        """Yield feeds of `size` samples, or of one where the condition differs among samples or sizes."""
        apart = size > 1 and not (self._always and next(self._run(size), None) is not None)
        return (feed for feed in self._run(1 if apart else size) if feed is not None)

    def _run(self, size: int) -> Iterator[Feed | None]:
        """What the branch reads, a feed of the outer data; None for a feed that takes the other branch."""
        for given in self._data.batches(size):
            tensors = given if self._session is None else {**given, **self._session.run(given)}
            condition = tensors[self._branch.condition]
            # A condition of several elements would stop the If: such a feed takes no branch.
            taken = condition.size == 1 and bool(condition.item()) is self._branch.taken_when
            yield {name: tensors[name] for name in self._branch.captured} if taken else None
