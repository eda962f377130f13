"""Second-order rounding: layer after layer, from forward passes alone.

Every layer is rounded for what it reads in the network whose earlier layers are quantized already, so that its output
comes near that of the float network; the bias takes the means.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from onnxcalib.algorithms.drawn_rows import DrawnRows, RowsByReads
from onnxcalib.algorithms.float_rows import FloatRows
from onnxcalib.algorithms.layer_matrix import LayerMatrix
from onnxcalib.algorithms.rounding import least_scale
from onnxcalib.algorithms.stepwise import DISK_BYTES, Stepwise, Take
from onnxcalib.algorithms.tied import sharing_tables
from onnxcalib.data import Dataset
from onnxcalib.model.graph import GraphIndex
from onnxcalib.model.layers import Layer
from onnxcalib.model.prepare import Model
from onnxcalib.numerics.coordinate_descent import descended, fitted_scales
from onnxcalib.numerics.dynamic import dynamic_qparams
from onnxcalib.numerics.moments import Moments
from onnxcalib.numerics.positions import Counts
from onnxcalib.numerics.quant_params import Array, QuantParams, dequantize, fake_quantize, of_each, with_least_scale
from onnxcalib.numerics.range_estimators import blockwise_qparams, weight_qparams
from onnxcalib.numerics.second_order import Grid, arriving_move, damped, round_columns
from onnxcalib.numerics.weighted_ranges import weighted_qparams
from onnxcalib.plan import LayerParams, QuantPlan
from onnxcalib.progress import NO_CHECKPOINT, Checkpoint, Progress
from onnxcalib.recipe import RangeMethod
from onnxcalib.targets import Target

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True)
class SecondOrder:
    """A plan whose weights make good each other's errors, and why some layers are rounded to nearest."""

    plan: QuantPlan
    strength: float  # of the move for the error that arrives, from 0 to 1
    skip_reasons: tuple[str, ...] = ()


@dataclass(frozen=True)
class ChosenRounding:
    """What became of it: the held-out losses after tuning, of round to nearest and of what was chosen.

    Of a quick tuning where that told them apart, else of the whole one.
    """

    strength: float | None  # None: round to nearest
    before: float
    after: float
    skip_reasons: tuple[str, ...] = ()


@dataclass(frozen=True)
class RoundedLayer:
    """One layer of it: its parameters, or why it keeps those that it had."""

    params: LayerParams | None
    skip_reason: str | None = None


@dataclass(frozen=True)
class Rounder:
    """What every layer is rounded by."""

    model: Model
    layers: Sequence[Layer]
    target: Target
    data: Dataset
    ranges: RangeMethod
    progress: Progress
    checkpoint: Checkpoint = NO_CHECKPOINT
    disk_bytes: int = DISK_BYTES
    fixed: Collection[str] = ()  # layers whose ranges the user chose
    floats: FloatRows | None = None  # of the same data, where several roundings share them

    def round(self, plan: QuantPlan, strength: float) -> SecondOrder:
        """Every layer at the bits and on the kind of grid that it has in the plan; inputs keep their grids."""
        names = [layer.name for layer in self.layers]
        cached: list[RoundedLayer | None] = self.checkpoint.found(names)
        found = {name: each for name, each in zip(names, cached, strict=True) if each is not None}
        found |= dict.fromkeys(sharing_tables(plan), RoundedLayer(None))
        index = GraphIndex(self.model.proto.graph)
        with self.folder() as folder:
            floats = self.floats or FloatRows(self.model, self.layers, self.data, folder)
            network = Stepwise(self.model, self.layers, self.target, self.data, folder, self.disk_bytes)
            for tensor in dict.fromkeys(layer.input for layer in self.layers):
                readers = [layer for layer in self.layers if layer.input == tensor]
                missing = [LayerMatrix.of(layer, index) for layer in readers if layer.name not in found]
                reading = Reading(plan, DrawnRows.of(tensor, missing, len(self.data)), moves=strength > 0)
                with contextlib.closing(floats.batches(tensor)) as exact:
                    network.advance(tensor, plan, reading.beside(exact))
                for matrix in missing:
                    name = matrix.layer.name
                    found[name] = self.rounded(index, matrix, reading.moments.get(matrix.reads), plan, strength)
                    self.checkpoint.put(name, found[name])
                    self.progress(f"second-order, strength {strength:g}", len(found), len(names))
                plan = _with(plan, {layer.name: found[layer.name].params for layer in readers})
        reasons = (f"'{name}': {each.skip_reason}" for name, each in found.items() if each.skip_reason is not None)
        return SecondOrder(plan, strength, tuple(reasons))

    @contextlib.contextmanager
    def folder(self) -> Iterator[Path]:
        """Where tensors lie as long as layers are rounded."""
        with tempfile.TemporaryDirectory(prefix="onnxcalib_", dir=self.checkpoint.scratch) as folder:
            yield Path(folder)

    def rounded(
        self, index: GraphIndex, matrix: LayerMatrix, moments: Moments | None, plan: QuantPlan, strength: float
    ) -> RoundedLayer:
        """One layer from its start in the plan, for what it reads."""
        if moments is None or moments.rows == 0:
            return RoundedLayer(None, matrix.skip_reason or "it reads nothing on the calibration data")
        if not moments.is_finite:
            return RoundedLayer(None, "it reads NaN or infinite values")
        layer, start = matrix.layer, plan.layers[matrix.layer.name]
        bias = index.constant(layer.bias) if layer.bias else None
        problem = LayerRounding(matrix, index.value(layer.weight), bias, moments)
        wanted = problem.wanted(strength)
        qparams = self._qparams(problem, wanted, start.qparams)
        for fits in (self._fits(layer, qparams), False):  # once more if the new bias needs a coarser step
            qparams = self._for_bias(layer, qparams, bias, plan)
            quantized, qparams, source = problem.rounded(wanted, qparams, fits=fits)
            bias = problem.new_bias(quantized, qparams)
            if self._for_bias(layer, qparams, bias, plan) is qparams:
                break
        return RoundedLayer(replace(start, quantized=quantized, qparams=qparams, bias=bias, weight=source))

    def _qparams(self, problem: LayerRounding, wanted: FloatArray, like: QuantParams) -> QuantParams:
        """A grid of the same kind whose ranges suit the wanted weights."""
        if problem.matrix.layer.name in self.fixed:
            return like
        weight, scheme = problem.matrix.shaped(wanted).astype(np.float32), self.target.weight_scheme(like.bits)
        scheme = replace(scheme, symmetric=scheme.symmetric or like.is_symmetric)
        if self.ranges not in (RangeMethod.MINMAX, RangeMethod.AVERAGED):
            return weighted_qparams(weight, problem.importance, scheme, like)
        if like.block is not None and like.axis is not None:
            return blockwise_qparams(weight, scheme, like.axis, like.block, self.ranges)
        return weight_qparams(weight, scheme, like.axis, self.ranges)

    def _fits(self, layer: Layer, qparams: QuantParams) -> bool:
        """Whether scales may move on from where the range search left them."""
        asked = layer.name in self.fixed or self.ranges in (RangeMethod.MINMAX, RangeMethod.AVERAGED)
        return not (asked or qparams.axis is None or self.target.power_of_two)

    def _for_bias(self, layer: Layer, qparams: QuantParams, bias: Array | None, plan: QuantPlan) -> QuantParams:
        """The grid with steps that an int32 bias can be counted in; itself if they are."""
        if bias is None:
            return qparams
        activation, per_channel = plan.layer_input(layer.input), qparams.axis is not None
        least = least_scale(self.target, bias, activation, per_channel=per_channel)
        return qparams if (qparams.scale >= least.astype(np.float32)).all() else with_least_scale(qparams, least)


class LayerRounding:
    """The weights of a layer, and the moments of what they are multiplied with."""

    def __init__(self, matrix: LayerMatrix, weight: Array, bias: Array | None, moments: Moments) -> None:
        self.matrix, self.bias, self.moments = matrix, bias, moments
        self.weight = matrix.weights(weight).astype(np.float64)
        # What shifts a whole channel is the bias's to make good, where there is one.
        self.squares = damped(moments.squares(centred=matrix.layer.takes_bias))

    @property
    def importance(self) -> Array:
        """What the squared error of each weight is multiplied with: the mean square of its input."""
        squares = np.diagonal(self.squares, axis1=1, axis2=2)[:, None, :].astype(np.float32)
        return self.matrix.shaped(np.broadcast_to(squares, self.weight.shape))

    def wanted(self, strength: float) -> FloatArray:
        """The weights that make the most of what arrives, or a part of the way there."""
        if not strength:
            return self.weight
        lost = self.moments.lost(centred=self.matrix.layer.takes_bias)
        return self.weight + strength * arriving_move(self.weight, lost, self.squares)

    def rounded(
        self, wanted: FloatArray, qparams: QuantParams, *, fits: bool
    ) -> tuple[Array, QuantParams, npt.NDArray[np.float32]]:
        """Quantized values, their grid, and what they were rounded from."""
        grid = self._grid(qparams)
        start = round_columns(wanted, self.squares, grid)[0]
        found = descended(wanted, start, self.squares, grid)
        if fits:
            scale = fitted_scales(wanted, found[0], self.squares, grid, qparams.block or self.matrix.columns)
            qparams = replace(qparams, scale=self._as_scale(scale, qparams))
            found = descended(wanted, found[0], self.squares, self._grid(qparams))
        quantized, source = (self.matrix.shaped(each) for each in found)
        return quantized.astype(qparams.dtype), qparams, source.astype(np.float32)

    def _grid(self, qparams: QuantParams) -> Grid:
        scale, zero = (self.matrix.weights(each) for each in of_each(qparams, self.matrix.layer.weight_shape))
        return Grid(scale, zero, qparams.low, qparams.high)

    def _as_scale(self, found: FloatArray, qparams: QuantParams) -> npt.NDArray[np.float32]:
        """Scales [groups, rows, blocks] in the shape of a grid's own."""
        whole = found[0] if qparams.block is not None and self.matrix.layer.transposed else found[0].T
        return np.asarray(whole if qparams.block is not None else found.reshape(-1), np.float32)

    def new_bias(self, quantized: Array, qparams: QuantParams) -> npt.NDArray[np.float32] | None:
        """The bias with which the layer's mean output is that of the float network; None where there is no place."""
        if not self.matrix.layer.takes_bias:
            return None
        wanted, read = self.moments.means
        real = self.matrix.weights(dequantize(quantized, qparams)).astype(np.float64)
        shift = (self.weight * wanted).sum(-1) - (real * read).sum(-1)
        old = 0.0 if self.bias is None else self.bias.astype(np.float64)
        return np.asarray(old + shift.reshape(-1), np.float32)


class Reading:
    """Gathers the moments of a tensor as its layers read it."""

    def __init__(self, plan: QuantPlan, rows: DrawnRows, *, moves: bool) -> None:
        self._rows = rows
        self._grids = plan.grids_of(rows.tensor)
        self._dynamic = rows.tensor in plan.dynamic
        self._batches = 0
        self.moments = {reads: Moments(moves=moves) for reads in rows.matrices}

    def beside(self, exact: Iterator[tuple[tuple[int, ...], RowsByReads]]) -> Take:
        """Takes batches of the quantized network, each with the same rows of the float one."""

        def take(read: Array, counts: Counts | None) -> None:
            if self.moments:
                shape, rows = next(exact)
                # Rows that small differences decide on belong to no rows of the other network.
                self.update(read, counts, rows if shape == read.shape else None)

        return take

    def update(self, read: Array, counts: Counts | None = None, wanted: RowsByReads | None = None) -> None:
        """Takes a batch, values or quantized values, but for positions that do not count."""
        if not self.moments:
            return
        first, others = (self._grids[0], self._grids[1:]) if self._grids else (None, [])
        codes = read.dtype.kind in "iu"
        zero = int(first.zero_point) if codes and first is not None else 0
        drawn = self._rows.draw(read, self._batches, counts, zero) if read.size else {}
        self._batches += 1
        if self._dynamic and read.size:
            others = [*others, dynamic_qparams(_real(read, first))]
        for reads, rows in drawn.items():
            real = _real(rows, first)
            exact = (real if codes else rows).copy() if wanted is None else wanted[reads]
            for qparams in others:  # zeros that pad windows lie on every grid
                real = fake_quantize(real, qparams)
            self.moments[reads].update(exact, real)


def _real(values: Array, qparams: QuantParams | None) -> Array:
    """Values on a grid, or those of quantized values."""
    if qparams is None:
        return values
    return dequantize(values, qparams) if values.dtype.kind in "iu" else fake_quantize(values, qparams)


def _with(plan: QuantPlan, layers: Mapping[str, LayerParams | None]) -> QuantPlan:
    changed = {name: params for name, params in layers.items() if params is not None}
    return replace(plan, layers={**plan.layers, **changed})
