"""Batch-norm tuning: channel statistics restored through the quantized model, re-folded into scales and biases."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx

from onnxcalib.algorithms.handed_on import HandedOn, RunningStretch
from onnxcalib.algorithms.rounding import least_scale
from onnxcalib.algorithms.teacher import Teacher
from onnxcalib.data import Dataset, first
from onnxcalib.data.padding import find_mask
from onnxcalib.model.channel_statistics import (
    REACH,
    SHARES,
    TINY_VARIANCE,
    bound_names,
    mean_name,
    statistics_shape,
    variance_name,
    wanted_name,
    with_statistics,
)
from onnxcalib.model.layers import Layer
from onnxcalib.model.prepare import Model
from onnxcalib.model.qdq import write_part, write_qdq
from onnxcalib.model.stretches import Stretch, Stretches
from onnxcalib.model.subgraph import with_outputs
from onnxcalib.numerics.positions import counts_for
from onnxcalib.numerics.quant_params import QuantParams, broadcast
from onnxcalib.plan import LayerParams, QuantPlan
from onnxcalib.progress import Progress
from onnxcalib.recipe import BatchNormReference
from onnxcalib.runtime.session import Session, Tensors, samples_in
from onnxcalib.targets import Dynamic, Target

FloatArray = npt.NDArray[np.float64]
Measure = Callable[[int, int, Tensors], Tensors]  # of the batch at a place, with so many samples

# Samples whose statistics are taken together: so many, and fewer where layers make more bytes of them than that.
# Of MobileNet-V2 8 are as good as 32: 2 % less loss at w4a4, 0.4 % more at w4a8.
BATCH, BATCH_BYTES = 32, 2**28
ROUNDS = 6
# A channel whose spread is off by more is broken, not shrunk: no factor repairs it, and a huge one spoils the grid.
LIMITS = (0.25, 4.0)
FAR = np.float32(1e30)  # a bound that nothing reaches
MOST_LAYERS = 64  # in one graph that measures them: beyond that, to open it takes longer a layer the more it has
ROWS, POSITIONS = 14, 512  # of a map at least, that channel statistics are taken of; neighbours tell the same


@dataclass(frozen=True)
class ChannelStatistics:
    """Mean and variance of each channel after a layer's bias."""

    mean: FloatArray
    variance: FloatArray


@dataclass(frozen=True)
class Tuned:
    """The tuned plan, and the held-out loss before and after."""

    plan: QuantPlan
    before: float
    after: float
    rounds: int


class FloatStatistics:
    """Channel statistics of the float model on each batch, measured once, however many plans are tuned."""

    def __init__(
        self, model: Model, layers: Sequence[Layer], data: Dataset, reach: float = REACH, most: int = MOST_LAYERS
    ) -> None:
        self._reach = reach
        self.layers = [layer for layer in layers if layer.takes_bias]
        self.mask = find_mask(data)
        feed = next(iter(first(data, 2).batches(2)))
        self.padded, self.row_steps, made = _how_measured(model, self.layers, feed, self.mask)
        self.batch = _fitting(made // max(samples_in(feed, data), 1))
        self.stretches = Stretches(model.proto, self.layers, most)
        self._known: dict[tuple[str, int, int], Tensors] = {}

    def measuring(self, stretch: Stretch, model: onnx.ModelProto, handed_on: HandedOn) -> Measure:
        """Gives those of the batch at a place of the data, with so many samples; stretch by stretch."""
        running: RunningStretch | None = None

        def measure(place: int, samples: int, feed: Tensors) -> Tensors:
            nonlocal running
            key = (stretch.layers[0].name, place, samples)
            if key not in self._known:
                if running is None:
                    session = Session(self.with_statistics(model, stretch, None, self._reach))
                    running = handed_on.open(stretch, session)
                # Copies: what onnxruntime returns may lie in the memory of a large tensor, and would hold it.
                self._known[key] = {name: value.copy() for name, value in running.run(feed).items()}
            return self._known[key]

        return measure

    def with_statistics(
        self, model: onnx.ModelProto, stretch: Stretch, limits: tuple[float, float] | None, reach: float = REACH
    ) -> onnx.ModelProto:
        """The stretch, float or quantized, with the statistics of its layers; with limits they are corrected."""
        padded = [layer.name for layer in stretch.layers if layer.name in self.padded]
        return with_statistics(model, stretch.layers, limits, reach, padded, self.row_steps, stretch.makes)


@dataclass(frozen=True)
class Tuner:
    """What every round works on."""

    model: Model
    layers: Sequence[Layer]
    target: Target
    data: Dataset
    teacher: Teacher
    reference: BatchNormReference
    reach: float = REACH
    rounds: int = ROUNDS
    batch: int | None = None  # None: as many samples as those of the float model are taken of
    floats: FloatStatistics | None = None  # of the same data, where several plans are tuned

    def tune(self, plan: QuantPlan, progress: Progress) -> Tuned:
        """Rounds of tuning for as long as the held-out loss falls; the best plan of all is kept."""
        before = best = self._loss(plan)
        if not self.rounds or not any(layer.takes_bias for layer in self.layers):
            return Tuned(plan, before, before, 0)
        floats = self._floats()
        for done in range(self.rounds):
            float_stats, quantized_stats = self.statistics(plan, progress, done, floats)
            trials = [
                refold(plan, self.layers, self.target, float_stats, quantized_stats, scale=scale)
                for scale in (True, False)
            ]
            losses = [self._loss(trial) for trial in trials]
            if min(losses) >= best:
                return Tuned(plan, before, best, done)
            best = min(losses)
            plan = trials[losses.index(best)]
        return Tuned(plan, before, best, self.rounds)

    def _loss(self, plan: QuantPlan) -> float:
        return self.teacher.loss_of(write_qdq(self.model, self.layers, plan, self.target.simulated))

    def _floats(self) -> FloatStatistics:
        return self.floats or FloatStatistics(self.model, self.layers, self.data, self.reach)

    def statistics(
        self, plan: QuantPlan, progress: Progress, done_rounds: int = 0, floats: FloatStatistics | None = None
    ) -> tuple[dict[str, ChannelStatistics], dict[str, ChannelStatistics]]:
        """Statistics of the float model, and of the quantized one whose earlier layers are already corrected."""
        floats = floats or self._floats()
        sums = (_Sums(floats.layers), _Sums(floats.layers))
        with tempfile.TemporaryDirectory(prefix="onnxcalib_") as folder:
            handed_on = [HandedOn(Path(folder) / kind) for kind in ("float", "quantized")]
            feeds = _Feeds(self.data, self.batch or floats.batch, floats.mask if floats.padded else None)
            for done, (stretch, model) in enumerate(floats.stretches):
                measure = floats.measuring(stretch, model, handed_on[0])
                student = handed_on[1].open(stretch, self._student(plan, stretch, model, floats))
                for place, samples, feed in feeds.of(stretch):
                    wanted = self._wanted(stretch.layers, measure(place, samples, feed))
                    sums[0].add(stretch.layers, wanted, samples)
                    sums[1].add(stretch.layers, student.run(feed | _as_inputs(stretch.layers, wanted)), samples)
                    seen = (done_rounds * len(floats.stretches) + done) * len(self.data) + feeds.until(place)
                    progress("batch norm", seen, self.rounds * len(floats.stretches) * len(self.data))
        return sums[0].statistics(), sums[1].statistics()

    def _student(self, plan: QuantPlan, stretch: Stretch, model: onnx.ModelProto, floats: FloatStatistics) -> Session:
        target = replace(self.target.in_place, dynamic=Dynamic.QDQ)
        quantized = write_part(self.model, model, self.layers, plan, target)
        # What is measured lies between a layer and its quantizer, so that layers are float: best with float constants.
        return Session(floats.with_statistics(quantized, stretch, LIMITS), fused=False)

    def _wanted(self, layers: Sequence[Layer], measured: Tensors) -> Tensors:
        if self.reference is BatchNormReference.FLOAT:
            return measured
        wanted = dict(measured)
        for layer in layers:
            if layer.batch_norm is not None:
                wanted[mean_name(layer)] = layer.batch_norm.beta
                wanted[variance_name(layer)] = layer.batch_norm.gamma**2
                # They were learned with all outliers in.
                low, high = bound_names(layer)
                wanted[low], wanted[high] = -FAR * np.ones_like(wanted[low]), FAR * np.ones_like(wanted[high])
        return wanted


def _how_measured(
    model: Model, layers: Sequence[Layer], feed: Tensors, mask: str | None
) -> tuple[list[str], dict[str, int], int]:
    """The layers with a row a position, some of them padding; how many rows of others are left out; bytes of all."""
    names = list(dict.fromkeys(layer.summed for layer in layers))
    shown = Session(with_outputs(model.proto, names), pool=False).run(feed) if names else {}
    counts = None if mask is None else feed[mask] != 0
    padded = [it.name for it in layers if it.has_sums and counts_for(shown[it.summed], counts) is not None]
    steps = {it.name: row_step(shown[it.summed].shape[2:]) for it in layers if not it.has_sums}
    return padded, steps, sum(values.nbytes for values in shown.values())


def _fitting(made: int) -> int:
    """Samples of a batch where layers make so many bytes of one: onnxruntime may keep all of them until its end."""
    batch = BATCH
    while batch > 1 and batch * made > BATCH_BYTES:
        batch //= 2
    return batch


def row_step(sizes: Sequence[int]) -> int:
    """Of a map's rows, one in so many is measured: an odd number, as strides leave patterns of two."""
    wanted = max(ROWS, -(-POSITIONS // max(math.prod(sizes[1:]), 1)))
    step = sizes[0] // wanted
    return max(step - 1 + step % 2, 1)


def _shares(mask: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    counts = (mask != 0).reshape(-1, 1)
    return np.asarray(counts / max(counts.mean(), 1e-9), np.float32)


def _as_inputs(layers: Sequence[Layer], wanted: Tensors) -> Tensors:
    named = [(each, name) for each in layers for name in (mean_name(each), variance_name(each), *bound_names(each))]
    return {wanted_name(name): wanted[name].reshape(statistics_shape(layer)) for layer, name in named}


class _Feeds:
    """The batches of the data, which is read again only for stretches that have inputs of the model."""

    def __init__(self, data: Dataset, batch: int, mask: str | None) -> None:
        self._data, self._batch, self._mask = data, batch, mask
        self._inputs = set[str]()
        self._known: list[tuple[int, Tensors]] = []  # samples of each batch, and how much its rows count

    def of(self, stretch: Stretch) -> Iterator[tuple[int, int, Tensors]]:
        """Place, samples and feed of each batch."""
        if self._known and not set(stretch.reads) & self._inputs:
            yield from ((place, *known) for place, known in enumerate(self._known))
            return
        for place, feed in enumerate(self._data.batches(self._batch)):
            if len(self._known) == place:
                shares = {} if self._mask is None else {SHARES: _shares(feed[self._mask])}
                self._known.append((samples_in(feed, self._data), shares))
            self._inputs = set(feed)
            samples, shares = self._known[place]
            yield place, samples, feed | shares

    def until(self, place: int) -> int:
        """Samples up to a batch, and with it."""
        return sum(samples for samples, _ in self._known[: place + 1])


class _Sums:
    """Averages of batch statistics, weighted by samples."""

    def __init__(self, layers: Sequence[Layer]) -> None:
        self._means = {layer.name: np.zeros(layer.channels) for layer in layers}
        self._variances = {layer.name: np.zeros(layer.channels) for layer in layers}
        self._samples = dict.fromkeys(self._means, 0)

    def add(self, layers: Sequence[Layer], tensors: Tensors, samples: int) -> None:
        for layer in layers:
            self._means[layer.name] += samples * tensors[mean_name(layer)].reshape(-1).astype(np.float64)
            self._variances[layer.name] += samples * tensors[variance_name(layer)].reshape(-1).astype(np.float64)
            self._samples[layer.name] += samples

    def statistics(self) -> dict[str, ChannelStatistics]:
        return {
            name: ChannelStatistics(self._means[name] / samples, self._variances[name] / samples)
            for name, samples in self._samples.items()
        }


def refold(
    plan: QuantPlan,
    layers: Sequence[Layer],
    target: Target,
    wanted: Mapping[str, ChannelStatistics],
    found: Mapping[str, ChannelStatistics],
    *,
    scale: bool,
) -> QuantPlan:
    """Folds the correction of every measured layer into its scales and bias; the integer quantized values stay."""
    params = dict(plan.layers)
    for layer in layers:
        if layer.name in wanted:
            qparams = plan.layer_input(layer.input)
            pair = (wanted[layer.name], found[layer.name])
            params[layer.name] = refold_layer(params[layer.name], layer, target, qparams, *pair, scale=scale)
    return replace(plan, layers=params)


def refold_layer(
    params: LayerParams,
    layer: Layer,
    target: Target,
    activation: QuantParams | None,
    wanted: ChannelStatistics,
    found: ChannelStatistics,
    *,
    scale: bool,
) -> LayerParams:
    """y becomes f * (y - found mean) + wanted mean, with f the ratio of the spreads, positive and within limits."""
    bias = np.zeros(layer.channels) if params.bias is None else params.bias.astype(np.float64)
    factor = np.ones(layer.channels)
    if scale and params.qparams.axis is not None and not target.power_of_two:
        ratio = (wanted.variance + TINY_VARIANCE) / (found.variance + TINY_VARIANCE)
        factor = np.clip(np.sqrt(ratio), *LIMITS)
    shift = wanted.mean - factor * found.mean
    tuned = (factor * bias + shift).astype(np.float32)
    if params.qparams.axis is None:
        return replace(params, bias=tuned)
    # A scale that shrank below what the int32 bias needs is held there, and the shift follows it.
    if params.qparams.block is None:
        least = least_scale(target, tuned, activation, per_channel=True)
        factor = np.maximum(factor, least.astype(np.float32) / params.qparams.scale)
    tuned = (factor * bias + (wanted.mean - factor * found.mean)).astype(np.float32)
    spread = (
        factor if params.qparams.block is None else broadcast(factor, layer.channel_axis, params.qparams.scale.ndim)
    )
    scales = (params.qparams.scale * spread).astype(np.float32)
    weight = params.weight * broadcast(factor.astype(np.float32), layer.channel_axis, params.weight.ndim)
    return replace(params, qparams=replace(params.qparams, scale=scales), bias=tuned, weight=weight)
