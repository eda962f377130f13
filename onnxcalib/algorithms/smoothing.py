"""How strongly channels are scaled before products of matrices: for each site the strength with the least error.

Of every site some rows are kept, in one pass. Strengths are compared by what rounding does to the products of those
rows with the weights that read them, as SmoothQuant's and AWQ's factors would have them, and with none at all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from onnxcalib.data import Dataset, first
from onnxcalib.data.padding import positions_that_count
from onnxcalib.model.graph import GraphIndex
from onnxcalib.model.layers import Layer
from onnxcalib.model.prepare import Model
from onnxcalib.model.smoothing import MOST, IntArray, Site, Smoothing, exponents_for, factors_of, smoothed
from onnxcalib.model.subgraph import with_outputs
from onnxcalib.numerics.positions import counted
from onnxcalib.numerics.quant_params import QuantScheme, fake_quantize, make_qparams
from onnxcalib.numerics.range_estimators import blockwise_qparams, weight_qparams
from onnxcalib.progress import Progress
from onnxcalib.recipe import MAX_BITS, Precision, RangeMethod
from onnxcalib.runtime.session import DRAWN_BYTES, Session, fitting_batch, samples_in
from onnxcalib.targets import Target

FloatArray = npt.NDArray[np.float64]
Matrix = npt.NDArray[np.float32]

SAMPLES = 64
ROWS = 256  # of a site
# Of SmoothQuant: the share of a channel's range that goes over to the weights.
STRENGTHS = (0.5, 0.65, 0.75, 0.85, 1.0)
# Of AWQ: the power of a channel's mean that protects its weights.
POWERS = (0.25, 0.5, 0.75)
CUTS = (1.0, 0.6, 0.35)  # of the range that activations may keep
GAIN = 0.95  # of the error without, which a factor must bring
NEAR = 1e-3  # of the largest output: what float32 may move


@dataclass(frozen=True)
class Smooth:
    """What channels before products of matrices are divided by."""

    exponents: Smoothing


@dataclass(frozen=True)
class Channels:
    """What was seen of a site: the ends of its channels, their mean magnitudes, and some rows."""

    low: FloatArray
    high: FloatArray
    mean: FloatArray
    rows: Matrix

    @property
    def peak(self) -> FloatArray:
        """The largest magnitude of each channel."""
        return np.maximum(np.maximum(-self.low, self.high), 1e-5)


def watch(model: Model, sites: Sequence[Site], data: Dataset, progress: Progress) -> dict[str, Channels]:
    """One pass over some samples; padding does not count."""
    data, rng, done = first(data, SAMPLES), np.random.default_rng(0), 0
    session = Session(with_outputs(model.proto, [site.tensor for site in sites]), model.source)
    seen: dict[str, list[Channels]] = {site.name: [] for site in sites}
    for feed in data.batches(fitting_batch(session, data, DRAWN_BYTES)):
        tensors, counts, samples = session.run(feed), positions_that_count(feed), samples_in(feed, data)
        for site in sites:
            values = counted(tensors[site.tensor], counts)
            rows = values.reshape(-1, values.shape[-1])
            if len(rows):
                many = min(len(rows), -(-ROWS * samples // len(data)))
                some = rows[rng.choice(len(rows), many, replace=False)].astype(np.float32)
                mean = np.abs(rows).mean(0, dtype=np.float64)
                seen[site.name].append(Channels(rows.min(0), rows.max(0), mean, some))
        done += samples
        progress("smoothing", min(done, len(data)), len(data))
    return {name: _joined(parts) for name, parts in seen.items() if parts}


def _joined(parts: Sequence[Channels]) -> Channels:
    return Channels(
        np.minimum.reduce([each.low for each in parts]).astype(np.float64),
        np.maximum.reduce([each.high for each in parts]).astype(np.float64),
        np.mean([each.mean for each in parts], axis=0),
        np.concatenate([each.rows for each in parts]),
    )


@dataclass(frozen=True)
class Judge:
    """What rounding will do: the target, the bits, and how weights share scales."""

    model: Model
    target: Target
    precisions: Mapping[str, Precision]  # by layer
    block: int | None = None

    def best(self, site: Site, seen: Channels) -> IntArray | None:
        """The exponents with the least error; None where none is clearly better than no factors."""
        index = GraphIndex(self.model.proto.graph)
        readers = [layer for layer in site.readers if layer.name in self.precisions]
        weights = {layer.name: _matrix(index.value(layer.weight), layer) for layer in readers}
        exact = {name: seen.rows @ weight for name, weight in weights.items()}

        def error(factors: FloatArray) -> float:
            return sum(self._error(layer, weights[layer.name], exact[layer.name], seen, factors) for layer in readers)

        tried = {self._exponents(site, factors).tobytes(): factors for factors in _factors(seen, weights)}
        least, best = GAIN * error(np.ones(len(seen.peak))), None
        for factors in tried.values():
            exponents = self._exponents(site, factors)
            found = error(site.read(factors_of(exponents)))
            if found < least:
                least, best = found, exponents
        return best

    @staticmethod
    def _exponents(site: Site, factors: FloatArray) -> IntArray:
        """Of the channels that are made: the most of those that share one."""
        made = np.full(site.channels, -np.inf)
        np.maximum.at(made, site.places, np.log2(factors))
        return exponents_for(np.exp2(made - np.median(made)))

    def _error(self, layer: Layer, weight: Matrix, exact: Matrix, seen: Channels, factors: FloatArray) -> float:
        precision, by = self.precisions[layer.name], factors.astype(np.float32)
        rounded = self._rounded(layer, weight * by[:, None], precision.weight)
        energy, rows = max(_power(exact), 1e-30), np.asarray(seen.rows / by, np.float32)
        if precision.weight_only or self.target.float_activations:
            return _power(rows @ rounded - exact) / energy
        scheme = self.target.activation_scheme(precision.activation)
        low, high = float((seen.low / factors).min()), float((seen.high / factors).max())
        errors = [_power(_on_grid(rows, cut * low, cut * high, scheme) @ rounded - exact) for cut in CUTS]
        return min(errors) / energy

    def _rounded(self, layer: Layer, weight: Matrix, bits: int) -> Matrix:
        scheme = self.target.weight_scheme(bits)
        method = RangeMethod.MINMAX if bits >= MAX_BITS else RangeMethod.MSE
        if self.block is not None:
            qparams = blockwise_qparams(weight, scheme, 0, self.block, method)
        else:
            qparams = weight_qparams(weight, scheme, 1 if self.target.has_channels(layer.op) else None, method)
        return fake_quantize(weight, qparams)


def _factors(seen: Channels, weights: Mapping[str, Matrix]) -> list[FloatArray]:
    """What is tried, for the channels that are read."""
    peaks = np.maximum(np.max([np.abs(weight).max(1) for weight in weights.values()], axis=0), 1e-5)
    means = np.maximum(seen.mean, 1e-5 * max(float(seen.mean.max()), 1e-5))
    return [
        *(seen.peak**strength / peaks ** (1 - strength) for strength in STRENGTHS),
        *(means**power for power in POWERS),
        np.maximum(seen.peak / (2 * np.median(seen.peak)), 1.0),  # the outliers alone
    ]


def _matrix(weight: Matrix, layer: Layer) -> Matrix:
    return np.ascontiguousarray(weight.T if layer.transposed else weight, np.float32)


def _on_grid(rows: Matrix, low: float, high: float, scheme: QuantScheme) -> Matrix:
    return fake_quantize(rows, make_qparams(min(low, 0.0), max(high, 0.0), scheme))


def _power(values: Matrix) -> float:
    flat = values.reshape(-1)
    return float(flat @ flat)


def sound_sites(model: Model, sites: Sequence[Site], data: Dataset) -> list[Site]:
    """Those whose factors leave the float outputs as they are, tried on one feed, by halves."""
    if not sites:
        return []
    feed = next(iter(data.batches(1)))
    exact = Session(model.proto, model.source).run(feed)

    def sound(some: Sequence[Site]) -> list[Site]:
        rng = np.random.default_rng(len(some))
        drawn = {site.name: rng.integers(-MOST // 4, MOST // 4, site.channels) for site in some}
        made = Session(smoothed(model, drawn).proto, model.source).run(feed)
        if all(_near(exact[name], made[name]) for name in exact):
            return list(some)
        half = len(some) // 2
        return [*sound(some[:half]), *sound(some[half:])] if half else []

    return sound(sites)


def _near(exact: npt.NDArray[np.float32], made: npt.NDArray[np.float32]) -> bool:
    if exact.dtype.kind != "f":
        return bool(np.array_equal(exact, made))
    return bool(np.abs(exact - made).max(initial=0) <= NEAR * max(float(np.abs(exact).max(initial=0)), 1e-30))
