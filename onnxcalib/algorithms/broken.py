"""Outputs that quantization breaks, and the few quantizers that must go for them: forward passes on a few samples.

The noise of a group of quantizers is measured with all others off. The group with the most of it is halved until one
quantizer is left, which goes; that repeats until the outputs are sound.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx

from onnxcalib.data import Dataset, Feed, first
from onnxcalib.data.padding import positions_that_count
from onnxcalib.model.layers import Layer
from onnxcalib.model.outputs import find_output_kinds
from onnxcalib.model.placement import InsertionPoints
from onnxcalib.model.prepare import Model
from onnxcalib.model.switches import SwitchedModel, write_switched
from onnxcalib.numerics.fit import in_shape
from onnxcalib.numerics.losses import sqnr_db
from onnxcalib.numerics.positions import counted
from onnxcalib.plan import LeftFloat, QuantPlan
from onnxcalib.progress import Progress
from onnxcalib.runtime.memory import buffer_bytes
from onnxcalib.runtime.session import Session, Tensors, fitting_batch
from onnxcalib.targets import Target

FloatArray = npt.NDArray[np.float64]

# Noise of a tenth of the signal's power: at eight bits, sound networks of many kinds have 15 dB and more.
SOUND_DB = 10.0
MENDED_DB = 11.0  # what the search looks for, as other samples and final scales take their part
SAMPLES = 32  # that tell whether an output is sound
# Of them, in each pass of the search: few of large inputs, but enough to tell one quantizer from another.
PROBED_SAMPLES, PROBED_VALUES = (1, 8), 2**20
BATCH = 8
PART = 2**20  # values that are squared at a time
KEPT_BYTES = 256 * 2**20  # of float outputs; where there are more, they are computed again
PASSES = 32  # of the search, and again where weights are searched alone
VAIN = 4  # quantizers that went without any gain, after which the search ends
# Of all quantizers, or so many of a small network: beyond that it is no few layers that are broken.
MOST_LEFT, MOST_OF_SMALL = 0.25, 4
PARTS = (4, 2, 1)  # into which tensors are cut then
TRIED_BACK = 16  # of what is left, at most, if each of it matters
HELPS_DB = 3.0  # what leaving them must bring where the outputs do not become sound
NEGLIGIBLE = 0.01  # of the noise that is allowed


@dataclass(frozen=True)
class OutputNoise:
    """Signal to noise of each float output, in decibels."""

    sqnr_db: Mapping[str, float]

    @property
    def broken(self) -> dict[str, float]:
        """The outputs whose noise is of the order of their signal."""
        return {name: value for name, value in self.sqnr_db.items() if value < SOUND_DB}

    def helped(self, before: OutputNoise) -> bool:
        """Whether the outputs are sound now, or the worst of them clearly better than before."""
        return not self.broken or min(self.sqnr_db.values()) >= min(before.sqnr_db.values()) + HELPS_DB


class Reference:
    """The float outputs on some samples, at positions that count."""

    def __init__(self, model: Model, data: Dataset) -> None:
        session, self._data = Session(model.proto, model.source), data
        names = list(find_output_kinds(model.proto))
        self._batch = min(BATCH, fitting_batch(session, data))
        self._kept: list[tuple[Feed, Tensors]] | None = []
        signal, held = np.zeros(len(names)), 0
        for feed, outputs in self._computed(session):
            signal += [_power(counted(outputs[name], positions_that_count(feed))) for name in names]
            held += sum(outputs[name].nbytes for name in names)
            fits = self._kept is not None and held <= buffer_bytes(KEPT_BYTES)
            self._kept = [*(self._kept or ()), (feed, outputs)] if fits else None
        self._session = session if self._kept is None else None  # weights are held once, if that can be
        # Beside an output that is zero throughout, nobody can say what is much noise.
        self.names = [name for name, power in zip(names, signal, strict=True) if 0 < power < math.inf]
        self._signal = signal[[name in self.names for name in names]]

    def ratios(self, run: Callable[[Feed], Tensors]) -> FloatArray:
        """Noise over signal of each output; what is not a number counts as all noise."""
        noise = np.zeros(len(self.names))
        for feed, exact in self._computed(self._session) if self._session is not None else self._kept or ():
            made, counts = run(feed), positions_that_count(feed)
            with np.errstate(invalid="ignore", over="ignore"):
                for place, name in enumerate(self.names):
                    wanted = counted(exact[name], counts)
                    noise[place] += _power(wanted, in_shape(wanted.shape, counted(made[name], counts)))
        return np.clip(np.nan_to_num(noise / self._signal, nan=np.inf), 1e-30, 1e30)

    def _computed(self, session: Session) -> Iterator[tuple[Feed, Tensors]]:
        return ((feed, session.run(feed)) for feed in self._data.batches(self._batch))


def _power(values: npt.NDArray[Any], other: npt.NDArray[Any] | None = None) -> float:
    """The sum of squares of values, or of their difference from others, a part at a time: doubles take memory."""
    flat, less, total = values.reshape(-1), None if other is None else other.reshape(-1), 0.0
    for start in range(0, flat.size, PART):
        part = flat[start : start + PART].astype(np.float64)
        part = part if less is None else part - less[start : start + PART]
        total += float(part @ part)
    return total


def output_noise(model: Model, data: Dataset, quantized: onnx.ModelProto) -> OutputNoise:
    """What each output of a quantized model has of noise on a few samples."""
    reference = Reference(model, first(data, SAMPLES))
    ratios = reference.ratios(Session(quantized, "the quantized model").run)
    return OutputNoise({name: sqnr_db(1.0, ratio) for name, ratio in zip(reference.names, ratios, strict=True)})


@dataclass(frozen=True)
class _Unit:
    """What is left float together."""

    switches: tuple[int, ...]
    tensors: tuple[str, ...] = ()
    layer: str | None = None
    of_no_use: tuple[int, ...] = ()  # the switches of what nobody else needs quantized


_Step = tuple[list[_Unit], FloatArray]  # what is left float, and the noise of all others


@dataclass(frozen=True)
class _Group:
    """Neighbours in the graph, with the noise that they alone make."""

    units: Sequence[_Unit]
    ratios: FloatArray


@dataclass
class Search:
    """Looks for the fewest quantizers without which the outputs are sound."""

    model: Model
    layers: Sequence[Layer]
    points: InsertionPoints
    target: Target
    data: Dataset
    progress: Progress
    passes: int = field(default=0, init=False)

    def leave(self, plan: QuantPlan) -> LeftFloat:
        """What to leave float; nothing where nothing helps."""
        switched = write_switched(self.model, self.layers, plan, self.target)
        self._session, self._flags = Session(switched.proto, "the switched model"), switched.flags
        self._count = switched.count
        self._reference = Reference(self.model, first(self.data, self._samples()))
        activations, weights = self._units(switched)
        path = self._path([activations, weights])
        if min(_worst(ratios) for _, ratios in path) > _ratio(SOUND_DB):
            path += self._parts(path, activations, weights)
        left = self._fewest(path)
        self.progress("broken outputs", PASSES, PASSES)
        return _left(left)

    def _samples(self) -> int:
        values = sum(value.size for value in next(iter(self.data.batches(1))).values())
        return int(np.clip(PROBED_VALUES // max(values, 1), *PROBED_SAMPLES))

    def _units(self, switched: SwitchedModel) -> tuple[list[_Unit], list[_Unit]]:
        """Tensors on one grid go together; a layer with a float weight has no use for an input of its own."""
        grids: dict[str, list[str]] = {}
        for tensor in self.points.tensors.values():
            if tensor.name in switched.tensors:
                grids.setdefault(tensor.same_qparams_as or tensor.name, []).append(tensor.name)
        switches = {grid: [it for name in names for it in switched.tensors[name]] for grid, names in grids.items()}
        activations = [_Unit(tuple(switches[grid]), tuple(names)) for grid, names in grids.items()]
        weights = []
        for layer in self.layers:
            read = self.points.tensors.get(layer.input)
            own = read is not None and read.layers == (layer.name,) and not read.shared
            more = switched.tensors.get(layer.input, []) if own else []
            weights.append(_Unit((switched.weights[layer.name],), layer=layer.name, of_no_use=tuple(more)))
        return activations, weights if len(weights) > 1 else []

    def _path(self, starts: Sequence[Sequence[_Unit]], base: Sequence[_Unit] = ()) -> list[_Step]:
        """What is left, one more at each step, and the noise of all others."""
        allowed = _ratio(MENDED_DB)
        path: list[_Step] = [(list(base), self._without(base))]
        last = self.passes + PASSES
        groups = [self._group(units) for units in starts if units]
        most = max(int(MOST_LEFT * sum(map(len, starts))), MOST_OF_SMALL)
        while groups and self.passes < last and len(path) <= most and not _in_vain(path):
            left, ratios = path[-1]
            broken = ratios > allowed
            worst = max(groups, key=lambda group: float(group.ratios[broken].max(initial=0.0)))
            if not worst.ratios[broken].max(initial=0.0) > NEGLIGIBLE * allowed:
                break
            groups.remove(worst)
            if len(worst.units) == 1:
                path.append(([*left, *worst.units], self._without([*left, *worst.units])))
                continue
            half = len(worst.units) // 2
            groups += [self._group(worst.units[:half]), self._group(worst.units[half:])]
        return path

    def _parts(self, path: Sequence[_Step], activations: Sequence[_Unit], weights: Sequence[_Unit]) -> list[_Step]:
        """Where the noise comes from everywhere: without a part of the tensors, or all of them and some weights."""
        sound = self._without_a_part(path, activations, PARTS)
        if sound or not weights:
            return sound
        more = self._path([weights], activations)
        if _worst(more[-1][1]) <= _ratio(SOUND_DB):
            return more[-1:]
        return self._without_a_part(more, weights, PARTS[:-1])

    def _without_a_part(self, path: Sequence[_Step], units: Sequence[_Unit], cuts: Sequence[int]) -> list[_Step]:
        """The smallest part that, left beside the best of a path, makes the outputs sound; none where none does."""
        best = min(path, key=lambda step: _worst(step[1]))[0]
        for parts in cuts:
            left = [list(dict.fromkeys((*best, *part))) for part in _cut(units, parts)]
            least = min(((each, self._without(each)) for each in left), key=lambda step: _worst(step[1]))
            if _worst(least[1]) <= _ratio(SOUND_DB):
                return [least]
        return []

    def _fewest(self, path: Sequence[_Step]) -> list[_Unit]:
        """The shortest part of the path that is about as good as any, without what turned out not to matter."""
        worst = [_worst(ratios) for _, ratios in path]
        sound = [level for level in (_ratio(MENDED_DB), _ratio(SOUND_DB)) if min(worst) <= level]
        if not sound and min(worst) > worst[0] * _ratio(HELPS_DB):
            return []
        enough = sound[0] if sound else 10**0.1 * min(worst)
        left = next(units for (units, _), ratio in zip(path, worst, strict=True) if ratio <= enough)
        for unit in left[:-1] if len(left) <= TRIED_BACK else ():
            fewer = [each for each in left if each is not unit]
            if self._without(fewer).max(initial=0.0) <= enough:
                left = fewer
        return left

    def _group(self, units: Sequence[_Unit]) -> _Group:
        flags = np.zeros(self._count, np.bool_)
        flags[[switch for unit in units for switch in unit.switches]] = True
        return _Group(units, self._ratios(flags))

    def _without(self, units: Sequence[_Unit]) -> FloatArray:
        flags = np.ones(self._count, np.bool_)
        flags[[switch for unit in units for switch in (*unit.switches, *unit.of_no_use)]] = False
        return self._ratios(flags)

    def _ratios(self, flags: npt.NDArray[np.bool_]) -> FloatArray:
        self.passes += 1
        self.progress("broken outputs", min(self.passes, PASSES - 1), PASSES)
        return self._reference.ratios(lambda feed: self._session.run({**feed, self._flags: flags}))


def _worst(ratios: FloatArray) -> float:
    return max(float(ratios.max(initial=0.0)), 1e-30)


def _cut(units: Sequence[_Unit], parts: int) -> list[list[_Unit]]:
    ends = [place * len(units) // parts for place in range(parts + 1)]
    return [list(units[start:end]) for start, end in itertools.pairwise(ends)]


def _ratio(decibels: float) -> float:
    return float(10 ** (-decibels / 10))


def _in_vain(path: Sequence[_Step]) -> bool:
    """Whether the last steps brought no decibel."""
    worst = [_worst(ratios) for _, ratios in path]
    return len(path) > VAIN and min(worst[-VAIN:]) > 10**-0.1 * min(worst[:-VAIN])


def _left(units: Sequence[_Unit]) -> LeftFloat:
    tensors = [name for unit in units if unit.layer is None for name in unit.tensors]
    return LeftFloat(tuple(tensors), layers=tuple(unit.layer for unit in units if unit.layer is not None))
