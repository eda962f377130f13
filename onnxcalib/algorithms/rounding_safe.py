"""Scales whose ratios put no result halfway between two quantized values, so that every runtime rounds it the same way.

What a layer adds up is a whole number of steps, and the code that it becomes is this number times a ratio of scales.
Near a tie runtimes round to different sides, and a deep network makes of one such code as much noise as quantization
itself does. Multiples of a fraction with an odd denominator stay clear of ties.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import onnx

from onnxcalib.model.graph import GraphIndex, attributes
from onnxcalib.model.layers import Layer
from onnxcalib.model.placement import ABSORBED_OPS, SAME_QPARAMS_OPS, InsertionPoints
from onnxcalib.model.prepare import Model
from onnxcalib.model.shapes import infer_shapes
from onnxcalib.numerics.fractions import common_fractions, near_fractions
from onnxcalib.numerics.quant_params import QuantParams, most_scale
from onnxcalib.plan import LayerParams, QuantPlan
from onnxcalib.targets import Target

PASSING_OPS = ABSORBED_OPS | SAME_QPARAMS_OPS | {"Pad", "Identity"}
SUM_OPS = {"Add", "Concat"}
MEAN_OPS = {"GlobalAveragePool", "ReduceMean", "AveragePool"}
# How far scales may move, as seen from themselves; those of weights take the values of their quantized values along.
ACTIVATION_MOVE = 2.0**-7
WEIGHT_MOVE, MOST_WEIGHT_MOVE = 2.0**-11, 2.0**-8


def with_rounding_safe_scales(
    model: Model, layers: Sequence[Layer], points: InsertionPoints, plan: QuantPlan, target: Target
) -> QuantPlan:
    """Requires a plan made for this model; ensures the same quantized weights, on scales that moved by a little."""
    if not target.rounding_safe or target.power_of_two or target.float_activations:
        return plan
    made = {layer.summed: layer for layer in layers if layer.name in plan.layers}
    shapes = infer_shapes(model.proto)
    mover = _Mover(GraphIndex(model.proto.graph), shapes, made, points, target, dict(plan.shared), dict(plan.inputs))
    for name in points.tensors:
        mover.fit(name)
    moved = replace(plan, shared=mover.shared, inputs=mover.inputs)
    params = dict(plan.layers)
    for layer in made.values():
        if layer.name in mover.results and _counts_in_steps(layer, params[layer.name], target):
            params[layer.name] = _moved(layer, params[layer.name], moved, mover.results[layer.name])
    return replace(moved, layers=params)


@dataclass(frozen=True)
class _Result:
    """The quantized tensor that a layer's result goes into, and the denominator of what is added on the way."""

    tensor: str
    denominator: int


@dataclass
class _Sum:
    """What a tensor is computed from by adding: tensors with grids, each divided by a number, and layers' results."""

    sources: dict[str, int] = field(default_factory=dict)
    layers: list[str] = field(default_factory=list)


@dataclass
class _Mover:
    """Moves the scales of activations, in graph order; one that another was fitted to stays."""

    index: GraphIndex
    shapes: Mapping[str, tuple[int | None, ...]]
    made: Mapping[str, Layer]  # by tensor
    points: InsertionPoints
    target: Target
    shared: dict[str, QuantParams]
    inputs: dict[str, QuantParams]
    results: dict[str, _Result] = field(default_factory=dict)  # by layer
    fitted: set[str] = field(default_factory=set)

    def fit(self, name: str) -> None:
        """Fits the grid of a tensor to those that it is computed from."""
        qparams, kept = self.shared.get(name) or self.inputs.get(name), self.points.tensors[name].same_qparams_as
        if qparams is None:
            return
        if kept is not None and kept in self.shared:
            self._rescale(name, float(self.shared[kept].scale))
            self.fitted |= {name, kept}
            return
        terms = self._walk(name)
        denominator = self._fit(name, float(qparams.scale), terms.sources)
        for layer in terms.layers if denominator is not None else ():
            self.results.setdefault(layer, _Result(name, denominator or 1))

    def _fit(self, name: str, own: float, sources: Mapping[str, int]) -> int | None:
        """The common denominator of what is added up; the tensor and all but one of its sources move."""
        if not sources:
            return 1
        fixed = min(sources, key=lambda source: source not in self.fitted)
        others = [source for source in sources if source != fixed]
        scales = {source: float(self.shared[source].scale) / divisor for source, divisor in sources.items()}
        found = common_fractions(
            [scales[source] / own for source in (fixed, *others)],
            ACTIVATION_MOVE,
            least=scales[fixed] / self._most(name, self.shared.get(name) or self.inputs[name]),
            most=[self._most(source, self.shared[source]) / sources[source] / scales[fixed] for source in others],
        )
        if found is None:
            return None
        denominator, numerators = found
        unit = scales[fixed] / numerators[0]
        self._rescale(name, unit * denominator)
        for source, numerator in zip(others, numerators[1:], strict=True):
            if source not in self.fitted:
                self._rescale(source, unit * sources[source] * numerator)
        self.fitted |= {name, *sources}
        return denominator

    def _most(self, name: str, qparams: QuantParams) -> float:
        """The largest scale that a tensor's grid may have: no code beyond where its activation cuts."""
        kind = self.target.activation_scheme(qparams.bits, positive=not qparams.signed)
        return float(most_scale(qparams, self.points.tensors[name].bounds, kind))

    def _rescale(self, name: str, scale: float) -> None:
        if name not in self.shared:
            self.inputs[name] = _with_scale(self.inputs[name], scale)
            return
        self.shared[name] = _with_scale(self.shared[name], scale)
        if name in self.inputs:  # the second of two quantizers in a row
            ratio = np.array(scale / float(self.inputs[name].scale))
            self.inputs[name] = _with_scale(
                self.inputs[name], scale / float(near_fractions(ratio, 1, ACTIVATION_MOVE, ACTIVATION_MOVE))
            )

    def _walk(self, start: str) -> _Sum:
        terms, seen, todo = _Sum(), set[tuple[str, int]](), [(start, 1)]
        while todo:  # no recursion: a network may be deeper than the stack
            name, divisor = todo.pop()
            node = self.index.producers.get(name)
            if (name, divisor) in seen:
                continue
            seen.add((name, divisor))
            if name in self.shared and name != start:
                terms.sources[name] = divisor
            elif name in self.made:
                terms.layers += [self.made[name].name] if divisor == 1 else []
            elif node is not None and node.op_type in SUM_OPS:
                todo.extend((source, divisor) for source in reversed(node.input))
            elif node is not None and node.op_type in PASSING_OPS:
                todo.append((node.input[0], divisor))
            elif node is not None and node.op_type in MEAN_OPS:
                count = self._count(node)
                todo += [] if count is None else [(node.input[0], divisor * count)]
        return terms

    def _count(self, node: onnx.NodeProto) -> int | None:
        """How many values a mean is taken of, None if that is unknown."""
        if node.op_type == "AveragePool":
            given = attributes(node)
            plain = not any(given.get("pads", ())) and not given.get("ceil_mode") and "auto_pad" not in given
            return math.prod(given["kernel_shape"]) if plain else None
        before, after = (self.shapes.get(name, ()) for name in (node.input[0], node.output[0]))
        sizes = [size for size in (*before[1:], *after[1:]) if size is not None]
        if not before or before[:1] != after[:1] or len(sizes) + 2 != len(before) + len(after):
            return None
        return math.prod(sizes[: len(before) - 1]) // math.prod(sizes[len(before) - 1 :])


def _counts_in_steps(layer: Layer, params: LayerParams, target: Target) -> bool:
    """Whether a result is a whole number of steps of activation times weight, its bias included."""
    whole = target.integer_bias and layer.op in target.bias_ops
    return params.qparams.block is None and (params.bias is None or whole)


def _moved(layer: Layer, params: LayerParams, plan: QuantPlan, result: _Result) -> LayerParams:
    read, made = plan.layer_input(layer.input), plan.shared.get(result.tensor) or plan.inputs[result.tensor]
    if read is None:
        return params
    unit = float(made.scale) / float(read.scale)
    ratios = params.qparams.scale.astype(np.float64) / unit
    scale = near_fractions(ratios, result.denominator, WEIGHT_MOVE, MOST_WEIGHT_MOVE) * unit
    return replace(params, qparams=_with_scale(params.qparams, scale))


def _with_scale(qparams: QuantParams, scale: npt.ArrayLike) -> QuantParams:
    return replace(qparams, scale=np.asarray(scale, np.float32))
