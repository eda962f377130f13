"""AdaQuant: a layer's weights, bias and ranges trained against its float output, through the quantizers."""

from __future__ import annotations

import math
import threading
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from onnxcalib.algorithms.reconstruction.activations import DiskActivations
from onnxcalib.algorithms.rounding import least_scale
from onnxcalib.autodiff.adam import Adam, cosine
from onnxcalib.autodiff.gradients import Loss, SharedLoss
from onnxcalib.autodiff.interface import NoGradientError
from onnxcalib.autodiff.micro_batches import GROUPS, MicroBatchGradients
from onnxcalib.autodiff.opened import OpenedSessions
from onnxcalib.model.layer_form import LayerForm
from onnxcalib.model.layer_loss import (
    BIAS,
    INPUT_LOW,
    INPUT_RANGE,
    ROUNDING,
    SHARPNESS,
    STRENGTH,
    TARGET,
    WEIGHT,
    WEIGHT_LOW,
    WEIGHT_RANGE,
    LayerLoss,
    layer_loss,
    ranges,
    starts,
    step_bounds,
)
from onnxcalib.model.layers import Layer
from onnxcalib.model.loss_writer import LOSS, Quantizer, scale_of
from onnxcalib.model.prepare import Model
from onnxcalib.numerics.quant_params import (
    UNBOUNDED,
    Bounds,
    QuantParams,
    QuantScheme,
    make_qparams,
    quantize,
    with_least_scale,
    within,
)
from onnxcalib.plan import LayerParams
from onnxcalib.recipe import DEFAULTS, Engine, LayerOptimizer, Training
from onnxcalib.runtime.threads import in_threads
from onnxcalib.targets import Target

FloatArray = npt.NDArray[np.float32]
Parameters = Mapping[str, FloatArray]

HELD_OUT_SHARE = 8
HELD_OUT_MOST = 64
VALUES = 2**24  # of the outputs of a batch, at most: a head of many classes has more of them than it can learn from
FEWEST = 4  # samples of a batch; the held-out samples are four times as many as a batch needs
CHECKS = 10

OPENED = OpenedSessions()  # of this process
# The input and output of a batch, where sessions stay open for others: of more than this, steps take far longer than
# opening them, and what sessions keep of memory is several times as much.
SHARED_BYTES = 2**21


@dataclass(frozen=True)
class Schedule:
    """How a layer is trained."""

    steps: int
    batch: int  # samples at most
    rows: int | None  # of output positions: as many as this are enough for a step
    rates: Mapping[str, float]
    relative: bool  # rates count in steps of the grid, shares of the range and deviations of the output
    decay: bool  # rates fall to nothing along a cosine
    floor: float = 0.0  # a start whose error is less of its output's energy stays: nothing after it could tell


PAPER = Schedule(
    steps=DEFAULTS["steps"], batch=50, rows=None, relative=False, decay=False,
    rates={
        WEIGHT: 1e-5, BIAS: 1e-3, WEIGHT_RANGE: 1e-3, WEIGHT_LOW: 1e-3, INPUT_RANGE: 1e-1, INPUT_LOW: 1e-1,
        ROUNDING: 2e-2,
    },
)  # fmt: skip
STANDARD = Schedule(
    steps=DEFAULTS["steps"], batch=64, rows=16384, relative=True, decay=True, floor=2e-4,
    rates={
        WEIGHT: 3e-2, BIAS: 1e-3, WEIGHT_RANGE: 3e-3, WEIGHT_LOW: 3e-3, INPUT_RANGE: 3e-3, INPUT_LOW: 3e-3,
        ROUNDING: 2e-2,
    },
)  # fmt: skip
SCHEDULES = {Training.STANDARD: STANDARD, Training.PAPER: PAPER}


@dataclass(frozen=True)
class LayerProblem:
    """A layer, where it starts, and what may change."""

    model: Model
    layer: Layer
    target: Target
    start: LayerParams
    bits: int  # of the weight
    qparams: QuantParams | None  # on which the layer reads its input; None: that is float
    input_scheme: QuantScheme | None  # None: the inputs come quantized, or stay float
    trains_input: bool  # else its grid stays as it is
    optimizer: LayerOptimizer = LayerOptimizer.ADAQUANT
    bounds: Bounds = UNBOUNDED  # of what the layer reads: a trained grid stays within


@dataclass(frozen=True)
class Optimised:
    """The trained layer, and its held-out error relative to its output, before and after."""

    params: LayerParams
    before: float
    after: float
    skip_reason: str | None = None  # why it could not be trained


class AbandonedError(Exception):
    """Nobody waits for this layer any more."""


def optimise(
    problem: LayerProblem,
    inputs: DiskActivations,
    targets: DiskActivations,
    schedule: Schedule,
    engine: Engine,
    seed: int,
    threads: int,
    stop: threading.Event | None = None,
) -> Optimised:
    """Trains on most samples; the others choose the best state, which may be the start."""
    training = LayerTraining(problem, inputs, targets, schedule, engine, threads)
    rng = np.random.default_rng([seed, zlib.crc32(problem.layer.name.encode()), problem.bits])
    best, before = training.start, training.judge(training.start)
    if before < schedule.floor:
        return Optimised(problem.start, before, before)
    least = before
    for done in range(1, schedule.steps + 1):
        if stop is not None and stop.is_set():
            raise AbandonedError
        training.step(rng, done)
        if done % max(schedule.steps // CHECKS, 1) == 0:
            error = training.judge(training.parameters)
            if error < least:
                least, best = error, {name: value.copy() for name, value in training.parameters.items()}
    if least >= before:
        return Optimised(problem.start, before, before)
    return Optimised(training.params(best), before, least)


def parts(samples: int) -> tuple[list[int], list[int]]:
    """The samples to train on, and those that judge; a single one does both."""
    held = min(samples // HELD_OUT_SHARE, HELD_OUT_MOST)
    if held == 0:
        return list(range(samples)), list(range(samples))
    return list(range(samples - held)), list(range(samples - held, samples))


class LayerTraining:
    """A layer on its way from its start to something better."""

    def __init__(
        self,
        problem: LayerProblem,
        inputs: DiskActivations,
        targets: DiskActivations,
        schedule: Schedule,
        engine: Engine,
        threads: int,
    ) -> None:
        assert inputs.shape is not None
        assert targets.shape is not None
        self.problem, self.schedule = problem, schedule
        self.inputs, self.targets = inputs, targets
        self.train, self.held_out = parts(inputs.samples)
        self.batch = _batch(schedule, targets.shape, problem.layer)
        self.held_out = self.held_out[: 4 * self.batch]
        self.adaround = problem.optimizer is LayerOptimizer.ADAROUND
        self.loss = _loss(problem, schedule, targets.energy)
        self.proto = layer_loss(problem.model, problem.layer, self.loss, (inputs.shape[1:], targets.shape[1:]))
        self.start = starts(self.loss)
        self.form = LayerForm.of(self.proto, (*self.start, TARGET, STRENGTH, SHARPNESS, LOSS))
        self.shares = SharedLoss(self._sessions, self.form.key, self.form.own)
        # A layer that is alone on the machine takes its batch in pieces: threads inside a node gain next to nothing.
        self.pieces = 1 if threads == 1 else GROUPS
        self.engine, self.threads = engine, threads
        self.forward = Loss(self.form.model, threads=1, shares=self.shares)

    @property
    def _sessions(self) -> OpenedSessions:
        sample = math.prod(self.inputs.shape or ()) + math.prod(self.targets.shape or ())
        return OPENED if 4 * self.batch * sample <= SHARED_BYTES else OpenedSessions(0)

    @cached_property
    def gradients(self) -> MicroBatchGradients:
        """Made for the first step: a layer whose start will do takes none."""
        try:
            return MicroBatchGradients(self.form.model, self.start, self.engine, self.threads, self.shares)
        except NoGradientError:  # once more, to fail in the words of the model: a form has no names
            return MicroBatchGradients(self.proto, self.start, self.engine, self.threads)

    @cached_property
    def adam(self) -> Adam:
        """What moves the parameters."""
        return Adam(self.parameters, {name: self.schedule.rates[name] for name in self.parameters})

    @property
    def parameters(self) -> dict[str, FloatArray]:
        """As they are now; they change in place."""
        return self.gradients.parameters

    def step(self, rng: np.random.Generator, done: int) -> None:
        """One step; `done` counts it."""
        count = min(self.batch, len(self.train))
        pieces = min(self.pieces, count)  # of the same size, so that every sample counts as much
        chosen = sorted(rng.choice(self.train, count - count % pieces, replace=False))
        progress, size = done / self.schedule.steps, len(chosen) // pieces
        parts = [chosen[place : place + size] for place in range(0, len(chosen), size)]
        gradients = self.gradients.run(parts, lambda part: self._feed(part, progress))
        for gradient in gradients.values():  # of the whole batch: beside Adam's epsilon their size matters
            np.multiply(gradient, np.float32(1 / pieces), out=gradient)
        self.adam.step(gradients, cosine(done, self.schedule.steps) if self.schedule.decay else 1.0)
        self._keep_bounds()

    def _keep_bounds(self) -> None:
        """Takes the grid of the inputs back to where no code is wasted on values that its activation cuts off."""
        scheme = self.problem.input_scheme
        if INPUT_RANGE not in self.parameters or scheme is None:
            return
        found = self._values(self.parameters)
        free = _qparams(found[INPUT_RANGE], found.get(INPUT_LOW), scheme, None)
        held = within(free, self.problem.bounds, scheme)
        if (held.scale, held.zero_point) != (free.scale, free.zero_point):
            for name, value in ranges(_quantizer(held, scheme, trained=True), INPUT_RANGE, INPUT_LOW).items():
                self.parameters[name][...] = value / self.loss.units.get(name, 1.0)

    def _values(self, parameters: Parameters) -> dict[str, FloatArray]:
        units = self.loss.units
        return {name: np.asarray(value * units.get(name, 1.0), np.float32) for name, value in parameters.items()}

    def judge(self, parameters: Parameters) -> float:
        """The error on the held-out samples, with every rounding decided."""
        decided = dict(parameters)
        if self.adaround:
            decided[ROUNDING] = np.where(decided[ROUNDING] >= 0, np.float32(20), np.float32(-20))
        size = max(self.batch // self.pieces, 1)
        parts = [self.held_out[place : place + size] for place in range(0, len(self.held_out), size)]

        def error(part: Sequence[int]) -> float:
            return len(part) * self.forward.run({**self._feed(part, None), **decided})

        errors = [error(part) for part in parts] if self.pieces == 1 else in_threads(error, parts)
        return sum(errors) / len(self.held_out)

    def _feed(self, chosen: Sequence[int], progress: float | None) -> dict[str, FloatArray]:
        feed = {self.form.names[self.problem.layer.input]: self.inputs.read(chosen), TARGET: self.targets.read(chosen)}
        if self.adaround:
            # Roundings move freely at first, then are pushed to decide.
            late = 0.0 if progress is None else max(0.0, (progress - 0.2) / 0.8)
            feed[STRENGTH] = np.asarray(0.05 if late else 0.0, np.float32)
            feed[SHARPNESS] = np.asarray(20 - 18 * late, np.float32)
        return feed

    def params(self, parameters: Parameters) -> LayerParams:
        """The trained layer as quantized values and grids."""
        problem, loss, values = self.problem, self.loss, self._values(parameters)
        scheme, axis = loss.weights.scheme, loss.weights.axis
        bias = values.get(BIAS, problem.start.bias)
        qparams = problem.start.qparams
        if WEIGHT_RANGE in values:
            qparams = _qparams(values[WEIGHT_RANGE], values.get(WEIGHT_LOW), scheme, axis)
            qparams = replace(qparams, block=loss.weights.block)
        read, own = problem.qparams, None
        if INPUT_RANGE in values and problem.input_scheme is not None:
            own = _qparams(values[INPUT_RANGE], values.get(INPUT_LOW), problem.input_scheme, None)
            read = own = within(own, problem.bounds, problem.input_scheme)
        if bias is not None:
            least = least_scale(problem.target, bias, read, per_channel=axis is not None)
            qparams = with_least_scale(qparams, least)
        weight = self._rounded(parameters[ROUNDING]) if self.adaround else values[WEIGHT]
        return LayerParams(quantize(weight, qparams), qparams, bias, weight, own)

    def _rounded(self, rounding: FloatArray) -> FloatArray:
        quantizer, weight = self.loss.weights, self.loss.weight
        scale = quantizer.spread(scale_of(quantizer), weight.shape)
        quantized = np.floor(weight / scale) + (rounding >= 0)
        return np.asarray(np.clip(quantized, *step_bounds(quantizer, weight.shape)) * scale, np.float32)


def _batch(schedule: Schedule, shape: Sequence[int], layer: Layer) -> int:
    """Layers with many output positions learn as much from fewer samples."""
    if schedule.rows is None:
        return schedule.batch
    values = max(math.prod(shape), 1)
    rows = max(values // layer.channels, 1)
    most = int(np.clip(VALUES // values, FEWEST, schedule.batch))
    return int(np.clip(math.ceil(schedule.rows / rows), FEWEST, most))


def _qparams(range_: FloatArray, low: FloatArray | None, scheme: QuantScheme, axis: int | None) -> QuantParams:
    """The grid that the loss used; a range that has moved off zero keeps its step, not its ends."""
    if low is None:
        return make_qparams(-range_, range_, scheme, axis)
    (first, last), scale = scheme.limits, scale_of(Quantizer(scheme, axis, low, range_, trained=True))
    zero = np.clip(np.rint(first - low / scale), first, last).astype(np.int32)
    return QuantParams(scale, zero, scheme.bits, scheme.signed, first, last, axis)


def _quantizer(qparams: QuantParams, scheme: QuantScheme, *, trained: bool) -> Quantizer:
    low, high = qparams.range
    if scheme.symmetric:
        return Quantizer(scheme, qparams.axis, -high, high, trained, qparams.block)
    return Quantizer(scheme, qparams.axis, low, high - low, trained, qparams.block)


def _loss(problem: LayerProblem, schedule: Schedule, energy: float) -> LayerLoss:
    layer, start = problem.layer, problem.start
    adaround = problem.optimizer is LayerOptimizer.ADAROUND
    scheme = problem.target.weight_scheme(problem.bits)
    scheme = replace(scheme, symmetric=scheme.symmetric or start.qparams.is_symmetric)
    weights = _quantizer(start.qparams, scheme, trained=not (adaround or scheme.power_of_two))
    inputs = None
    if problem.input_scheme is not None and problem.qparams is not None:
        trained = problem.trains_input and not problem.input_scheme.power_of_two
        inputs = _quantizer(problem.qparams, problem.input_scheme, trained=trained)
    bias = start.bias
    if bias is None and layer.takes_bias:
        bias = np.zeros(layer.channels, np.float32)
    loss = LayerLoss(start.weight, weights, inputs, bias, {}, energy, adaround)
    return replace(loss, units=_units(loss)) if schedule.relative else loss


def _units(loss: LayerLoss) -> dict[str, FloatArray | float]:
    """Steps for weights, ranges for ranges, the output's deviation for the bias."""
    units: dict[str, FloatArray | float] = {
        WEIGHT: loss.weights.spread(scale_of(loss.weights), loss.weight.shape),
        BIAS: max(float(np.sqrt(loss.energy)), 1e-12),
    }
    for quantizer, names in ((loss.weights, (WEIGHT_RANGE, WEIGHT_LOW)), (loss.inputs, (INPUT_RANGE, INPUT_LOW))):
        if quantizer is not None:
            units |= dict.fromkeys(names, np.maximum(quantizer.range, np.float32(1e-8)))
    return units
