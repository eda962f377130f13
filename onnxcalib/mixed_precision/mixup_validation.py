"""How assembled models fare on mixup samples, made of the calibration samples."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from functools import cache, partial

import onnx

from onnxcalib.algorithms.teacher import Loss, Teacher
from onnxcalib.data import Dataset, MixedPairs, can_be_mixed, first
from onnxcalib.mixed_precision.rerank import Score, most_measurements
from onnxcalib.model.prepare import Model
from onnxcalib.numerics.metric import Metric
from onnxcalib.numerics.output_kind import LossKind
from onnxcalib.progress import Checkpoint, Progress
from onnxcalib.recipe import Precision

SAMPLES = 512
PLACES = (1, 3, 5)  # how far apart the two of a pair stand
Choices = Mapping[str, Precision]


def scores(
    model: Model,
    data: Dataset,
    kind: Loss,
    assemble: Callable[[Choices], onnx.ModelProto],
    progress: Progress,
    checkpoint: Checkpoint,
) -> list[Score]:
    """The losses of assembled models, one for each set of samples; what was measured before is not measured again."""
    told, sets = itertools.count(1), mixup_sets(first(data, SAMPLES), kind)

    def score(part: int, teacher: Callable[[], Teacher], choices: Choices) -> float:
        key = (part, dict(choices))
        loss = checkpoint.found([key])[0]
        if loss is None:
            loss = teacher().loss_of(assemble(choices))
            checkpoint.put(key, loss)
        progress("assignments", next(told), most_measurements(len(sets)))
        return float(loss)

    teachers = [cache(partial(Teacher, model, each, kind)) for each in sets]
    return [partial(score, part, teacher) for part, teacher in enumerate(teachers)]


def mixup_sets(data: Dataset, kind: Loss) -> list[Dataset]:
    """The samples mixed in pairs, in several ways; as they are if they have no mixture, or if labels are compared."""
    if isinstance(kind, Metric) or kind is LossKind.CROSS_ENTROPY or not can_be_mixed(data):
        return [data]
    return [MixedPairs(data, places) for places in PLACES]
