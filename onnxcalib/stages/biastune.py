"""Bias tuning: only the biases train, through the whole quantized model, towards the float model's outputs."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx

from onnxcalib.data import Dataset
from onnxcalib.engine.adam import Adam, cosine
from onnxcalib.engine.differentiate import Gradients
from onnxcalib.engine.gradients import NoGradientError
from onnxcalib.engine.inference import Session, Tensors
from onnxcalib.model.distillation import bias_name, distillation_loss, truth_name
from onnxcalib.model.layers import Layer
from onnxcalib.model.normalize import variance_name, with_statistics
from onnxcalib.model.prepare import Model
from onnxcalib.model.qdq import bias_scale, write_qdq
from onnxcalib.numerics.loss import TEMPERATURE, Head, log_probabilities
from onnxcalib.plan import QuantPlan
from onnxcalib.recipe import Engine
from onnxcalib.stages.calibrate import Progress
from onnxcalib.stages.memo import FORGETFUL, Memo
from onnxcalib.stages.rounding import BIAS_STEPS
from onnxcalib.stages.teacher import Teacher
from onnxcalib.targets import Storage, Target

FloatArray = npt.NDArray[np.float32]

STEPS = 200
BATCH = 16
RATE = 3e-3  # in deviations of the layer's output
CHECKS = 10
STATE = "state"  # the name of what is kept after each check


@dataclass(frozen=True)
class BiasTuned:
    """The tuned plan, and the held-out loss before and after; or why it was left alone."""

    plan: QuantPlan
    before: float
    after: float
    obstacle: NoGradientError | None = None


@dataclass(frozen=True)
class BiasTuner:
    """What bias tuning works on."""

    model: Model
    layers: Sequence[Layer]
    target: Target
    data: Dataset
    teacher: Teacher  # holds the held-out samples
    engine: Engine
    strict: bool = False

    def tune(self, plan: QuantPlan, progress: Progress, memo: Memo = FORGETFUL) -> BiasTuned:
        """The held-out samples choose among the start and the states on the way: at first the loss often rises."""
        before = self._loss(plan)
        if not self.teacher.heads or not any(layer.takes_bias for layer in self.layers):
            return BiasTuned(plan, before, before)
        try:
            training = _Training(self, plan)
        except NoGradientError as error:
            if self.strict:
                raise
            return BiasTuned(plan, before, before, error)
        best, least, done = plan, before, 0
        if (kept := memo.found([STATE])[0]) is not None:
            done, least, best = kept["done"], kept["least"], training.restore(kept)
        for step in range(done + 1, STEPS + 1):
            training.step(step)
            progress("bias tuning", step, STEPS)
            if step % (STEPS // CHECKS):
                continue
            trial = training.plan()
            loss = self._loss(trial)
            if loss < least:
                best, least = trial, loss
            memo.put(STATE, {"least": least, **training.state(step, best)})
        return BiasTuned(best, before, least)

    def written(self, plan: QuantPlan) -> onnx.ModelProto:
        """The quantized model with one byte a code."""
        return write_qdq(self.model, self.layers, plan, replace(self.target, storage=Storage.INT8))

    def _loss(self, plan: QuantPlan) -> float:
        return self.teacher.loss_of(self.written(plan))


class _Training:
    def __init__(self, tuner: BiasTuner, plan: QuantPlan) -> None:
        self.tuner, self.start = tuner, plan
        self.heads = tuner.teacher.heads
        self.session = Session(tuner.model.proto)
        feed = next(iter(tuner.data.batches(BATCH)))
        self.units = self._units(feed)
        starts = {layer.name: _start(plan, layer) for layer in tuner.layers if layer.takes_bias}
        biases = {name: np.asarray(value / self.units[name], np.float32) for name, value in starts.items()}
        proto = distillation_loss(
            tuner.written(self._with_biases(starts)), tuner.layers, biases, self.units, self.heads, self._truth(feed)
        )
        named = {bias_name(layer): biases[layer.name] for layer in tuner.layers if layer.name in biases}
        self.gradients = Gradients(proto, named, tuner.engine)
        self.adam = Adam(self.gradients.parameters, dict.fromkeys(named, RATE))
        self.feeds = self._endless()

    def step(self, number: int) -> None:
        feed = next(self.feeds)
        self.gradients.run({**feed, **{truth_name(name): value for name, value in self._truth(feed).items()}})
        self.adam.step(self.gradients.gradients, cosine(number, STEPS))

    def state(self, done: int, best: QuantPlan) -> dict[str, Any]:
        """Where the training stands, with the biases of the best plan so far."""
        biases = {name: params.bias for name, params in best.layers.items()}
        return {"done": done, "best": biases, "parameters": self.gradients.parameters, "moments": self.adam.moments}

    def restore(self, state: Mapping[str, Any]) -> QuantPlan:
        """Goes on from where another stood; gives the best plan until then."""
        for name, value in self.gradients.parameters.items():
            value[...] = state["parameters"][name]
        self.adam.restore(state["done"], state["moments"])
        self.feeds = itertools.islice(self.feeds, state["done"], None)
        best = {name: replace(params, bias=state["best"][name]) for name, params in self.start.layers.items()}
        return replace(self.start, layers=best)

    def plan(self) -> QuantPlan:
        """The plan with the biases as they are now."""
        values = {
            layer.name: self.gradients.parameters[bias_name(layer)] * self.units[layer.name]
            for layer in self.tuner.layers
            if bias_name(layer) in self.gradients.parameters
        }
        return self._with_biases(values)

    def _with_biases(self, biases: Mapping[str, FloatArray]) -> QuantPlan:
        params = dict(self.start.layers)
        for layer in self.tuner.layers:
            if layer.name in biases:
                bias = self._within_int32(layer, np.asarray(biases[layer.name], np.float32))
                params[layer.name] = replace(params[layer.name], bias=bias)
        return replace(self.start, layers=params)

    def _within_int32(self, layer: Layer, bias: FloatArray) -> FloatArray:
        if not self.tuner.target.integer_bias or layer.bias_node is not None:
            return bias
        most = bias_scale(self.start.layers[layer.name].grid, self.start.layer_input(layer.input)) * np.float32(
            BIAS_STEPS
        )
        return np.clip(bias, -most, most)

    def _units(self, feed: Tensors) -> dict[str, FloatArray]:
        """The deviation of each layer's output, its channels taken together."""
        layers = [layer for layer in self.tuner.layers if layer.takes_bias]
        found = Session(with_statistics(self.tuner.model.proto, layers)).run(feed)
        spread = {layer.name: np.sqrt(np.mean(found[variance_name(layer)])) for layer in layers}
        return {name: np.asarray(max(float(value), 1e-6), np.float32) for name, value in spread.items()}

    def _truth(self, feed: Tensors) -> dict[str, FloatArray]:
        outputs = self.session.run(feed)
        return {
            name: outputs[name]
            if head is Head.VALUES
            else np.exp(log_probabilities(outputs[name], head, TEMPERATURE)).astype(np.float32)
            for name, head in self.heads.items()
        }

    def _endless(self) -> Iterator[Tensors]:
        for _ in itertools.count():
            yield from self.tuner.data.batches(BATCH)


def _start(plan: QuantPlan, layer: Layer) -> FloatArray:
    bias = plan.layers[layer.name].bias
    return np.zeros(layer.channels, np.float32) if bias is None else bias
