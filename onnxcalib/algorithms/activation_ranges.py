"""Which tensors keep their static range, get one at run time, or stay float: by the loss on held-out samples.

What each tensor could gain at most is the loss that its quantizer alone costs. The worst come first, and each is taken
for what brings most of that back: a static range is the fastest, one found at run time is next, floats are the last.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import onnx

from onnxcalib.algorithms.teacher import Teacher
from onnxcalib.data import Feed
from onnxcalib.model.switches import SwitchedModel
from onnxcalib.plan import QuantPlan
from onnxcalib.progress import Progress
from onnxcalib.runtime.session import Session, Tensors

# Of the loss at hand, that a tensor must save: so many times its share among all of them, within limits.
STANDS_OUT, LIMITS = 3.0, (0.1, 0.5)
NEAR = 1.25  # times the loss with floats, up to which a range found at run time is taken instead
MOST_FLOAT = 0.25  # of the tensors
VAIN = 2  # tensors that saved too little, one after the other, after which the search ends


@dataclass(frozen=True)
class ChosenRanges:
    """The tensors that are no longer static, and the held-out losses without and with that."""

    dynamic: tuple[str, ...]
    floats: tuple[str, ...]  # what layers read as it is; their weights stay quantized
    before: float
    after: float

    def __bool__(self) -> bool:
        return bool(self.dynamic or self.floats)


@dataclass(frozen=True)
class RangeSearch:
    """Tries tensors one after the other."""

    teacher: Teacher
    simulate: Callable[[QuantPlan], onnx.ModelProto]
    switch: Callable[[QuantPlan], SwitchedModel]
    progress: Progress

    def choose(self, plan: QuantPlan, tensors: Sequence[str], leavable: Sequence[str]) -> ChosenRanges:
        """Requires a static plan; leavable are those of the tensors that may stay float."""
        start, alone = self._loss(plan), self._without_each(plan, tensors)
        least = float(np.clip(STANDS_OUT / max(len(tensors), 1), *LIMITS))
        found, vain = ChosenRanges((), (), start, start), 0
        for place in np.argsort(alone, kind="stable"):
            name, loss = tensors[place], found.after
            if start - alone[place] < least * loss or vain == VAIN:
                break
            may_stay = name in leavable and len(found.floats) < max(1, int(MOST_FLOAT * len(tensors)))
            taken = self._better(plan, found, name, least, may_stay=may_stay)
            vain = 0 if taken is not None else vain + 1
            found = taken or found
        return found

    def _better(
        self, plan: QuantPlan, found: ChosenRanges, name: str, least: float, *, may_stay: bool
    ) -> ChosenRanges | None:
        """One more tensor dynamic or float; None where it saves too little."""
        dynamic = self._measured(plan, replace(found, dynamic=(*found.dynamic, name)))
        floats = self._measured(plan, replace(found, floats=(*found.floats, name)))
        most = (1 - least) * found.after
        if may_stay and floats.after <= most and dynamic.after > NEAR * floats.after:
            return floats
        return dynamic if dynamic.after <= most else None

    def _measured(self, plan: QuantPlan, found: ChosenRanges) -> ChosenRanges:
        return replace(found, after=self._loss(plan.reading(found.dynamic, found.floats)))

    def _without_each(self, plan: QuantPlan, tensors: Sequence[str]) -> npt.NDArray[np.float64]:
        """The losses with one of the tensors float at a time, by one session."""
        switched = self.switch(plan)
        session, losses = Session(switched.proto, "the switched model"), []
        for done, name in enumerate(tensors, 1):
            flags = np.ones(switched.count, np.bool_)
            flags[switched.tensors[name]] = False

            def run(feed: Feed, flags: npt.NDArray[np.bool_] = flags) -> Tensors:
                return session.run({**feed, switched.flags: flags})

            losses.append(self.teacher.loss_by(run))
            self.progress("activations", done, len(tensors))
        return np.array(losses)

    def _loss(self, plan: QuantPlan) -> float:
        return self.teacher.loss_of(self.simulate(plan))
