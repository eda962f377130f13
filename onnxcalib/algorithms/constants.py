"""Which large constants beside layers are stored as int8, and on which grids."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from onnxcalib.algorithms.narrow_tables import NARROW, narrowed
from onnxcalib.algorithms.teacher import Teacher
from onnxcalib.algorithms.tied import tied_layers
from onnxcalib.data import Dataset, first
from onnxcalib.data.absent import is_absent
from onnxcalib.model.external import values_of
from onnxcalib.model.io import copied
from onnxcalib.model.large_constants import LEAST, LargeConstant, large_constants
from onnxcalib.model.layers import Layer
from onnxcalib.model.prepare import Model
from onnxcalib.model.stored import rounded_constants
from onnxcalib.numerics.losses import sqnr_db
from onnxcalib.numerics.quant_params import QuantParams, QuantScheme, dequantize, quantize
from onnxcalib.numerics.range_estimators import blockwise_qparams, weight_qparams
from onnxcalib.plan import StoredConstant
from onnxcalib.targets import Constants, Target

SAMPLES = 8
SCHEMES = {bits: QuantScheme(bits, signed=True, symmetric=True) for bits in (8, 16)}
LEAST_DB = 30.0  # of a constant itself at eight bits; weights with one scale a channel have some 40
WEIGHTS_OUTPUT_DB = 32.0  # of the outputs with all weights rounded: layers at eight bits leave less
OUTPUT_DB = 40.0  # of the outputs with all else rounded: a constant may be a coordinate as well as a slope
APART_DB = 8.0  # more, for a constant alone
APART = 12  # constants at most that are tried one by one, others by the ops that read them
LEAST_OTHER = 4096  # elements of a constant that is no weight: biases gain little, and lose more
MOST_BYTES = 2.0  # an element, of which int8 with its scales and nodes must not take more
BLOCKS = range(40, 15, -1)  # values that share a scale where outliers would spoil whole rows, and errors add up in time
NODE_BYTES = 300  # of the nodes and names that make an int8 constant float

Values = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Candidate:
    """A constant as it could be stored, and what speaks for it."""

    constant: StoredConstant
    is_weight: bool
    exact: bool  # its values are all on the grid


def store(
    model: Model,
    layers: Sequence[Layer],
    target: Target,
    data: Dataset,
    wanted: Callable[[str], bool],
    bits: int = 8,
) -> tuple[Model, list[StoredConstant]]:
    """The model with the values that will be stored, and these; what only the layers read is left to them.

    A constant stays float where a node reads it that is not wanted, or where the outputs would suffer. With layers at
    four bits or fewer, tables may have four too.
    """
    found = candidates(model, layers, target, wanted)
    constants = _safe(model, found, data)
    if bits <= NARROW.bits and constants and not is_absent(data):
        shared = _shared(model, layers, constants.values()) if target.float_activations else ()
        large = large_constants(model.proto.graph)
        constants = narrowed(constants, large, target, _worst(model, data), shared)
    return _with(model, constants), list(constants.values())


def store_wide(
    model: Model, layers: Sequence[Layer], target: Target, wanted: Callable[[str], bool]
) -> tuple[Model, list[StoredConstant]]:
    """The same at sixteen bits throughout; who asks for it listens himself."""
    found = {place: it.constant for place, it in candidates(model, layers, target, wanted).items()}
    constants = _at_sixteen_bits(model, found)
    return _with(model, constants), list(constants.values())


def _shared(model: Model, layers: Sequence[Layer], constants: Iterable[StoredConstant]) -> set[str]:
    """Tables whose codes a layer takes too: at four bits they would be stored twice."""
    return {it.name for it in constants if tied_layers(model, layers, [it])}


def candidates(
    model: Model, layers: Sequence[Layer], target: Target, wanted: Callable[[str], bool]
) -> dict[int, Candidate]:
    """What could be stored as int8, by its place among the model's large constants."""
    if target.constants is Constants.FLOAT:
        return {}
    by_name = {layer.name: layer for layer in layers}
    sums = {layer.bias_node for layer in layers}
    found: dict[int, Candidate] = {}
    for place, constant in enumerate(large_constants(model.proto.graph)):
        own = [use for use in constant.uses if use.place and use.node.name in by_name]
        uses = [use for use in constant.uses if use not in own and use.node.name not in sums]
        if uses and all(wanted(use.node.name) for use in constant.uses):
            axes = {by_name[use.node.name].channel_axis for use in own if not use.moved}
            made = _candidate(replace(constant, uses=tuple(uses)), axes.pop() if len(axes) == 1 else None)
            found |= {} if made is None else {place: made}
    return found


def _candidate(constant: LargeConstant, axis: int | None) -> Candidate | None:
    """The constant on its best grid, or on that of a layer that reads it too; None where that is no gain."""
    values = values_of(constant.tensor)
    if not np.isfinite(values).all() or not (constant.is_weight or values.size >= LEAST_OTHER):
        return None
    qparams = max(
        _grids(values, constant.axis if axis is None else axis, blocks=constant.is_weight),
        key=lambda it: _sqnr(values, it),
        default=None,
    )
    decibels = -math.inf if qparams is None else _sqnr(values, qparams)
    if qparams is None or not decibels >= LEAST_DB:
        return None
    names = tuple(dict.fromkeys(use.node.name or use.node.op_type for use in constant.uses))
    stored = StoredConstant(constant.tensor.name, constant.op, names, quantize(values, qparams), qparams)
    return Candidate(stored, constant.is_weight, math.isinf(decibels))


def _grids(values: Values, wanted: int | None, *, blocks: bool) -> list[QuantParams]:
    """The grids to choose from: along the axis that is wanted, or else along any, or in blocks of the last one."""
    axes: list[int | None] = [axis for axis in range(values.ndim) if wanted in (axis, None)]
    tried = [weight_qparams(values, SCHEMES[8], axis, "minmax") for axis in axes]
    size = next((size for size in BLOCKS if values.shape[-1] % size == 0), None)
    if wanted is None and blocks and size is not None:
        tried.append(blockwise_qparams(values, SCHEMES[8], values.ndim - 1, size, "minmax"))
    gains = [it for it in tried if values.size + 4 * it.scale.size + NODE_BYTES <= MOST_BYTES * values.size]
    return gains or ([] if values.size < LEAST else [weight_qparams(values, SCHEMES[8], None, "minmax")])


def _sqnr(values: Values, qparams: QuantParams) -> float:
    with np.errstate(over="ignore", invalid="ignore"):
        noise = dequantize(quantize(values, qparams), qparams) - values
    return sqnr_db(float(np.vdot(values, values)), float(np.vdot(noise, noise)))


def _safe(model: Model, found: Mapping[int, Candidate], data: Dataset) -> dict[int, StoredConstant]:
    """Each at eight bits, at sixteen, or not at all, so that the outputs stay what they are on a few samples."""
    kept = {place: it.constant for place, it in found.items() if it.exact}
    if len(kept) == len(found):
        return kept
    if is_absent(data):  # weights are stored unheard, and nothing else
        return kept | {place: it.constant for place, it in found.items() if it.is_weight}
    worst = _worst(model, data)
    for is_weight, least in ((True, WEIGHTS_OUTPUT_DB), (False, OUTPUT_DB)):
        narrow = {place: it.constant for place, it in found.items() if it.is_weight is is_weight and not it.exact}
        if not narrow or worst(narrow) >= least:
            kept |= narrow
            continue
        wide = _at_sixteen_bits(model, narrow)
        for part in _parts(narrow):
            alone = {place: narrow[place] for place in part}
            kept |= alone if worst(alone) >= least + APART_DB else {place: wide[place] for place in part}
        together = {place: kept[place] for place in narrow}
        kept |= together if worst(together) >= least else wide
        if worst(wide) < least:
            kept = {place: it for place, it in kept.items() if place not in narrow}
    return kept


def _worst(model: Model, data: Dataset) -> Callable[[Mapping[int, StoredConstant]], float]:
    """What the outputs have of signal to noise with constants rounded, on a few samples."""
    teacher = Teacher(model, first(data, SAMPLES))

    def worst(constants: Mapping[int, StoredConstant]) -> float:
        return min(teacher.distance_of(_with(model, constants).proto).sqnr_db.values(), default=0.0)

    return worst


def _parts(constants: Mapping[int, StoredConstant]) -> list[list[int]]:
    """Those that are tried together: each alone, or all of an op where there are many."""
    parts: dict[object, list[int]] = {}
    for place, it in constants.items():
        parts.setdefault(place if len(constants) <= APART else it.op, []).append(place)
    return list(parts.values())


def _at_sixteen_bits(model: Model, constants: Mapping[int, StoredConstant]) -> dict[int, StoredConstant]:
    wide: dict[int, StoredConstant] = {}
    for place, found in enumerate(large_constants(model.proto.graph)):
        if place in constants:
            values, it = values_of(found.tensor), constants[place]
            axis = None if it.qparams.block is not None else it.qparams.axis
            qparams = weight_qparams(values, SCHEMES[16], axis, "minmax")
            wide[place] = replace(it, quantized=quantize(values, qparams), qparams=qparams)
    return wide


def _with(model: Model, constants: Mapping[int, StoredConstant]) -> Model:
    if not constants:
        return model
    proto = copied(model.proto)
    rounded_constants(proto.graph, constants)
    return replace(model, proto=proto)
