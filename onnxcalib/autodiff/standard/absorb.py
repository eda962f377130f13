"""Activations that a quantizer takes over: clipping codes costs less than clipping values, and one mask serves both."""

from __future__ import annotations

import math

import numpy as np
import onnx

from onnxcalib.autodiff.standard.rules.quantize import CEILING, Grid
from onnxcalib.autodiff.standard.writer import Facts
from onnxcalib.model.graph import GraphIndex, attributes
from onnxcalib.model.io import copied
from onnxcalib.model.loss_writer import FAKE_QUANTIZE


def with_absorbed(model: onnx.ModelProto, facts: Facts) -> onnx.ModelProto:
    """A copy in which a quantizer that alone reads a Relu, or a Clip from zero on, clips in its place."""
    result = copied(model)
    index = GraphIndex(result.graph)
    gone = []
    for node in result.graph.node:
        maker = index.producers.get(node.input[0]) if node.op_type == FAKE_QUANTIZE else None
        ceiling = _ceiling(maker, facts) if maker is not None and index.only_reader(node.input[0]) is not None else None
        if maker is None or ceiling is None or not _can_absorb(node, facts):
            continue
        node.input[0] = maker.input[0]
        node.attribute.append(onnx.helper.make_attribute(CEILING, ceiling))
        gone.append(maker)
    for node in gone:
        result.graph.node.remove(node)
    return result


def _ceiling(node: onnx.NodeProto, facts: Facts) -> float | None:
    """The most that an activation lets through; None for one that does not begin at zero."""
    if node.op_type == "Relu":
        return math.inf
    if node.op_type != "Clip" or len(node.input) < 2:
        return None
    least, most = (facts.value(name) if name else np.array(math.inf) for name in (*node.input, "")[1:3])
    return float(most) if least is not None and most is not None and float(least) == 0 < float(most) else None


def _can_absorb(node: onnx.NodeProto, facts: Facts) -> bool:
    """One grid for all, with codes that fit a byte; a trained zero point would need the mask of the grid alone."""
    if "axis" in attributes(node) or facts.value(node.input[2]) is None:
        return False
    return Grid.of(node, facts).byte is not None
