"""Multiply-accumulates where the file does not tell sizes: those of tensors as a sample of the data has them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from onnxcalib.data import Dataset
from onnxcalib.data.check import samples_in
from onnxcalib.model.float_nodes import RECURRENT_OPS, FloatNode
from onnxcalib.model.graph import GraphIndex
from onnxcalib.model.layers import Layer, LayerList, Product
from onnxcalib.model.prepare import Model
from onnxcalib.model.subgraph import with_outputs
from onnxcalib.runtime.session import Session

Shapes = Mapping[str, tuple[int, ...]]


def with_measured_macs(model: Model, listed: LayerList, data: Dataset) -> LayerList:
    """The list with what the model's own graph multiplies on the first sample of the data."""
    index = GraphIndex(model.proto.graph)
    wanted = [name for layer in listed.layers for name in (layer.input, layer.output)]
    wanted += [name for product in listed.products for name in (product.inputs[0], product.output)]
    recurrent = [node for node in model.proto.graph.node if node.op_type in RECURRENT_OPS]
    wanted += [node.input[0] for node in recurrent]
    known = {*index.producers, *index.inputs}
    feed = next(iter(data.batches(1)))
    found = Session(with_outputs(model.proto, [name for name in dict.fromkeys(wanted) if name in known])).run(feed)
    shapes, samples = {name: value.shape for name, value in found.items()}, samples_in(feed)
    steps = {node.name: _recurrent(index, node.input, shapes, samples) for node in recurrent}
    return replace(
        listed,
        layers=tuple(replace(it, macs=_layer(it, shapes, samples)) for it in listed.layers),
        products=tuple(replace(it, macs=_product(it, shapes, samples)) for it in listed.products),
        float_nodes=tuple(_float(it, steps) for it in listed.float_nodes),
    )


def _layer(layer: Layer, shapes: Shapes, samples: int) -> int | None:
    """Each weight works once a row, once a place of a Conv's output, or of a ConvTranspose's input."""
    shape = shapes.get(layer.input if layer.op == "ConvTranspose" else layer.output)
    if shape is None:
        return layer.macs
    places = shape[:-1] if layer.has_sums else (shape[0], *shape[2:])
    return math.prod(layer.weight_shape) * math.prod(places) // samples


def _product(product: Product, shapes: Shapes, samples: int) -> int | None:
    left, result = shapes.get(product.inputs[0]), shapes.get(product.output)
    return product.macs if left is None or result is None else math.prod(result) * left[-1] // samples


def _recurrent(index: GraphIndex, read: list[str], shapes: Shapes, samples: int) -> int | None:
    """All weights of a recurrent op work once a step of a sequence."""
    weights = [index.initializers[name].dims for name in read[1:3] if name in index.initializers]
    shape = shapes.get(read[0])
    if shape is None or len(weights) < 2:
        return None
    return math.prod(shape[:2]) * sum(math.prod(map(int, dims)) for dims in weights) // samples


def _float(node: FloatNode, steps: Mapping[str, int | None]) -> FloatNode:
    return replace(node, macs=steps[node.name]) if node.name in steps else node
