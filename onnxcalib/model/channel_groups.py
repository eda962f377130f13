"""Channels that several tensors share: what Adds, activations and pools join must be scaled by the same factors.

A group is all that one set of channels passes through, from the layers that make them to the layers that read them. A
factor a channel that makers multiply by and readers divide by leaves the function as it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import onnx

from onnxcalib.model.graph import GraphIndex, activation_bounds, attributes
from onnxcalib.model.layers import Layer, Shapes
from onnxcalib.model.prepare import Model
from onnxcalib.model.shapes import infer_shapes

# Ops that give f * y for f * x, whatever positive f a channel has.
PASSING_OPS = {
    "Relu", "LeakyRelu", "Identity", "Dropout", "MaxPool", "AveragePool", "GlobalAveragePool", "GlobalMaxPool",
    "Add", "Sum",
}  # fmt: skip
GATES = {"Sigmoid", "HardSigmoid"}  # what channels may be multiplied by
SIZES = {"Shape", "Size"}
FLATTENING_OPS = {"Flatten", "Reshape", "Squeeze"}


@dataclass(frozen=True)
class ChannelGroup:
    """Layers that make the same channels, and those that read them."""

    makers: tuple[Layer, ...]
    readers: tuple[Layer, ...]
    limit: float  # where an activation cuts; a channel must not be brought above it
    clipped: tuple[str, ...]  # tensors that it cuts

    @property
    def channels(self) -> int:
        """How many factors it has."""
        return self.makers[0].channels

    @property
    def is_free(self) -> bool:
        """Whether factors cost nothing: depthwise layers have a weight scale for each channel that they read."""
        return all(reader.is_depthwise for reader in self.readers)

    @property
    def read(self) -> tuple[str, ...]:
        """The tensors that layers read."""
        return tuple(dict.fromkeys(reader.input for reader in self.readers))


def find_channel_groups(model: Model, layers: Sequence[Layer]) -> list[ChannelGroup]:
    """Requires all layers of a prepared model; the groups whose channels can be scaled, in the order of the graph."""
    index = GraphIndex(model.proto.graph)
    own = {layer.name: layer for layer in layers if _has_own_constants(index, layer)}
    joined = _Joined(index, infer_shapes(model.proto))
    for node in index.graph.node:
        if node.name in own:
            joined.add((own[node.name].input, node.output[0]))
        else:
            joined.pass_through(node)
    joined.refuse([*index.inputs, *index.outputs])
    makers: dict[str, list[Layer]] = {}
    readers: dict[str, list[Layer]] = {}
    for layer in own.values():
        makers.setdefault(joined.root(layer.output), []).append(layer)
        readers.setdefault(joined.root(layer.input), []).append(layer)
    found = []
    for root, making in makers.items():
        reading = readers.get(root, [])
        if reading and root not in joined.refused and _fit(making, reading):
            limits = joined.limits(root)
            group = ChannelGroup(tuple(making), tuple(reading), min(limits.values(), default=np.inf), tuple(limits))
            found.append(group)
    return found


def _has_own_constants(index: GraphIndex, layer: Layer) -> bool:
    """Whether it is of a kind that can be scaled, and nobody else reads its constants."""
    names = [name for name in (layer.weight, layer.bias) if name]
    return layer.op in ("Conv", "Gemm") and all(
        len(index.readers[name]) == 1 and name not in index.outputs for name in names
    )


def inputs_of(layer: Layer) -> int:
    """How many channels a Conv or Gemm reads."""
    if layer.op == "Gemm":
        return layer.weight_shape[1 - layer.channel_axis]
    return layer.weight_shape[1] * layer.groups


def _fit(makers: Sequence[Layer], readers: Sequence[Layer]) -> bool:
    """Whether all have the same channels; a flattened map has several values of each."""
    channels = makers[0].channels
    return all(layer.channels == channels for layer in makers) and all(
        inputs_of(layer) == channels or (layer.op == "Gemm" and inputs_of(layer) % channels == 0) for layer in readers
    )


class _Joined:
    """Sets of tensors that are scaled together, and those of them that cannot be."""

    def __init__(self, index: GraphIndex, shapes: Shapes) -> None:
        self.index, self.shapes = index, shapes
        self._parents: dict[str, str] = {}
        self._limits: dict[str, float] = {}
        self._refused: set[str] = set()

    def root(self, name: str) -> str:
        """What stands for the set of a tensor."""
        while (parent := self._parents.setdefault(name, name)) != name:
            name = parent
        return name

    def add(self, names: Iterable[str]) -> None:
        """Tensors that are known from now on."""
        for name in names:
            self.root(name)

    def refuse(self, names: Iterable[str]) -> None:
        """Tensors that must stay as they are."""
        self._refused.update(names)

    @property
    def refused(self) -> set[str]:
        """Roots of sets that must stay."""
        return {self.root(name) for name in self._refused}

    def limits(self, root: str) -> dict[str, float]:
        """By tensor of a set: where an activation cuts it."""
        return {name: limit for name, limit in self._limits.items() if self.root(name) == root}

    def pass_through(self, node: onnx.NodeProto) -> None:
        """Joins what a node reads with what it makes, or refuses both; sizes have no factors."""
        if node.op_type in SIZES and not node.domain:
            return
        read = [name for name in self.index.reads(node) if name not in self.index.initializers]
        passed = self._passed(node, read)
        if not passed:
            self.refuse((*read, *node.output))
            return
        self.refuse(set(read) - set(passed))
        for name in passed:
            self._parents[self.root(name)] = self.root(node.output[0])
        self.refuse(name for name in node.output[1:] if name)

    def _passed(self, node: onnx.NodeProto, read: list[str]) -> list[str]:
        """What of a node's inputs it hands on with its factors."""
        data = [name for name in node.input if name]
        if node.domain:
            return []
        if node.op_type in PASSING_OPS:
            return read if read == data else []
        if node.op_type == "PRelu":
            return data[:1] if data[1] in self.index.initializers else []
        if node.op_type == "Clip":
            bounds = activation_bounds(node, self.index.constant)
            if bounds is None or bounds[0] != 0:
                return []
            self._limits[node.output[0]] = bounds[1]
            return data[:1]
        if node.op_type == "Mul":
            gates = [name for name in data if self._is_gate(name)]
            return [name for name in data if name not in gates] if len(data) == 2 and len(gates) == 1 else []
        if node.op_type == "ReduceMean":
            return data[:1] if self._keeps_channels(node) else []
        if node.op_type in FLATTENING_OPS:
            return data[:1] if self._is_flattened(node) else []
        return []

    def _is_gate(self, name: str) -> bool:
        producer = self.index.producers.get(name)
        return producer is not None and producer.op_type in GATES

    def _keeps_channels(self, node: onnx.NodeProto) -> bool:
        """Whether a mean is over all that follows samples and channels."""
        shape = self.shapes.get(node.input[0])
        axes = attributes(node).get("axes")
        if axes is None and len(node.input) > 1:
            given = self.index.constant(node.input[1])
            axes = None if given is None else given.reshape(-1).tolist()
        if shape is None or axes is None:
            return False
        return {int(axis) % len(shape) for axis in axes} == set(range(2, len(shape)))

    def _is_flattened(self, node: onnx.NodeProto) -> bool:
        """Whether a map becomes rows, one a sample, channel after channel."""
        before, after = self.shapes.get(node.input[0]), self.shapes.get(node.output[0])
        if before is None or after is None or len(before) < 2 or len(after) != 2 or before[0] != after[0]:
            return False
        sizes = before[1:]
        return None not in sizes and after[1] == int(np.prod([size or 0 for size in sizes]))
