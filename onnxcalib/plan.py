"""The quantization plan: names and arrays, all that decides the written file."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from onnxcalib.numerics.quant_params import QuantParams
from onnxcalib.recipe import FLOAT_BITS, MAX_BITS, Precision

STORED_BITS = (4, 8, 16)  # of a value of a large constant


@dataclass(frozen=True)
class LayerParams:
    """A layer's quantized weights with their grid, and its float bias."""

    quantized: npt.NDArray[Any]
    qparams: QuantParams
    bias: npt.NDArray[np.float32] | None
    weight: npt.NDArray[np.float32]  # what the quantized values were rounded from, for those who train on
    input: QuantParams | None = None  # a trained grid of its own for what the layer reads; None: the tensor's
    table: StoredConstant | None = None  # the embedding table that these are the codes of, a row a channel


@dataclass(frozen=True)
class StoredConstant:
    """A large constant that is computed with in float, and lies in the file as int8, as int16, or at four bits."""

    name: str  # the tensor
    op: str  # of the nodes that read it
    readers: tuple[str, ...]  # their names
    quantized: npt.NDArray[Any]
    qparams: QuantParams

    @property
    def float_bytes(self) -> int:
        """What it takes as float32."""
        return 4 * self.quantized.size

    @property
    def bytes(self) -> int:
        """What it takes with its scales."""
        width = next(width for width in STORED_BITS if width >= self.qparams.bits)
        return -(-self.quantized.size * width // 8) + 4 * self.qparams.scale.size

    @property
    def told(self) -> dict[str, Any]:
        """All but the values, as JSON holds it."""
        return {
            "constant": self.name,
            "op": self.op,
            "readers": list(self.readers),
            "shape": list(self.quantized.shape),
            "bits": self.qparams.bits,
            "float_bytes": self.float_bytes,
            "bytes": self.bytes,
        }


@dataclass(frozen=True)
class QuantPlan:
    """What is quantized, and how."""

    target: str
    ranges: str  # the range estimators
    precisions: Mapping[str, Precision]  # by layer
    layers: Mapping[str, LayerParams]
    shared: Mapping[str, QuantParams]  # by tensor: the grid that every reader sees
    inputs: Mapping[str, QuantParams]  # by tensor: the grid that layers see, on top of the shared one if there is one
    constants: Mapping[str, StoredConstant] = field(default_factory=dict)  # by tensor: what else is stored as int8
    dynamic: tuple[str, ...] = ()  # tensors that layers read on a grid of eight bits that is found at run time

    def layer_input(self, tensor: str) -> QuantParams | None:
        """The grid on which layers read a tensor, None if that is float or found at run time."""
        return self.inputs.get(tensor) or self.shared.get(tensor)

    def grids_of(self, tensor: str) -> list[QuantParams]:
        """Those on which layers read a tensor, one after the other."""
        return [grids[tensor] for grids in (self.shared, self.inputs) if tensor in grids]

    @property
    def is_narrow(self) -> bool:
        """Whether anything has fewer than eight bits."""
        return any(min(each.weight, each.activation) < MAX_BITS for each in self.precisions.values())

    @property
    def reads_floats(self) -> bool:
        """Whether weights alone are quantized."""
        return all(precision.activation == FLOAT_BITS for precision in self.precisions.values())

    @property
    def tables(self) -> dict[str, StoredConstant]:
        """By tensor: the embedding tables whose codes are those of a layer."""
        found = (params.table for params in self.layers.values())
        return {table.name: table for table in found if table is not None}

    def without(self, layers: Collection[str], tensors: Collection[str]) -> QuantPlan:
        """The plan with these layers float, and these tensors quantized for the layers that read them alone."""
        alone = {name: qparams for name, qparams in self.shared.items() if name in tensors}
        return replace(
            self,
            precisions={name: value for name, value in self.precisions.items() if name not in layers},
            layers={name: value for name, value in self.layers.items() if name not in layers},
            shared={name: value for name, value in self.shared.items() if name not in alone},
            inputs={**alone, **self.inputs},
        )

    def reading(self, dynamic: Collection[str], floats: Collection[str]) -> QuantPlan:
        """The plan with grids of these tensors that are found at run time, and with those left float."""
        shared, inputs = (_without(grids, {*dynamic, *floats}) for grids in (self.shared, self.inputs))
        return replace(self, shared=shared, inputs=inputs, dynamic=(*self.dynamic, *dynamic))

    def joined(self, other: QuantPlan) -> QuantPlan:
        """One plan for two graphs of a model."""
        return QuantPlan(
            self.target,
            ", ".join(dict.fromkeys((self.ranges, other.ranges))),
            {**self.precisions, **other.precisions},
            {**self.layers, **other.layers},
            {**self.shared, **other.shared},
            {**self.inputs, **other.inputs},
            {**self.constants, **other.constants},
            (*self.dynamic, *other.dynamic),
        )


@dataclass(frozen=True)
class LeftFloat:
    """What stays float for the sake of outputs that quantization breaks; nothing, where nothing helps."""

    tensors: tuple[str, ...] = ()  # who reads them gets floats
    inputs: tuple[str, ...] = ()  # the layers among these: their weights are quantized
    layers: tuple[str, ...] = ()  # whose weights stay float as well
    before: Mapping[str, float] = field(default_factory=dict)  # by output: signal to noise in decibels
    after: Mapping[str, float] = field(default_factory=dict)  # with all that float

    def __bool__(self) -> bool:
        return bool(self.tensors or self.layers)

    def joined(self, other: LeftFloat) -> LeftFloat:
        """What stays float in two graphs of a model."""
        return LeftFloat(
            (*self.tensors, *other.tensors),
            (*self.inputs, *other.inputs),
            (*self.layers, *other.layers),
            {**self.before, **other.before},
            {**self.after, **other.after},
        )


@dataclass(frozen=True)
class Candidates:
    """Every layer at every precision that it may get, ready to be stitched into one plan."""

    target: str
    ranges: str
    shared: Mapping[str, QuantParams]
    inputs: Mapping[str, Mapping[int, QuantParams]]  # by tensor that layers read, then by bits
    layers: Mapping[str, Mapping[Precision, LayerParams]]
    tensors: Mapping[str, str]  # by layer: the tensor that it reads
    dynamic: tuple[str, ...] = ()  # tensors whose grids are found at run time

    def reading(self, dynamic: Collection[str], floats: Collection[str]) -> Candidates:
        """The same with grids of these tensors that are found at run time, and with those left float."""
        gone = {*dynamic, *floats}
        inputs = {name: {} if name in gone else grids for name, grids in self.inputs.items()}
        return replace(self, shared=_without(self.shared, gone), inputs=inputs, dynamic=(*self.dynamic, *dynamic))

    def stitch(self, precisions: Mapping[str, Precision]) -> QuantPlan:
        """The plan at these precisions; layers that read one tensor must agree on its bits, and float ones are left."""
        precisions = {layer: precision for layer, precision in precisions.items() if not precision.is_float}
        bits: dict[str, int] = {}
        for layer, precision in precisions.items():
            shared = bits.setdefault(self.tensors[layer], precision.activation)
            assert shared == precision.activation, f"layers disagree on the bits of {self.tensors[layer]}"
        inputs = {tensor: self.inputs[tensor][width] for tensor, width in bits.items() if width in self.inputs[tensor]}
        layers = {layer: self.layers[layer][precision] for layer, precision in precisions.items()}
        inputs |= {self.tensors[layer]: params.input for layer, params in layers.items() if params.input is not None}
        grids = (self.shared, inputs)
        plan = QuantPlan(self.target, self.ranges, dict(precisions), layers, *grids, dynamic=self.dynamic)
        return replace(plan, precisions={name: self._as_read(plan, name) for name in precisions})

    def _as_read(self, plan: QuantPlan, layer: str) -> Precision:
        """The precision of a layer, which may read a float tensor whatever was asked for."""
        precision, tensor = plan.precisions[layer], self.tensors[layer]
        is_float = plan.layer_input(tensor) is None and tensor not in plan.dynamic
        return Precision(precision.weight, FLOAT_BITS) if is_float else precision


def _without(grids: Mapping[str, QuantParams], gone: Collection[str]) -> dict[str, QuantParams]:
    return {name: qparams for name, qparams in grids.items() if name not in gone}
