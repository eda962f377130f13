"""Held-out samples in several forms: a hundred images alone judge roughly whether training has helped."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import onnx

from onnxcalib.algorithms.teacher import Teacher
from onnxcalib.data import Dataset
from onnxcalib.data.augmentation import augmented
from onnxcalib.model.prepare import Model
from onnxcalib.numerics.output_kind import LossKind
from onnxcalib.runtime.session import Session

FORMS = 4
ERRORS = 2.0  # standard errors of a difference that chance alone may make

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Compared:
    """The losses of two models on the same samples, and how far apart chance may bring them."""

    before: float
    after: float
    chance: float


class Validation:
    """The float outputs on samples as they are and, of images, on other forms of them."""

    def __init__(self, model: Model, held_out: Dataset, kind: LossKind, temperature: float, seed: int) -> None:
        others = [augmented(held_out, form, seed) for form in range(1, FORMS)]
        forms = [held_out, *(other for other in others if other is not held_out)]
        self._teachers = [Teacher(model, form, kind, temperature) for form in forms]

    def compare(self, before: onnx.ModelProto, after: onnx.ModelProto) -> Compared:
        """Two quantized models; how far chance goes is told by batches of samples, each with all of its forms."""
        first, second = self._losses(before), self._losses(after)
        gap = second - first
        error = float(gap.std(ddof=1) / np.sqrt(len(gap))) if len(gap) > 1 else 0.0
        return Compared(float(first.mean()), float(second.mean()), ERRORS * error)

    def _losses(self, model: onnx.ModelProto) -> FloatArray:
        """Of each batch, the mean over forms."""
        session = Session(model, "the quantized model")
        losses = [teacher.losses_by(session.run) for teacher in self._teachers]
        return np.asarray(np.mean(losses, axis=0), np.float64)
