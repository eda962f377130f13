"""The nodes that quantize: QuantizeLinear and DequantizeLinear, or QONNX's Quant."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_graphsurgeon as gs

from onnxcalib.model.builder import SurgeonBuilder
from onnxcalib.model.storage import QuantizedArray, pack, unpacking_nodes
from onnxcalib.numerics.quant_params import QuantParams, QuantScheme, broadcast, dequantize, make_qparams, quantize
from onnxcalib.targets import Narrow, Storage, Target

INT32 = np.iinfo(np.int32)
QONNX_DOMAIN = "qonnx.custom_op.general"
FLOAT_TYPE, INT8_TYPE = 1, 3


def int32_steps(bias: npt.NDArray[np.float32], scale: npt.NDArray[np.float32]) -> npt.NDArray[np.int32]:
    """A bias in steps of the layer's products."""
    return np.clip(np.rint(bias.astype(np.float64) / scale), INT32.min, INT32.max).astype(np.int32)


class Quantizers:
    """Writes QDQ nodes into a graph under construction."""

    def __init__(self, graph: gs.Graph, target: Target) -> None:
        self.target, self.build = target, SurgeonBuilder(graph)
        self.int4: dict[str, QuantizedArray] = {}  # by name: constants to be stored as int4 once the graph is a file

    def activation(
        self, tensor: gs.Variable, qparams: QuantParams, name: str, into: gs.Variable | None = None
    ) -> gs.Variable:
        """The tensor on a grid."""
        scale, zero = self._qparams(qparams, name)
        if not qparams.fills_container and self.target.narrow is Narrow.CLIP_VALUES:
            ends = (np.asarray(value, np.float32) for value in qparams.range)
            low, high = map(self.build.constant, (f"{name}_low", f"{name}_high"), ends)
            tensor = self.build.node("Clip", [tensor, low, high], f"{name}_clipped")
        quantized = self.build.node("QuantizeLinear", [tensor, scale, zero], f"{name}_quantized")
        if not qparams.fills_container and self.target.narrow is Narrow.CLIP_CODES:
            low = self.build.constant(f"code_{qparams.low}", np.array(qparams.low, qparams.dtype))
            high = self.build.constant(f"code_{qparams.high}", np.array(qparams.high, qparams.dtype))
            quantized = self.build.node("Clip", [quantized, low, high], f"{name}_clipped")
        return self._into(into, "DequantizeLinear", [quantized, scale, zero], f"{name}_dequantized")

    def dynamic(self, tensor: gs.Variable, name: str) -> list[gs.Variable]:
        """The tensor on a grid that is found at run time: its quantized values, the scale and the zero point."""
        made = [gs.Variable(self.build.fresh(f"{name}_{part}")) for part in ("quantized", "scale", "zero")]
        self.build.graph.nodes.append(gs.Node("DynamicQuantizeLinear", made[0].name, {}, [tensor], made))
        return made

    def codes(self, quantized: QuantizedArray, qparams: QuantParams, name: str) -> gs.Tensor:
        """Quantized values as they are stored, unpacked."""
        storage, four = self.target.storage, qparams.bits == 4 and qparams.signed
        shift = self._shift(quantized, qparams)
        if storage is Storage.BIT_PLANES and qparams.bits < 8:
            packed = pack(quantized, qparams.bits, qparams.low)
            return unpacking_nodes(self.build, replace(packed, shift=shift), name)
        if shift is not None:
            return self._stored(f"{name}_codes", quantized + shift)
        if storage is Storage.INT4_CAST and four:
            return self.build.node("Cast", [self._int4(f"{name}_codes", quantized)], f"{name}_cast", to=INT8_TYPE)
        if storage is Storage.INT4 and four:
            return self._int4(f"{name}_codes", quantized)
        return self._stored(f"{name}_codes", quantized)

    def stored_qparams(self, qparams: QuantParams) -> QuantParams:
        """The grid of what is stored, which has no zero points where these are taken off the codes."""
        if not self.target.shifts(qparams.bits):
            return qparams
        return replace(qparams, zero_point=np.zeros_like(qparams.zero_point))

    def _shift(self, quantized: QuantizedArray, qparams: QuantParams) -> npt.NDArray[np.int8] | None:
        """What takes the zero points off the codes, in a shape that broadcasts."""
        if not self.target.shifts(qparams.bits) or not qparams.zero_point.any():
            return None
        return -broadcast(qparams.zero_point.astype(np.int8), qparams.axis, quantized.ndim)

    def weight(self, quantized: QuantizedArray, qparams: QuantParams, name: str) -> gs.Variable:
        """The values of stored quantized values."""
        stored, four = self.codes(quantized, qparams, name), qparams.bits == 4 and qparams.signed
        scale, zero = self._qparams(self.stored_qparams(qparams), name)
        if qparams.block is not None and not qparams.zero_point.any():
            return self._dequantize([stored, scale], name, qparams.axis, qparams.block)
        if self.target.storage is Storage.INT4 and four:
            zero = self._int4(f"{name}_zero", qparams.zero_point.astype(np.int8))
        return self._dequantize([stored, scale, zero], name, qparams.axis, qparams.block)

    def folded(self, quantized: QuantizedArray, qparams: QuantParams, name: str) -> gs.Variable:
        """The same values by ops that a runtime computes at load, where it would dequantize anew in every run."""
        if qparams.bits < 8:
            stored: gs.Tensor = unpacking_nodes(self.build, pack(quantized, qparams.bits, qparams.low), name)
        else:
            stored = self._stored(f"{name}_codes", quantized)
        values = self.build.node("Cast", [stored], f"{name}_cast", to=FLOAT_TYPE)
        if qparams.zero_point.any():
            zero = self._spread(qparams.zero_point.astype(np.float32), qparams, quantized.shape, f"{name}_zero")
            values = self.build.node("Sub", [values, zero], f"{name}_steps")
        scale = self._spread(qparams.scale.astype(np.float32), qparams, quantized.shape, f"{name}_scale")
        return self.build.node("Mul", [values, scale], name)

    def _spread(
        self, values: npt.NDArray[np.float32], qparams: QuantParams, shape: tuple[int, ...], name: str
    ) -> gs.Tensor:
        """The scales or zero points of a grid in a shape that broadcasts; those of blocks are looked up, at load."""
        if qparams.block is None or qparams.axis is None:
            return self.build.constant(name, broadcast(values, qparams.axis, len(shape)))
        whose = self.build.constant("block_of_each", np.arange(shape[qparams.axis], dtype=np.int32) // qparams.block)
        return self.build.node("Gather", [self.build.constant(name, values), whose], f"{name}s", axis=qparams.axis)

    def int32_bias(self, bias: npt.NDArray[np.float32], scale: npt.NDArray[np.float32], name: str) -> gs.Variable:
        """A bias in steps of the layer's products."""
        quantized = int32_steps(bias, scale)
        inputs = [
            self._stored(f"{name}_codes", quantized),
            self.build.constant(f"{name}_scale", scale),
            self.build.constant(f"{name}_zero", np.zeros(scale.shape, np.int32)),
        ]
        return self._dequantize(inputs, name, 0 if scale.ndim else None)

    def int8_bias(self, bias: npt.NDArray[np.float32], name: str) -> gs.Variable:
        """A bias on a grid of its own."""
        scheme = QuantScheme(8, signed=True, symmetric=True, power_of_two=self.target.power_of_two)
        qparams = make_qparams(bias.min(), bias.max(), scheme)
        stored = self._stored(f"{name}_codes", quantize(bias, qparams))
        return self._dequantize([stored, *self._qparams(qparams, name)], name)

    def _into(
        self, output: gs.Variable | None, op: str, inputs: list[gs.Tensor], name: str, **attrs: Any
    ) -> gs.Variable:
        """A node that makes the output, or a new tensor of that name."""
        made = gs.Variable(self.build.fresh(name)) if output is None else output
        return self.build.into(made, op, inputs, **attrs)

    def _dequantize(
        self, inputs: list[gs.Tensor], name: str, axis: int | None = None, block: int | None = None
    ) -> gs.Variable:
        attrs = {"axis": axis, "block_size": block}
        given = {key: value for key, value in attrs.items() if value is not None}
        return self.build.node("DequantizeLinear", inputs, name, **given)

    def _qparams(self, qparams: QuantParams, name: str) -> tuple[gs.Constant, gs.Constant]:
        scale = self.build.constant(f"{name}_scale", qparams.scale.astype(np.float32))
        return scale, self.build.constant(f"{name}_zero", qparams.zero_point.astype(qparams.dtype))

    def _stored(self, name: str, quantized: QuantizedArray) -> gs.Constant:
        return self.build.constant(name, quantized, shared=self.target.shared_constants)

    def _int4(self, name: str, quantized: QuantizedArray) -> gs.Constant:
        constant = self.build.constant(name, quantized, shared=False)
        self.int4[constant.name] = quantized
        return constant


class QuantNodes(Quantizers):
    """Writes QONNX's Quant nodes instead; they read floats and give floats."""

    def activation(
        self, tensor: gs.Variable, qparams: QuantParams, name: str, into: gs.Variable | None = None
    ) -> gs.Variable:
        """The tensor on a grid."""
        return self._quant(tensor, qparams, f"{name}_quantized", 0, into)

    def weight(self, quantized: QuantizedArray, qparams: QuantParams, name: str) -> gs.Variable:
        """Stored values that lie on the grid already, under a node that says so."""
        values = self.build.constant(f"{name}_values", dequantize(quantized, qparams))
        return self._quant(values, qparams, name, quantized.ndim)

    def _quant(
        self, tensor: gs.Tensor, qparams: QuantParams, name: str, rank: int, into: gs.Variable | None = None
    ) -> gs.Variable:
        scale = self.build.constant(f"{name}_scale", broadcast(qparams.scale.astype(np.float32), qparams.axis, rank))
        zero = self.build.constant("zero", broadcast(qparams.zero_point.astype(np.float32), qparams.axis, rank))
        bits = self.build.constant(f"bits_{qparams.bits}", np.array(qparams.bits, np.float32))
        narrow = qparams.signed and qparams.low > -(2 ** (qparams.bits - 1))
        attrs = {"signed": int(qparams.signed), "narrow": int(narrow), "rounding_mode": "ROUND"}
        return self._into(into, "Quant", [tensor, scale, zero, bits], name, domain=QONNX_DOMAIN, **attrs)
