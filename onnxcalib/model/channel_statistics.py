"""Graphs that measure channel statistics after layers, and that normalize each batch to given ones on the way."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np
import onnx
import onnx_graphsurgeon as gs

from onnxcalib.model.builder import SurgeonBuilder
from onnxcalib.model.graph import edit
from onnxcalib.model.io import opset_of
from onnxcalib.model.layers import Layer

# Below this a channel is constant for all that float32 can tell.
TINY_VARIANCE = 1e-10
BLUR = 1e-6  # of the squared mean: variances below it are what float32 rounds
# Values further from the mean than this many deviations are outliers.
REACH = 2.0
SHARES = "onnxcalib:shares"  # the input with how much each row of a padded layer counts


def mean_name(layer: Layer) -> str:
    """The output with a layer's channel means."""
    return f"{layer.name}:mean"


def variance_name(layer: Layer) -> str:
    """The output with a layer's channel variances."""
    return f"{layer.name}:variance"


def bound_names(layer: Layer) -> tuple[str, str]:
    """The outputs with the values beyond which a channel's outliers are cut before they are averaged."""
    return f"{layer.name}:low", f"{layer.name}:high"


def wanted_name(output: str) -> str:
    """The input that takes what the float model's output of that name gave."""
    return f"{output}:wanted"


def statistics_shape(layer: Layer) -> tuple[int, ...]:
    """Of what is measured and wanted of a layer, so that it broadcasts against what the layer makes."""
    return (1, layer.channels, *[1] * _places(layer)) if _places(layer) else (layer.channels,)


def _places(layer: Layer) -> int:
    """How many spatial axes the output has; a product of matrices has its channels last."""
    return len(layer.weight_shape) - 2 if layer.op in ("Conv", "ConvTranspose") else 0


def with_statistics(
    model: onnx.ModelProto,
    layers: Sequence[Layer],
    limits: tuple[float, float] | None = None,
    reach: float = REACH,
    padded: Collection[str] = (),
    row_steps: Mapping[str, int] = {},
    kept: Sequence[str] = (),
) -> onnx.ModelProto:
    """The model with channel means and variances as its outputs, in `statistics_shape`, beside those that are kept.

    With limits it also normalizes each layer's batch to the wanted statistics, by a factor kept within the limits, so
    that later layers see corrected inputs. Of the padded layers, rows count by the input SHARES, one on average.
    Of layers with a row step only every so many rows of the output's first spatial axis are measured.
    """

    def change(graph: gs.Graph) -> None:
        builder = _Builder(graph, opset_of(model), reach, padded, row_steps)
        measured = [value for layer in layers for value in builder.add(layer, limits)]
        graph.outputs = [*measured, *(value for value in graph.outputs if value.name in kept)]

    return edit(model, change)


class _Builder(SurgeonBuilder):
    def __init__(
        self, graph: gs.Graph, opset: int, reach: float, padded: Collection[str], row_steps: Mapping[str, int]
    ) -> None:
        super().__init__(graph)
        self.opset, self.reach, self.padded, self.row_steps = opset, reach, padded, row_steps
        self.shares = gs.Variable(SHARES, np.float32, ["rows", 1])
        if padded:
            graph.inputs.append(self.shares)
        self.nodes = {node.name: node for node in graph.nodes}

    def add(self, layer: Layer, limits: tuple[float, float] | None) -> list[gs.Variable]:
        """Measures after the layer's bias; returns the mean and the variance, and the bounds where it sets them."""
        tensor = self.nodes[layer.bias_node or layer.name].outputs[0]
        readers = list(tensor.outputs)
        # Clipped outliers would shift a channel's mean, and the correction would move everything else.
        seen = self._some_rows(layer, tensor)
        bounds = self._bounds(layer, seen) if limits is None else [self._wanted(layer, n) for n in bound_names(layer)]
        kept = self.node("Min", [self.node("Max", [seen, bounds[0]]), bounds[1]])
        mean, variance = self._moments(layer, kept)
        measured = [self._named(mean, mean_name(layer)), self._named(variance, variance_name(layer))]
        if limits is None:
            return [*measured, *(self._named(*pair) for pair in zip(bounds, bound_names(layer), strict=True))]
        normalized = self._normalized(layer, tensor, (mean, variance), limits)
        for node in readers:
            node.inputs = [normalized if value is tensor else value for value in node.inputs]
        if any(value is tensor for value in self.graph.outputs):  # who reads it later gets what readers get here
            normalized.name, tensor.name = tensor.name, normalized.name
            self.graph.outputs = [normalized if value is tensor else value for value in self.graph.outputs]
        return measured

    def _some_rows(self, layer: Layer, tensor: gs.Variable) -> gs.Variable:
        """Fewer positions of a large map: neighbours tell the same, and all that is measured is written and read."""
        step = self.row_steps.get(layer.name, 1)
        if step == 1:
            return tensor
        given = {"starts": 0, "ends": np.iinfo(np.int64).max, "axes": 2, "steps": step}
        return self.node("Slice", [tensor, *(self._ints(name, [value]) for name, value in given.items())])

    def _moments(self, layer: Layer, tensor: gs.Variable) -> tuple[gs.Variable, gs.Variable]:
        """By the mean of squares: what is centred first would be written and read twice more."""
        mean, squares = self._means(layer, tensor)
        power = self.node("Mul", [mean, mean])
        least = self.node("Mul", [power, self.constant("blur", np.array(BLUR, np.float32))])
        return mean, self.node("Max", [self.node("Sub", [squares, power]), least])

    def _bounds(self, layer: Layer, tensor: gs.Variable) -> list[gs.Variable]:
        mean, variance = self._moments(layer, tensor)
        reach = self.constant("reach", np.array(self.reach, np.float32))
        wide = self.node("Mul", [self.node("Sqrt", [variance]), reach])
        return [self.node("Sub", [mean, wide]), self.node("Add", [mean, wide])]

    def _wanted(self, layer: Layer, output: str) -> gs.Variable:
        value = gs.Variable(wanted_name(output), np.float32, statistics_shape(layer))
        self.graph.inputs.append(value)
        return value

    def _normalized(
        self,
        layer: Layer,
        tensor: gs.Variable,
        found: tuple[gs.Variable, gs.Variable],
        limits: tuple[float, float],
    ) -> gs.Variable:
        mean, spread = self._wanted(layer, mean_name(layer)), self._wanted(layer, variance_name(layer))
        tiny = self.constant("tiny", np.array(TINY_VARIANCE, np.float32))
        ratio = self.node("Div", [self.node("Add", [spread, tiny]), self.node("Add", [found[1], tiny])])
        bounds = [self.constant("limit", np.array(value, np.float32)) for value in limits]
        factor = self.node("Clip", [self.node("Sqrt", [ratio]), *bounds])
        shift = self.node("Sub", [mean, self.node("Mul", [found[0], factor])])
        return self.node("Add", [self.node("Mul", [tensor, factor]), shift])

    def _means(self, layer: Layer, tensor: gs.Variable) -> tuple[gs.Variable, gs.Variable]:
        """Of values and of squares, over all but the channels, in a shape that broadcasts against the tensor."""
        axes, keep = [0, *range(2, 2 + _places(layer))], bool(_places(layer))
        if not keep:
            tensor = self.node("Reshape", [tensor, self._ints("rows", [-1, layer.channels])])
        counted = self.node("Mul", [tensor, self.shares]) if layer.name in self.padded else tensor
        # ReduceSumSquare would save a pass, but adds up in one float32: four digits are left of 400,000 values.
        squares = self.node("Mul", [counted, tensor])
        return self._reduce_mean(counted, axes, keep=keep), self._reduce_mean(squares, axes, keep=keep)

    def _reduce_mean(self, tensor: gs.Variable, axes: list[int], *, keep: bool) -> gs.Variable:
        if self.opset < 18:
            return self.node("ReduceMean", [tensor], axes=axes, keepdims=int(keep))
        return self.node("ReduceMean", [tensor, self._ints("axes", axes)], keepdims=int(keep))

    @staticmethod
    def _named(tensor: gs.Variable, name: str) -> gs.Variable:
        tensor.name, tensor.dtype = name, np.dtype(np.float32)
        return tensor

    def _ints(self, name: str, values: Sequence[int]) -> gs.Constant:
        return self.constant(name, np.array(values, np.int64))
