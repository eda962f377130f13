"""Training through the whole quantized model, towards the float model's outputs: the biases alone, or all at once."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from onnxcalib.algorithms.reconstruction.weight_quantizers import WeightQuantizers, weight_name, weight_scale_name
from onnxcalib.algorithms.rounding import BIAS_STEPS, least_scale
from onnxcalib.algorithms.teacher import Teacher
from onnxcalib.autodiff.adam import Adam, cosine
from onnxcalib.autodiff.micro_batches import GROUPS, MicroBatchGradients
from onnxcalib.data import Dataset, first
from onnxcalib.data.augmentation import endless
from onnxcalib.data.padding import find_mask
from onnxcalib.data.split import pieces_of
from onnxcalib.errors import ModelError
from onnxcalib.model.bottlenecks import bottlenecks
from onnxcalib.model.channel_statistics import variance_name, with_statistics
from onnxcalib.model.layers import Layer
from onnxcalib.model.model_loss import (
    HINTED,
    Parameter,
    bias_name,
    distillation_loss,
    input_scale_name,
    model_reference,
)
from onnxcalib.model.placement import InsertionPoints
from onnxcalib.model.prepare import Model
from onnxcalib.model.qdq import bias_scale, write_qdq
from onnxcalib.model.shapes import with_single_samples
from onnxcalib.model.subgraph import with_outputs
from onnxcalib.numerics.positions import Counts, counts_for
from onnxcalib.numerics.quant_params import (
    QuantParams,
    dequantize,
    most_scale,
    of_each,
    quantize,
    with_least_scale,
    with_most_scale,
)
from onnxcalib.plan import LayerParams, QuantPlan
from onnxcalib.progress import NO_CHECKPOINT, Checkpoint, Progress
from onnxcalib.recipe import Engine
from onnxcalib.runtime.session import Session, Tensors, samples_in
from onnxcalib.targets import Dynamic, Placement, Target

FloatArray = npt.NDArray[np.float32]

BATCH = 8
SEQUENCES = 4  # of a batch, where every position is an example
# A batch goes through the network in pieces whose layers' outputs take this at most; a worker takes some 20 times it.
MICRO_BATCH_BYTES = 80 * 10**6  # two images of MobileNet-V2, whose step takes a tenth less CPU than with one
CHECKS = 10
END_TO_END_STEPS, SCALES_STEPS, BIAS_TUNING_STEPS = 16, 2, 2  # for each step of a layer that is asked for
# To train on: with 384 images of MobileNet-V2 at w4a4 the loss on others stands from two thirds of the usual steps on.
ENOUGH_SAMPLES = 400
SHRINK = 0.6  # for plans that were solved by layers, which leaves many weights at the edge of two quantized values
# Weights of few bits move faster: three times as fast left 4 to 27 % less loss on unseen samples at w2a4 and w3a3.
NARROW, NARROW_FACTOR = 3, 3
# Outputs of a few hundred samples say little about all others, inner tensors more: so much at first, half at last.
HINT_SHARE = 3.0


@dataclass(frozen=True)
class Schedule:
    """What trains through the network, and how fast; None: it stays as it is."""

    stage: str
    steps: int
    bias: float  # in deviations of the layer's output
    before: int = 0  # steps that others take of the same falling rates, before these
    after: int = 0  # and after
    weight: float | None = None  # in steps of the grid
    scale: float | None = None  # in shares of the scale
    hints: int = 0  # inner tensors that are imitated too, at most
    shrink: float = 1.0  # how far from its code a weight begins, of as far as it was
    last: bool = False  # the last state is taken: of many checks on few samples the best is one of luck
    patience: int | None = None  # checks without a gain after which it ends; None: at first the loss often rises


BIASES = Schedule("bias tuning", steps=200, bias=3e-3, patience=3)
END_TO_END = Schedule(
    "end-to-end AdaQuant", steps=1200, after=400, bias=3e-3, weight=2e-3, scale=3e-4, hints=16, last=True
)
# After second-order rounding of weights alone: of what was tried, training scales lowered the held-out loss the most.
SCALES = Schedule("end-to-end AdaQuant", steps=200, bias=3e-4, scale=1e-3)
# On the scales that are written, which may not move any more.
FINAL_SCALES = replace(
    END_TO_END, stage="end-to-end AdaQuant, final scales", steps=400, before=1200, after=0, scale=None
)


def scales_schedule(steps: int | None) -> Schedule:
    """Training of scales for as long as fits to how long layers are trained."""
    return SCALES if steps is None else replace(SCALES, steps=SCALES_STEPS * steps)


def schedules_for(steps: int | None, samples: int, *, solved: bool) -> tuple[Schedule, Schedule]:
    """Most of the steps, and the last quarter, on the scales that are written; as many as layers are trained for.

    Unless a number is asked for, so many samples, of which some are left out to judge by, say how many.
    """
    usual = END_TO_END.steps + FINAL_SCALES.steps
    share = float(np.clip(samples / ENOUGH_SAMPLES, 1, 2)) if steps is None else END_TO_END_STEPS * steps / usual
    early, late = (max(round(share * it.steps), 1) for it in (END_TO_END, FINAL_SCALES))
    first_part = replace(END_TO_END, steps=early, after=late, shrink=SHRINK if solved else END_TO_END.shrink)
    return first_part, replace(FINAL_SCALES, steps=late, before=early)


def bias_schedule(steps: int | None) -> Schedule:
    """Bias tuning for as long as fits to how long layers are trained."""
    return BIASES if steps is None else replace(BIASES, steps=BIAS_TUNING_STEPS * steps)


@dataclass(frozen=True)
class NetworkTuned:
    """The tuned plan, and the held-out loss before and after; or why it was left alone."""

    plan: QuantPlan
    before: float
    after: float
    skip_reason: str | None = None
    doubt: float = 0.0  # how far chance goes on few samples: what is worse by less is kept

    @property
    def kept(self) -> bool:
        """Whether it goes on with the tuned plan."""
        return self.after < self.before + self.doubt


@dataclass(frozen=True)
class NetworkTuner:
    """What training through the network works on."""

    model: Model
    layers: Sequence[Layer]
    points: InsertionPoints
    target: Target
    data: Dataset
    teacher: Teacher  # holds the held-out samples
    engine: Engine
    schedule: Schedule
    seed: int = 0
    workers: int = 1  # pieces of a batch that are differentiated side by side
    strict: bool = False
    bias_steps: float = BIAS_STEPS  # at most, of an integer bias
    frozen: Collection[str] = ()  # layers whose weights stay as they are

    def tune(self, plan: QuantPlan, progress: Progress, checkpoint: Checkpoint = NO_CHECKPOINT) -> NetworkTuned:
        """The held-out samples choose among the start and the states on the way, unless the last is to be taken."""
        before = self._loss(plan)
        if not self.teacher.kinds_that_count or not any(self._trains(layer) for layer in self.layers):
            return NetworkTuned(plan, before, before)
        try:
            return self._tuned(plan, before, progress, checkpoint)
        except ModelError as error:  # no gradient, or outputs with more or fewer rows than the float model's
            if self.strict:
                raise
            return NetworkTuned(plan, before, before, str(error))

    def _trains(self, layer: Layer) -> bool:
        """Whether anything of a layer may move."""
        schedule = self.schedule
        moves = schedule.weight is not None or (schedule.scale is not None and not self.target.power_of_two)
        return layer.takes_bias or (moves and layer.name not in self.frozen)

    def _tuned(self, plan: QuantPlan, before: float, progress: Progress, checkpoint: Checkpoint) -> NetworkTuned:
        training, schedule = NetworkTraining(self, plan), self.schedule
        best, least, done, vain = plan, before, 0, 0
        if (cached := checkpoint.found([schedule.stage])[0]) is not None:
            done, least, best, vain = cached["done"], cached["least"], cached["best"], cached["vain"]
            training.restore(cached)
        while done < schedule.steps and (schedule.patience is None or vain < schedule.patience):
            done += 1
            training.step(done)
            progress(schedule.stage, done, schedule.steps)
            if done % max(schedule.steps // CHECKS, 1) and done < schedule.steps:
                continue
            trial = training.plan()
            loss = self._loss(trial)
            vain += 1
            if schedule.last or loss < least:
                best, least, vain = trial, loss, 0
            checkpoint.put(schedule.stage, {"done": done, "least": least, "best": best, "vain": vain, **training.state})
        if done < schedule.steps:
            progress(schedule.stage, schedule.steps, schedule.steps)
        return NetworkTuned(best, before, least)

    def _loss(self, plan: QuantPlan) -> float:
        return self.teacher.loss_of(write_qdq(self.model, self.layers, plan, self.target.simulated))


class NetworkTraining:
    """Weights, scales and biases on their way from a plan to something better."""

    def __init__(self, tuner: NetworkTuner, plan: QuantPlan) -> None:
        self.tuner, self.start = tuner, plan
        self.most = {name: self._most_scale(name, qparams) for name, qparams in plan.inputs.items()}
        self.kinds = tuner.teacher.kinds_that_count
        self.batch = SEQUENCES if any(kind.is_of_tokens for kind in self.kinds.values()) else BATCH
        self.hints = self._hints()
        self.session = Session(with_outputs(tuner.model.proto, [*self.kinds, *self.hints]))
        self.micro_batch = self._micro_batch_size()
        feed = next(iter(tuner.data.batches(self.micro_batch)))
        self.micro_batches = -(-self.batch // samples_in(feed, tuner.data))
        feed = next(iter(tuner.data.batches(self.batch)))
        parameters, rates = self._parameters(feed)
        self.units = {name: parameter.unit for name, parameter in parameters.items()}
        self.parameters = {name: np.array(it.start, np.float32, order="C") for name, it in parameters.items()}
        self.quantizers = WeightQuantizers.of(tuner.layers, plan, parameters)
        read = {name: it for name, it in parameters.items() if not self.quantizers.owns(name)}
        quantized = self.quantizers.quantized(self.parameters)
        read |= {name: Parameter(value, np.ones((), np.float32)) for name, value in quantized.items()}
        started = write_qdq(tuner.model, tuner.layers, self._plan_of(self.parameters), plainest(tuner.target))
        outputs = self.session.run(feed)
        self.mask = find_mask(tuner.data)
        counts = self._counts(feed)
        self.padded = [name for name, output in outputs.items() if counts_for(output, counts) is not None]
        proto = distillation_loss(started, tuner.layers, plan, read, self.kinds, outputs, self.hints, self.padded)
        if self.micro_batch == 1 and set(pieces_of(tuner.data).sizes()) == {1}:
            single = next(iter(tuner.data.batches(1)))
            proto = with_single_samples(proto, {**single, **self._references(single)})
        starts = {name: it.start for name, it in read.items()}
        self.gradients = MicroBatchGradients(proto, starts, tuner.engine, tuner.workers)
        self.adam = Adam(self.parameters, rates)
        self.feeds = endless(tuner.data, self.micro_batch, tuner.seed)

    def _most_scale(self, name: str, qparams: QuantParams) -> np.float32:
        """Where the activation that makes a tensor cuts: beyond it lies nothing, and runtimes would not fuse."""
        kind = self.tuner.target.activation_scheme(qparams.bits, positive=not qparams.signed)
        return most_scale(qparams, self.tuner.points.tensors[name].bounds, kind)

    def _micro_batch_size(self) -> int:
        """How many samples go through the network at a time."""
        size = sum(self._sizes([layer.activated for layer in self.tuner.layers]).values())
        return int(np.clip(MICRO_BATCH_BYTES // max(size, 1), 1, self.batch // GROUPS))

    def _hints(self) -> list[str]:
        """Inputs of layers at the borders of blocks; where there are many, the smallest."""
        read = {layer.input for layer in self.tuner.layers}
        found = [name for name in bottlenecks(self.tuner.model.proto.graph) if name in read and name not in self.kinds]
        if len(found) <= self.tuner.schedule.hints:
            return found
        sizes = self._sizes(found)
        chosen = sorted(found, key=sizes.__getitem__)[: self.tuner.schedule.hints]
        return [name for name in found if name in chosen]

    def _sizes(self, names: Sequence[str]) -> dict[str, float]:
        """The bytes of tensors for one sample."""
        names = list(dict.fromkeys(names))
        feed = next(iter(first(self.tuner.data, 1).batches(1)))
        outputs = Session(with_outputs(self.tuner.model.proto, names)).run(feed)
        return {name: outputs[name].nbytes / samples_in(feed, self.tuner.data) for name in names}

    def step(self, number: int) -> None:
        """One step on a batch."""
        feeds = list(itertools.islice(self.feeds, self.micro_batches))
        schedule = self.tuner.schedule
        rate = cosine(schedule.before + number, schedule.before + schedule.steps + schedule.after)
        self.hinted = {HINTED: np.asarray(HINT_SHARE * (1 + rate) / 2, np.float32)} if self.hints else {}
        self._read(self.parameters)
        self._read(self.quantizers.quantized(self.parameters))
        found = self.gradients.run(feeds, self._with_reference)
        found |= self.quantizers.gradients(self.parameters, found)
        self.adam.step(found, rate)
        for tensor, most in self.most.items():
            name = input_scale_name(tensor)
            if name in self.parameters:
                np.minimum(self.parameters[name], most / self.units[name], out=self.parameters[name])

    def _read(self, values: Mapping[str, FloatArray]) -> None:
        """What the network reads from now on."""
        for name in values.keys() & self.gradients.parameters.keys():
            self.gradients.parameters[name][...] = values[name]

    @property
    def state(self) -> dict[str, Any]:
        """Where the training stands."""
        return {"parameters": self.parameters, "moments": self.adam.moments}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on from where another stood."""
        for name, value in self.parameters.items():
            value[...] = state["parameters"][name]
        self.adam.restore(state["done"], state["moments"])
        self.feeds = itertools.islice(self.feeds, state["done"] * self.micro_batches, None)

    def plan(self) -> QuantPlan:
        """The plan with the parameters as they are now."""
        return self._plan_of(self.parameters)

    def _parameters(self, feed: Tensors) -> tuple[dict[str, Parameter], dict[str, float]]:
        """What trains, and at which rate."""
        parameters: dict[str, Parameter] = {}
        rates: dict[str, float] = {}

        def add(name: str, value: FloatArray, unit: npt.ArrayLike, rate: float) -> None:
            unit = np.asarray(unit, np.float32)
            parameters[name], rates[name] = Parameter(np.asarray(value / unit, np.float32), unit), rate

        schedule, plan = self.tuner.schedule, self.start
        for layer in self.tuner.layers:
            params = plan.layers[layer.name]
            if layer.name in self.tuner.frozen:
                continue
            if schedule.weight is not None:
                unit = of_each(params.qparams, params.weight.shape)[0]
                rate = schedule.weight * (1 if params.qparams.bits > NARROW else NARROW_FACTOR)
                add(weight_name(layer), _centred(params, schedule.shrink), unit, rate)
            if schedule.scale is not None and not self.tuner.target.power_of_two:
                add(weight_scale_name(layer), params.qparams.scale, params.qparams.scale, schedule.scale)
                if layer.input in plan.inputs:
                    scale = plan.inputs[layer.input].scale
                    add(input_scale_name(layer.input), scale, scale, schedule.scale)
        for layer, deviation in self._deviations(feed):
            add(bias_name(layer), _bias(plan, layer), deviation, schedule.bias)
        return parameters, rates

    def _plan_of(self, parameters: Mapping[str, FloatArray]) -> QuantPlan:
        values = {name: np.asarray(value * self.units[name], np.float32) for name, value in parameters.items()}
        plan = self.start
        trained = {name: values.get(input_scale_name(name)) for name in plan.inputs}
        inputs = {
            name: with_most_scale(_moved(plan.inputs[name], scale), self.most[name])
            for name, scale in trained.items()
            if scale is not None
        }
        plan = replace(plan, inputs={**plan.inputs, **inputs}) if inputs else plan
        layers = {layer.name: self._params_of(plan, layer, values) for layer in self.tuner.layers}
        return replace(plan, layers={**plan.layers, **layers})

    def _params_of(self, plan: QuantPlan, layer: Layer, values: Mapping[str, FloatArray]) -> LayerParams:
        params, target = plan.layers[layer.name], self.tuner.target
        bias, read = values.get(bias_name(layer), params.bias), plan.layer_input(layer.input)
        weight, scale = values.get(weight_name(layer)), values.get(weight_scale_name(layer))
        if weight is not None or scale is not None:
            qparams = params.qparams if scale is None else _moved(params.qparams, scale)
            if bias is not None:
                least = least_scale(target, bias, read, per_channel=qparams.axis is not None)
                qparams = with_least_scale(qparams, least)
            codes = params.quantized if weight is None else quantize(weight, qparams)
            weight = dequantize(codes, qparams) if weight is None else weight
            params = replace(params, quantized=codes, qparams=qparams, weight=weight, input=None)
        if bias is not None and read is not None and target.integer_bias and layer.op in target.bias_ops:
            most = bias_scale(params.qparams, read) * np.float32(self.tuner.bias_steps)
            bias = np.clip(bias, -most, most)
        return params if bias is params.bias else replace(params, bias=bias)

    def _deviations(self, feed: Tensors) -> list[tuple[Layer, float]]:
        """The deviation of the output of each layer that takes a bias, its channels taken together."""
        layers = [layer for layer in self.tuner.layers if layer.takes_bias]
        found = Session(with_statistics(self.tuner.model.proto, layers)).run(feed) if layers else {}
        return [(layer, max(float(np.sqrt(np.mean(found[variance_name(layer)]))), 1e-6)) for layer in layers]

    def _with_reference(self, feed: Tensors) -> Tensors:
        return {**feed, **self._references(feed), **self.hinted}

    def _references(self, feed: Tensors) -> Tensors:
        return model_reference(self.session.run(feed), self.kinds, self.padded, self._counts(feed))

    def _counts(self, feed: Tensors) -> Counts | None:
        return None if self.mask is None else feed[self.mask] != 0


def plainest(target: Target) -> Target:
    """Nothing for the sake of runtimes: weights right at their layers, and no Relu left out for a grid that moves."""
    simple = replace(target, placement=Placement.LAYER_INPUTS, dynamic=Dynamic.QDQ)
    return replace(simple, float_compute=False, float_activations=False).in_place


def _moved(qparams: QuantParams, scale: FloatArray) -> QuantParams:
    """The grid with a trained scale, which must not come near zero."""
    return replace(qparams, scale=np.maximum(scale, np.float32(0.1) * qparams.scale))


def _centred(params: LayerParams, shrink: float) -> FloatArray:
    """Weights shrunk towards the grid: where many are at the edge of two, all would jump."""
    quantized = dequantize(params.quantized, params.qparams)
    half = of_each(params.qparams, quantized.shape)[0] / 2
    return np.asarray(quantized + shrink * np.clip(params.weight - quantized, -half, half), np.float32)


def _bias(plan: QuantPlan, layer: Layer) -> FloatArray:
    bias = plan.layers[layer.name].bias
    return np.zeros(layer.channels, np.float32) if bias is None else bias
