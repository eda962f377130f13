"""Activations that a quantizer takes over: clipping integers costs less than clipping floats, one mask serves both."""

from __future__ import annotations

import onnx

from onnxcalib.autodiff.standard.rules.quantize import CEILING, FakeQuantizer
from onnxcalib.autodiff.writer import Facts
from onnxcalib.model.graph import GraphIndex, activation_bounds, attributes
from onnxcalib.model.io import copied
from onnxcalib.model.loss_writer import FAKE_QUANTIZE


def with_absorbed(model: onnx.ModelProto, facts: Facts) -> onnx.ModelProto:
    """A copy in which a quantizer that alone reads a Relu, or a Clip from zero on, clips in its place."""
    result = copied(model)
    index = GraphIndex(result.graph)
    gone = []
    for node in result.graph.node:
        if node.op_type != FAKE_QUANTIZE:
            continue
        maker = index.producers.get(node.input[0])
        bounds = activation_bounds(maker, facts.value) if index.only_reader(node.input[0]) is not None else None
        if maker is None or bounds is None or bounds[0] != 0 or not _can_absorb(node, facts):
            continue
        node.input[0] = maker.input[0]
        node.attribute.append(onnx.helper.make_attribute(CEILING, bounds[1]))
        gone.append(maker)
    for node in gone:
        result.graph.node.remove(node)
    return result


def _can_absorb(node: onnx.NodeProto, facts: Facts) -> bool:
    """One grid for all, with integers that fit a byte; a trained zero point would need the mask of the grid alone."""
    if "axis" in attributes(node) or facts.value(node.input[2]) is None:
        return False
    return FakeQuantizer.of(node, facts).byte is not None
