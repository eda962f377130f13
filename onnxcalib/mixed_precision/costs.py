"""What each layer costs at each precision: bytes as written, multiply-accumulates times bits, activation bytes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from onnxcalib.algorithms.rounding import CandidatePrecisions
from onnxcalib.algorithms.tied import SHARED_BITS
from onnxcalib.mixed_precision.table import LayerChoices, SensitivityTable
from onnxcalib.model.io import constant_bytes
from onnxcalib.model.layers import Layer
from onnxcalib.model.prepare import Model
from onnxcalib.model.qdq import storage_of, write_qdq
from onnxcalib.model.storage import shared_plane_bytes, stored_bytes
from onnxcalib.model.stored import store_constants
from onnxcalib.plan import Candidates, StoredConstant
from onnxcalib.recipe import Precision
from onnxcalib.targets import Bias, Format, Storage, Target


@dataclass(frozen=True)
class Problem:
    """The layers, and all that they may become."""

    model: Model
    layers: Sequence[Layer]
    target: Target
    candidates: Candidates
    candidate_precisions: CandidatePrecisions
    base: Precision
    constants: Sequence[StoredConstant] = ()  # what else is stored as integers

    @property
    def highest(self) -> Precision:
        """The base, or where that is float the highest precision of what is quantized, which every layer may get."""
        offered = [set(choices) for choices in self.candidate_precisions.values()]
        return max(choice for choice in set.intersection(*offered) if not choice.is_float)

    def each(self, cost: Callable[[Layer, Precision], float]) -> dict[str, dict[Precision, float]]:
        """A cost of every layer at each of its choices."""
        return {
            layer.name: {choice: float(cost(layer, choice)) for choice in self.candidate_precisions[layer.name]}
            for layer in self.layers
        }


def unmeasured(problem: Problem, elements: Mapping[str, float]) -> SensitivityTable:
    """The table with every cost, and no loss yet; elements are those of each tensor that layers read, a sample."""
    costs = costs_of(problem, elements)
    rows = tuple(
        LayerChoices(
            layer.name,
            layer.input,
            dict.fromkeys(problem.candidate_precisions[layer.name], 0.0),
            {name: cost.layers[layer.name] for name, cost in costs.items()},
        )
        for layer in problem.layers
    )
    fixed = {name: cost.fixed for name, cost in costs.items()}
    whole = {name: cost.whole_float for name, cost in costs.items()}
    return SensitivityTable(problem.base, "none", 0.0, 0, fixed, whole, rows)


@dataclass(frozen=True)
class _Cost:
    layers: Mapping[str, Mapping[Precision, float]]
    fixed: float
    whole_float: float


def costs_of(problem: Problem, elements: Mapping[str, float]) -> dict[str, _Cost]:
    """The built-in costs: bytes as written, multiply-accumulates times bits, and activation bytes."""
    costs = {"size": _size(problem)}
    macs = {layer.name: layer.macs for layer in problem.layers}
    known = {name: count for name, count in macs.items() if count is not None}
    if len(known) == len(macs):
        bops = problem.each(lambda layer, choice: known[layer.name] * choice.weight * choice.activation)
        costs["bops"] = _Cost(bops, 0.0, float(sum(known.values()) * 32 * 32))
    first = {layer.input: layer.name for layer in reversed(problem.layers)}
    activation = problem.each(
        lambda layer, choice: elements[layer.input] * choice.activation / 8 if first[layer.input] == layer.name else 0.0
    )
    costs["activation"] = _Cost(activation, 0.0, 4.0 * sum(elements.values()))
    return costs


def _size(problem: Problem) -> _Cost:
    """The most bytes that all constants can take: packed weights, and what no choice changes (scales, biases, ...)."""
    # Quantized: then there are scales, which float layers have not.
    highest = problem.highest
    plan = problem.candidates.stitch({layer.name: highest for layer in problem.layers})
    # Quant nodes read float weights; what counts is what the hardware will hold.
    file = write_qdq(problem.model, problem.layers, plan, replace(problem.target, format=Format.QDQ))
    constants = [*problem.constants, *plan.tables.values()]
    written = constant_bytes(store_constants(file, constants)[0] if constants else file)
    layers = problem.each(lambda layer, choice: _weight_bytes(problem, layer, choice))
    fixed = written - sum(sizes[highest] for sizes in layers.values())
    asked = {choice.weight for choices in problem.candidate_precisions.values() for choice in choices}
    widths = {bits for bits in asked if bits < 8 and storage_of(problem.target, bits) is Storage.BIT_PLANES}
    shared = shared_plane_bytes(widths) + (_block_places(problem) if widths else 0)
    return _Cost(layers, fixed + shared + _new_biases(problem), _float_bytes(problem.model))


def _weight_bytes(problem: Problem, layer: Layer, choice: Precision) -> int:
    """The weight of a layer, and the table that it shares: at fewer than eight bits that has its scales once."""
    choices, shape = problem.candidates.layers[layer.name], layer.weight_shape
    if choice.is_float:
        own = 4 * math.prod(shape)
    else:
        own = stored_bytes(shape, choice.weight, storage_of(problem.target, choice.weight))
        if problem.target.shifts(choice.weight):
            own += choices[choice].qparams.zero_point.size  # what takes them off the codes
    table = next((params.table for params in choices.values() if params.table is not None), None)
    if table is None:
        return own
    shared = None if choice.is_float else choices[choice].table
    if shared is None:  # it lies beside the table
        return own + next(it.bytes for it in problem.constants if it.name == table.name)
    # At eight bits the layer has scales of its own; below, a vector says to which block each column belongs.
    more = shared.qparams.scale.size if shared.qparams.bits == SHARED_BITS else shared.quantized.shape[1]
    return shared.bytes + 4 * more


def _float_bytes(model: Model) -> float:
    """Of the constants of the float file, which has those once that preparing it has written twice."""
    own = constant_bytes(model.proto)
    return float(min(own, model.given_bytes or own))


def _block_places(problem: Problem) -> int:
    """What says to which block each weight belongs, where weights become float at load: once for each length."""
    grids = {name: next(iter(choices.values())).qparams for name, choices in problem.candidates.layers.items()}
    shapes = {layer.name: layer.weight_shape for layer in problem.layers}
    axes = {name: qparams.axis for name, qparams in grids.items() if qparams.block is not None}
    return sum(4 * size for size in {shapes[name][axis] for name, axis in axes.items() if axis is not None})


def _new_biases(problem: Problem) -> int:
    """What tuning may add: a bias for each layer that has none and can take one, with its scales."""
    each = {Bias.FLOAT: 4, Bias.INT32: 12, Bias.INT8: 1}[problem.target.bias]
    return sum(each * layer.channels for layer in problem.layers if layer.bias is None and layer.takes_bias)
