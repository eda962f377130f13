"""The loss of a block against its float outputs, with activations that are left unquantized at random."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import onnx
from onnx import TensorProto, helper

from onnxcalib.model.graph import GraphIndex, attributes
from onnxcalib.model.io import copied
from onnxcalib.model.loss_writer import DOMAIN, FAKE_QUANTIZE
from onnxcalib.model.walk import refill

FINE = 255  # steps of a grid whose noise is not worth leaving out


@dataclass(frozen=True)
class Dropped:
    """A loss in which elements of some activations can be left unquantized."""

    model: onnx.ModelProto
    masks: Mapping[str, tuple[int, ...]]  # inputs of truth values, and their shapes for a sample


def narrow_activations(loss: onnx.ModelProto, data: Collection[str]) -> list[str]:
    """The tensors that quantizers of few steps read, of those that depend on the data."""
    moving, _ = GraphIndex(loss.graph).downstream(data)
    nodes = [node for node in loss.graph.node if _is_narrow(node) and node.input[0] in moving]
    return list(dict.fromkeys(node.input[0] for node in nodes))


def with_dropping(loss: onnx.ModelProto, shapes: Mapping[str, tuple[int, ...]]) -> Dropped:
    """The tensors of these shapes, for a sample, are left as they are wherever their two masks differ.

    Two small masks that broadcast draw elements as well as one of all elements does: any two are independent.
    """
    changed, masks = copied(loss), dict[str, tuple[int, ...]]()
    nodes: list[onnx.NodeProto] = []
    for node in changed.graph.node:
        nodes.append(node)
        if not _is_narrow(node) or node.input[0] not in shapes:
            continue
        source, result = node.input[0], node.output[0]
        (rows, *channel), others = shapes[source][:2], shapes[source][2:]
        own = {
            f"{result}:masked": (rows, *channel, *[1] * len(others)),
            f"{result}:too": (rows, *[1] * len(channel), *others),
        }
        masks |= own
        node.output[0], left = f"{result}:quantized", f"{result}:left"
        nodes.append(helper.make_node("Xor", list(own), [left], name=left))
        nodes.append(helper.make_node("Where", [left, source, node.output[0]], [result], name=f"{result}:mixed"))
    kept = [
        helper.make_tensor_value_info(name, TensorProto.BOOL, ["rows", *shape[1:]]) for name, shape in masks.items()
    ]
    refill(changed.graph.node, nodes)
    changed.graph.input.extend(kept)
    return Dropped(changed, masks)


def _is_narrow(node: onnx.NodeProto) -> bool:
    if (node.op_type, node.domain) != (FAKE_QUANTIZE, DOMAIN):
        return False
    limits = attributes(node)
    return int(limits["high"]) - int(limits["low"]) < FINE
