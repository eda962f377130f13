"""A plan as a graph in which each quantizer can be turned off from outside: one session measures any part of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx
import onnx_graphsurgeon as gs

from onnxcalib.model.layers import Layer
from onnxcalib.model.prepare import Model
from onnxcalib.model.qdq import weight_name, write_qdq
from onnxcalib.model.quantizers import Quantizers
from onnxcalib.model.storage import QuantizedArray
from onnxcalib.numerics.quant_params import QuantParams
from onnxcalib.plan import QuantPlan
from onnxcalib.targets import Dynamic, Placement, Target


@dataclass(frozen=True)
class SwitchedModel:
    """A model with one more input, a flag for each switch: true for the quantized value, false for the float one."""

    proto: onnx.ModelProto
    flags: str  # the name of the input
    tensors: dict[str, list[int]]  # by tensor: its switches
    weights: dict[str, int]  # by layer

    @property
    def count(self) -> int:
        """How many switches there are."""
        return sum(map(len, self.tensors.values())) + len(self.weights)


def write_switched(model: Model, layers: Sequence[Layer], plan: QuantPlan, target: Target) -> SwitchedModel:
    """Requires a plan made for this model; integer biases stay on their grids, whatever is switched."""
    made: list[_SwitchedQuantizers] = []

    def quantizers(graph: gs.Graph, target: Target) -> Quantizers:
        made.append(_SwitchedQuantizers(graph, target, plan))
        return made[0]

    # Weights right at their layers, and no Relu left out for a grid that may be switched off.
    simple = replace(target.simulated, placement=Placement.LAYER_INPUTS, dynamic=Dynamic.QDQ)
    bare = replace(simple, float_compute=False, float_activations=False)
    proto = write_qdq(model, layers, plan, bare, quantizers)
    return SwitchedModel(proto, made[0].flags.name, made[0].tensors, made[0].weights)


class _SwitchedQuantizers(Quantizers):
    def __init__(self, graph: gs.Graph, target: Target, plan: QuantPlan) -> None:
        super().__init__(graph, target)
        self.layers = {weight_name(name): (name, params.weight) for name, params in plan.layers.items()}
        self.flags = gs.Variable(self.build.fresh("quantized"), np.bool_, ["switches"])
        graph.inputs.append(self.flags)
        self.tensors: dict[str, list[int]] = {}
        self.weights: dict[str, int] = {}
        self._made = 0
        self._names: dict[int, str] = {}  # by the surgeon's object: the tensor whose quantized value it is

    def activation(
        self, tensor: gs.Variable, qparams: QuantParams, name: str, into: gs.Variable | None = None
    ) -> gs.Variable:
        """The tensor on a grid, or as it is."""
        # The second of two quantizers reads what the first one made.
        own = self._names.get(id(tensor), (into or tensor).name)
        quantized = super().activation(tensor, qparams, f"{name}_on")
        number, flag = self._switch()
        self.tensors.setdefault(own, []).append(number)
        result = self._into(into, "Where", [flag, quantized, tensor], f"{name}_switched")
        self._names[id(result)] = own
        return result

    def weight(self, quantized: QuantizedArray, qparams: QuantParams, name: str) -> gs.Variable:
        """The values of stored quantized values, or what these were rounded from."""
        layer, weight = self.layers[name]
        self.weights[layer], flag = self._switch()
        exact = self.build.constant(f"{name}_exact", weight.astype(np.float32), shared=False)
        return self.build.node("Where", [flag, super().weight(quantized, qparams, f"{name}_on"), exact], name)

    def _switch(self) -> tuple[int, gs.Variable]:
        place = self.build.constant(f"switch_{self._made}", np.array(self._made, np.int64))
        self._made += 1
        return self._made - 1, self.build.node("Gather", [self.flags, place], f"switch_{self._made - 1}_on")
