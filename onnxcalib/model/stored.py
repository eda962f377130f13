"""Writes large constants as int8: a Cast and a Mul make them float again, and rows of a table are looked up as int8."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper

from onnxcalib.model.external import values_of
from onnxcalib.model.graph import attributes, fresh_name
from onnxcalib.model.io import copied
from onnxcalib.model.large_constants import LEAST, large_constants
from onnxcalib.model.walk import all_nodes, bodies, refill
from onnxcalib.numerics.quant_params import broadcast, dequantize
from onnxcalib.plan import STORED_BITS, StoredConstant

NIBBLE = STORED_BITS[0]
Content = tuple[tuple[int, ...], str, bytes]  # shape, type, and a hash of the values


def rounded_constants(graph: onnx.GraphProto, constants: Mapping[int, StoredConstant]) -> None:
    """Gives large constants, by their place among all of them, the values that will be stored.

    A layer that reads one of them transposed goes along, so that both have the same codes.
    """
    for place, found in enumerate(large_constants(graph)):
        if place in constants:
            values = dequantize(constants[place].quantized, constants[place].qparams)
            before = values_of(found.tensor)
            turned = [it for it in graph.initializer if values.ndim == 2 and list(it.dims) == [*values.shape[::-1]]]
            for tensor in (it for it in turned if it.data_type == TensorProto.FLOAT and it.name != found.tensor.name):
                if np.array_equal(values_of(tensor), before.T):
                    tensor.CopyFrom(numpy_helper.from_array(np.ascontiguousarray(values.T), tensor.name))
            found.tensor.CopyFrom(numpy_helper.from_array(values, found.tensor.name))


def store_constants(
    model: onnx.ModelProto, constants: Iterable[StoredConstant]
) -> tuple[onnx.ModelProto, dict[str, StoredConstant]]:
    """A copy that stores what has the values of such a constant as int8, and which of them it has.

    What half precision holds exactly is stored in that. Constants are known by their values: a branch of an If that was
    quantized by itself may call them something else.
    """
    stored = copied(model)
    writer = _Writer({_content(dequantize(it.quantized, it.qparams)): it for it in constants}, _names(stored.graph))
    writer.write(stored.graph, {})
    return stored, writer.used


@dataclass
class _Writer:
    constants: Mapping[Content, StoredConstant]
    taken: set[str]
    used: dict[str, StoredConstant] = field(default_factory=dict)
    tables: set[str] = field(default_factory=set)  # whose rows are looked up

    def write(self, graph: onnx.GraphProto, outer: Mapping[Content, str]) -> None:
        """A graph and those within its nodes; codes that a graph around it holds already are not stored again."""
        own = {_content(values_of(it)): it.name for it in graph.initializer if _is_int8(it)}
        codes, first, gone = {**own, **outer}, [], set()
        self.tables = {node.input[0] for node in all_nodes(graph) if node.op_type == "Gather"}
        for found in list(large_constants(graph, inner=False)):
            values = values_of(found.tensor)
            constant = self.constants.get(_content(values))
            if constant is not None:
                self.used[fresh_name(found.tensor.name, self.used)] = constant
                if _content(_factored(constant)[0]) in codes:
                    gone.add(found.tensor.name)
                first += self._as_int8(graph, found.tensor, constant, codes)
            elif _is_half(values):
                first += self._as_half(found.tensor, values)
        turned = self._turned({**own, **codes}, set(own.values()))
        gone.update(node.output[0] for node in turned)
        refill(graph.initializer, [tensor for tensor in graph.initializer if tensor.name not in gone])
        refill(graph.node, [*turned, *first, *graph.node])
        for node in graph.node:
            for body in bodies(node):
                self.write(body, codes)

    def _as_int8(
        self, graph: onnx.GraphProto, tensor: onnx.TensorProto, constant: StoredConstant, codes: dict[Content, str]
    ) -> list[onnx.NodeProto]:
        name, qparams = str(tensor.name), constant.qparams
        if qparams.bits <= NIBBLE:
            return self._as_nibbles(graph, tensor, constant)
        quantized, factors = _factored(constant)
        content = _content(quantized)
        if content not in codes:
            codes[content] = self._fresh(name, "codes")
            tensor.CopyFrom(numpy_helper.from_array(quantized, codes[content]))
        scale = self._scale(graph, name, constant, factors)
        if qparams.block is not None:
            return self._blocks(graph, codes[content], scale, name, constant.quantized.shape)
        if name in self.tables:
            self._look_up(graph, name, codes[content], scale, qparams.axis)
            if not any(name in node.input for node in all_nodes(graph)):
                return []
        return self._product(codes[content], scale, name)

    def _scale(
        self, graph: onnx.GraphProto, name: str, constant: StoredConstant, factors: npt.NDArray[np.float32]
    ) -> str:
        """The scales; those along the last axis may be a vector that a layer has of the same weight."""
        last = factors.size > 1 and factors.shape[-1] == factors.size and "Gather" not in constant.op
        vectors = [it for it in graph.initializer if list(it.dims) == [factors.size]] if last else []
        for tensor in (it for it in vectors if it.data_type == TensorProto.FLOAT):
            if np.array_equal(values_of(tensor), factors.reshape(-1)):
                return str(tensor.name)
        graph.initializer.append(numpy_helper.from_array(factors, self._fresh(name, "scale")))
        return str(graph.initializer[-1].name)

    def _as_nibbles(
        self, graph: onnx.GraphProto, tensor: onnx.TensorProto, constant: StoredConstant
    ) -> list[onnx.NodeProto]:
        """Two values a byte, those of the first and of the second half of a row; unpacked after they are looked up.

        What else reads the table gets what nodes make of it, which are run once, at load.
        """
        name, low, half = str(tensor.name), constant.qparams.low, constant.quantized.shape[1] // 2
        qparams = constant.qparams
        steps = (constant.quantized.astype(np.int16) - low).astype(np.uint8)
        packed = self._fresh(name, "codes")
        tensor.CopyFrom(numpy_helper.from_array(steps[:, :half] | steps[:, half:] << NIBBLE, packed))
        values: dict[str, npt.NDArray[Any]] = {
            "scale": qparams.scale if qparams.block is not None else qparams.scale.reshape(-1, 1),
            "four": np.array(NIBBLE, np.uint8),
            "sixteen": np.array(2**NIBBLE, np.uint8),
            "low": np.array(-low, np.float32),
        }
        if qparams.block is not None:
            values["blocks"] = (np.arange(2 * half) // qparams.block).astype(np.int32)
        names = {word: self._fresh(name, word) for word in values}
        graph.initializer.extend(numpy_helper.from_array(value, names[word]) for word, value in values.items())
        self._look_up_nibbles(graph, name, packed, names)
        if not any(name in node.input for node in all_nodes(graph)):
            return []
        return self._unpacked(packed, names["scale"], name, names, axis=1)

    def _look_up_nibbles(self, graph: onnx.GraphProto, name: str, packed: str, names: Mapping[str, str]) -> None:
        nodes: list[onnx.NodeProto] = []
        for node in graph.node:
            for body in bodies(node):
                self._look_up_nibbles(body, name, packed, names)
            if name not in node.input[:1] or node.op_type != "Gather" or attributes(node).get("axis", 0) != 0:
                nodes.append(node)
                continue
            output = node.output[0]
            rows, factor = (self._fresh(output, word) for word in ("rows", "scale"))
            nodes.append(helper.make_node("Gather", [names["scale"], node.input[1]], [factor], factor, axis=0))
            node.input[0], node.output[0] = packed, rows
            nodes += [node, *self._unpacked(rows, factor, output, names)]
        refill(graph.node, nodes)

    def _unpacked(
        self, rows: str, factor: str, output: str, names: Mapping[str, str], axis: int = -1
    ) -> list[onnx.NodeProto]:
        """Makes packed rows float by their scales, each of which may be that of a block."""
        high, low, codes, cast, steps = (
            self._fresh(output, word) for word in ("high", "low", "codes", "cast", "steps")
        )
        nodes = [
            helper.make_node("BitShift", [rows, names["four"]], [high], high, direction="RIGHT"),
            helper.make_node("Mod", [rows, names["sixteen"]], [low], low),
            helper.make_node("Concat", [low, high], [codes], codes, axis=-1),
            helper.make_node("Cast", [codes], [cast], cast, to=TensorProto.FLOAT),
            helper.make_node("Sub", [cast, names["low"]], [steps], steps),
        ]
        if "blocks" in names:
            each = self._fresh(output, "scales")
            nodes.append(helper.make_node("Gather", [factor, names["blocks"]], [each], each, axis=axis))
            factor = each
        return [*nodes, helper.make_node("Mul", [steps, factor], [output], self._fresh(output, "scaled"))]

    def _blocks(
        self, graph: onnx.GraphProto, codes: str, scale: str, output: str, shape: tuple[int, ...]
    ) -> list[onnx.NodeProto]:
        """Blocks of the last axis lie along one of their own, until each has its scale."""
        blocks, sizes = self._fresh(output, "blocks"), self._fresh(output, "shape")
        graph.initializer.append(numpy_helper.from_array(np.array(shape, np.int64), sizes))
        whole = helper.make_node("Reshape", [blocks, sizes], [output], self._fresh(output, "reshaped"))
        return [*self._product(codes, scale, blocks), whole]

    def _look_up(self, graph: onnx.GraphProto, name: str, codes: str, scale: str, axis: int | None) -> None:
        """Rows of a table are looked up as int8 and become float then, each by its own scale."""
        nodes: list[onnx.NodeProto] = []
        for node in graph.node:
            for body in bodies(node):
                self._look_up(body, name, codes, scale, axis)
            own = int(attributes(node).get("axis", 0)) if node.op_type == "Gather" and not node.domain else -1
            if name not in node.input[:1] or own < 0 or axis not in (own, None):
                nodes.append(node)
                continue
            output, rows, factor = node.output[0], self._fresh(node.output[0], "codes"), scale
            if axis is not None:
                factor = self._fresh(output, "scale")
                nodes.append(helper.make_node("Gather", [scale, node.input[1]], [factor], factor, axis=own))
            node.input[0], node.output[0] = codes, rows
            nodes += [node, *self._product(rows, factor, output)]
        refill(graph.node, nodes)

    def _as_half(self, tensor: onnx.TensorProto, values: npt.NDArray[np.float32]) -> list[onnx.NodeProto]:
        name, half = str(tensor.name), self._fresh(tensor.name, "half")
        tensor.CopyFrom(numpy_helper.from_array(values.astype(np.float16), half))
        return [helper.make_node("Cast", [half], [name], self._fresh(name, "float"), to=TensorProto.FLOAT)]

    def _turned(self, codes: Mapping[Content, str], own: set[str]) -> list[onnx.NodeProto]:
        """Makes codes of layers in this graph a Transpose of those of a table that they share."""
        nodes = []
        for constant in self.used.values():
            straight, turned = (codes.get(_content(it)) for it in (constant.quantized, constant.quantized.T))
            if constant.quantized.ndim == 2 and straight and turned in own - {straight}:
                own.remove(turned)
                nodes.append(
                    helper.make_node("Transpose", [straight], [turned], self._fresh(turned, "turned"), perm=[1, 0])
                )
        return nodes

    def _product(self, codes: str, scale: str, output: str) -> list[onnx.NodeProto]:
        cast = self._fresh(output, "cast")
        return [
            helper.make_node("Cast", [codes], [cast], cast, to=TensorProto.FLOAT),
            helper.make_node("Mul", [cast, scale], [output], self._fresh(output, "scaled")),
        ]

    def _fresh(self, stem: str, word: str) -> str:
        name = fresh_name(f"{stem}_{word}", self.taken)
        self.taken.add(name)
        return name


def _factored(constant: StoredConstant) -> tuple[npt.NDArray[Any], npt.NDArray[np.float32]]:
    """Codes and scales in shapes that multiply."""
    quantized, qparams = constant.quantized, constant.qparams
    if qparams.block is None:
        return quantized, broadcast(qparams.scale, qparams.axis, quantized.ndim)
    return quantized.reshape(*qparams.scale.shape, qparams.block), qparams.scale[..., np.newaxis]


def _content(values: npt.NDArray[Any]) -> Content:
    return values.shape, values.dtype.str, hashlib.sha256(np.ascontiguousarray(values).data).digest()


def _is_int8(tensor: onnx.TensorProto) -> bool:
    return bool(tensor.data_type == TensorProto.INT8 and np.prod(tensor.dims) >= LEAST)


def _is_half(values: npt.NDArray[np.float32]) -> bool:
    with np.errstate(over="ignore"):
        return np.array_equal(values.astype(np.float16).astype(np.float32), values)


def _names(graph: onnx.GraphProto) -> set[str]:
    """Every name of a tensor or a node, those of subgraphs included."""
    names = {it.name for it in (*graph.input, *graph.initializer, *graph.output)}
    for node in graph.node:
        names |= {node.name, *node.output}
        for body in bodies(node):
            names |= _names(body)
    return names
