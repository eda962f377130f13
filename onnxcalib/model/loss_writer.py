"""Writes graphs that end in a loss: data, parameters, quantizers that can be differentiated, errors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper

from onnxcalib.model.builder import ProtoBuilder
from onnxcalib.model.graph import GraphIndex
from onnxcalib.numerics.quant_params import TINY, QuantScheme, spread

FloatArray = npt.NDArray[np.float32]

DOMAIN = "onnxcalib"
FAKE_QUANTIZE = "FakeQuantize"  # the op of the domain that rounds, and lets gradients straight through
LOSS = "loss"
OF_LAYER = "onnxcalib: of one layer"  # the note on numbers that differ between layers of one structure


@dataclass(frozen=True)
class Quantizer:
    """A grid whose range is trained, or stays as it is."""

    scheme: QuantScheme
    axis: int | None
    low: FloatArray
    range: FloatArray  # high - low; for a symmetric grid the largest magnitude
    trained: bool
    block: int | None = None  # so many values along the axis share a scale

    def spread(self, values: FloatArray, shape: tuple[int, ...]) -> FloatArray:
        """Values of its channels or blocks in a shape that broadcasts against a tensor."""
        return spread(values, self.axis, self.block, shape)


@dataclass(frozen=True)
class Along:
    """What the scales of a grid lie along: the channels of an axis, or blocks of a matrix."""

    axis: int | None
    block: int | None = None
    shape: tuple[int, ...] = ()  # of the matrix


def scale_of(quantizer: Quantizer) -> FloatArray:
    """The step of a quantizer's grid at the start."""
    return np.asarray(np.maximum(quantizer.range, TINY) / _steps(quantizer.scheme), np.float32)


def _steps(scheme: QuantScheme) -> int:
    first, last = scheme.limits
    return last - scheme.zero if scheme.symmetric else last - first


class LossWriter(ProtoBuilder):
    """A graph that grows towards its loss."""

    def __init__(self, source: onnx.ModelProto) -> None:
        super().__init__(source.graph)
        self.source = source
        self.inputs: list[onnx.ValueInfoProto] = []
        self.constants.extend(source.graph.initializer)

    def copy(self, node: onnx.NodeProto) -> onnx.NodeProto:
        """A node of the source, at this place."""
        copied = onnx.NodeProto()
        copied.CopyFrom(node)
        self.nodes.append(copied)
        return copied

    def number(self, name: str, value: npt.ArrayLike) -> str:
        """A constant of floats; ONNX Runtime training wants one of its own for each quantizer."""
        return self.constant(name, np.asarray(value, np.float32), shared=False)

    def own_number(self, name: str, value: npt.ArrayLike) -> str:
        """A constant that another layer of the same structure has with other values."""
        stored = self.number(name, value)
        self.constants[-1].doc_string = OF_LAYER
        return stored

    def input(self, name: str, sample: Sequence[int | str] | None) -> str:
        """A data input of samples of a shape, or a number."""
        shape: list[Any] = [] if sample is None else ["samples", *sample]
        self.inputs.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, shape))
        return name

    def parameter(self, name: str, value: FloatArray, unit: FloatArray | float = 1.0) -> str:
        """A trained input; what comes back is its real value."""
        self.inputs.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, value.shape))
        if np.ndim(unit) == 0 and float(unit) == 1.0:
            return name
        return self.node("Mul", [name, self.own_number(f"{name}_unit", unit)])

    def quantized(
        self, tensor: str, quantizer: Quantizer, range_: str | None, low: str | None, shape: tuple[int, ...] = ()
    ) -> str:
        """The tensor on the quantizer's grid, with its range from parameters if they are given."""
        scheme = quantizer.scheme
        first, last = scheme.limits
        wide = range_ or self.own_number("range", quantizer.range)
        tiny = self.number("tiny", np.float32(TINY))
        positive = self.node("Clip", [wide, tiny])
        scale = self.node("Div", [positive, self.number("steps", np.float32(_steps(scheme)))])
        if scheme.symmetric:
            zero = self.number("zero", np.full(quantizer.range.shape, scheme.zero, np.float32))
        else:
            below = self.node("Div", [low or self.own_number("lowest", quantizer.low), scale])
            place = self.node("Round", [self.node("Sub", [self.number("first", np.float32(first)), below])])
            zero = self.clip(place, first, last)
        along = Along(quantizer.axis, quantizer.block, shape)
        return self.fake_quantize(tensor, scale, zero, (first, last), along)

    def fake_quantize(self, tensor: str, scale: str, zero: str, limits: tuple[int, int], along: Along) -> str:
        """The tensor on a grid, differentiable straight through the rounding."""
        if along.block is not None:
            return self._by_blocks(tensor, scale, zero, limits, along)
        extra: dict[str, Any] = {} if along.axis is None else {"axis": along.axis}
        return self.node(FAKE_QUANTIZE, [tensor, scale, zero], domain=DOMAIN, low=limits[0], high=limits[1], **extra)

    def _by_blocks(self, tensor: str, scale: str, zero: str, limits: tuple[int, int], along: Along) -> str:
        """Every block as a row of its own: a grid of blocks is one of many channels."""
        assert along.block is not None
        turned, lacking = along.axis == 0, -along.shape[along.axis or 0] % along.block
        if turned:
            tensor, scale, zero = (self.node("Transpose", [name], perm=[1, 0]) for name in (tensor, scale, zero))
        if lacking:
            tensor = self.node("Pad", [tensor, self._integers("room", [0, 0, 0, lacking])])
        scale, zero = (self.node("Reshape", [name, self._integers("all", [-1])]) for name in (scale, zero))
        tensor = self.node("Reshape", [tensor, self._integers("blocks", [-1, along.block])])
        return self._joined(self.fake_quantize(tensor, scale, zero, limits, Along(0)), along)

    def _joined(self, tensor: str, along: Along) -> str:
        """The matrix whose blocks are rows."""
        assert along.block is not None
        turned, lacking = along.axis == 0, -along.shape[along.axis or 0] % along.block
        rows, columns = along.shape[::-1] if turned else along.shape
        tensor = self.node("Reshape", [tensor, self._integers("whole", [rows, columns + lacking])])
        if lacking:
            ends = (self._integers(name, [value]) for name, value in (("start", 0), ("end", columns), ("along", 1)))
            tensor = self.node("Slice", [tensor, *ends])
        return self.node("Transpose", [tensor], perm=[1, 0]) if turned else tensor

    def _integers(self, name: str, values: Sequence[int]) -> str:
        return self.constant(name, np.array(values, np.int64))

    def clip(self, tensor: str, low: float, high: float) -> str:
        """The tensor within bounds."""
        bounds = [self.number("bound", np.float32(value)) for value in (low, high)]
        return self.node("Clip", [tensor, *bounds])

    def mean(self, tensor: str) -> str:
        """The mean of all elements."""
        return self.node("ReduceMean", [tensor], keepdims=0)

    def squared_error(self, tensor: str, target: str, energy: float, share: str | None = None) -> str:
        """The mean squared difference, relative to an energy; by shares where not every element counts."""
        gap = self.node("Sub", [tensor, target])
        squares = self.node("Mul", [gap, gap])
        whole = self.mean(squares if share is None else self.node("Mul", [squares, share]))
        return self.node("Mul", [whole, self.own_number("share", np.float32(1 / max(energy, 1e-30)))])

    def finish(self, loss: str) -> onnx.ModelProto:
        """The model with this loss as its output."""
        self.nodes.append(helper.make_node("Identity", [loss], [LOSS], name=LOSS))
        output = helper.make_tensor_value_info(LOSS, TensorProto.FLOAT, [])
        used = {name for node in self.nodes for name in GraphIndex.reads(node)}
        constants = [tensor for tensor in self.constants if tensor.name in used]
        graph = helper.make_graph(self.nodes, "loss", self.inputs, [output], constants)
        versions = {DOMAIN: 1} | {entry.domain: entry.version for entry in self.source.opset_import}
        opsets = [helper.make_opsetid(*each) for each in sorted(versions.items())]
        model: onnx.ModelProto = helper.make_model(graph, opset_imports=opsets)
        model.ir_version = min(self.source.ir_version, 10)
        return model
