"""The written file must load at full optimization: parts of it stay float until it does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from onnxcalib.errors import ModelError
from onnxcalib.pipeline.job import Job
from onnxcalib.plan import QuantPlan

ROUNDS = 8  # parts that are looked for one by one, before all tensors that others share are given up


@dataclass(frozen=True)
class Part:
    """A layer, or a tensor that every reader takes quantized."""

    name: str
    is_layer: bool


def parts_of(jobs: Sequence[Job], plans: Sequence[QuantPlan]) -> list[Part]:
    """All that can stay float, tensors first: without their grids a layer is still a quantized layer."""
    tensors = [Part(name, is_layer=False) for plan in plans for name in plan.shared]
    layers = [Part(layer.name, is_layer=True) for job in jobs for layer in job.layers]
    return [*layers, *tensors]


def without(plan: QuantPlan, parts: Sequence[Part]) -> QuantPlan:
    """The plan with these parts float."""
    layers = {part.name for part in parts if part.is_layer}
    return plan.without(layers, {part.name for part in parts if not part.is_layer})


def parts_to_drop(parts: Sequence[Part], why_not: Callable[[Sequence[Part]], str | None]) -> tuple[Part, ...]:
    """The parts without which a file loads; why_not tells of dropped parts why the file does not, None if it does."""
    dropped: list[Part] = []
    while (reason := why_not(dropped)) is not None:
        left = [part for part in parts if part not in dropped]
        if why_not(parts) is not None:
            raise ModelError(
                f"onnxruntime cannot load the model at full optimization, even with all of it float: {reason}.",
                "Load it at a lower level of optimization, or export it in another way.",
            )
        if len(dropped) >= ROUNDS:
            tensors = [part for part in left if not part.is_layer]
            dropped.extend(tensors or left)
            continue
        works, fails = 0, len(left)  # with so many of the parts quantized
        while fails - works > 1:
            middle = (works + fails) // 2
            if why_not([*dropped, *left[middle:]]) is None:
                works = middle
            else:
                fails = middle
        dropped.append(left[fails - 1])
    return tuple(dropped)
