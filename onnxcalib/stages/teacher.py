"""The float model as the teacher: its outputs on the calibration data, and how far a quantized model is from them."""

from __future__ import annotations

import onnx

from onnxcalib.data import Dataset
from onnxcalib.engine.inference import Session, Tensors
from onnxcalib.model.heads import find_heads
from onnxcalib.model.prepare import Model
from onnxcalib.numerics.loss import Distillation

BATCH = 32


class Teacher:
    """The float outputs on some data, kept for many comparisons."""

    def __init__(self, model: Model, data: Dataset) -> None:
        self.data = data
        self.heads = find_heads(model.proto)
        session = Session(model.proto, model.source)
        self._truth: list[Tensors] = [self._heads_of(session.run(feed)) for feed in data.batches(BATCH)]

    def loss_of(self, model: onnx.ModelProto) -> float:
        """The distillation loss of a quantized model."""
        session, loss = Session(model, "the quantized model"), Distillation(self.heads)
        for feed, truth in zip(self.data.batches(BATCH), self._truth, strict=True):
            loss.update(truth, session.run(feed))
        return loss.value

    def _heads_of(self, outputs: Tensors) -> Tensors:
        return {name: outputs[name] for name in self.heads}
