"""Held-out samples in several forms: a hundred images alone judge roughly whether training has helped."""

from __future__ import annotations

import numpy as np
import onnx

from onnxcalib.algorithms.teacher import Loss, Teacher
from onnxcalib.data import Dataset
from onnxcalib.data.augmentation import augmented
from onnxcalib.model.prepare import Model
from onnxcalib.runtime.session import Session

# Of six trainings of three networks at w4a4, 128 samples as they are told two right that 1,488 others tell, four forms
# of them five.
FORMS = 4


class Validation:
    """The float outputs on samples as they are and, of images, on other forms of them."""

    def __init__(self, model: Model, held_out: Dataset, kind: Loss, temperature: float, seed: int) -> None:
        others = [augmented(held_out, form, seed) for form in range(1, FORMS)]
        forms = [held_out, *(other for other in others if other is not held_out)]
        self._teachers = [Teacher(model, form, kind, temperature) for form in forms]

    def loss_of(self, model: onnx.ModelProto) -> float:
        """The mean of the losses of a quantized model on all forms."""
        session = Session(model, "the quantized model")
        return float(np.mean([teacher.loss_by(session.run) for teacher in self._teachers]))
