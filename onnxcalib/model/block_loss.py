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
    masks: Mapping[str, tuple[int, ...]]  # inputs of truth values, two for most tensors, and their shapes after the rows


def narrow_activations(loss: onnx.ModelProto, data: Collection[str]) -> list[str]:
    """The tensors that quantizers of few steps read, of those that depend on the data."""
    moving, _ = GraphIndex(loss.graph).downstream(data)
    nodes = [node for node in loss.graph.node if _is_narrow(node) and node.input[0] in moving]
    return list(dict.fromkeys(node.input[0] for node in nodes))


def with_dropping(loss: onnx.ModelProto, shapes: Mapping[str, tuple[int, ...]]) -> Dropped:
    """Where the masks of a tensor differ, its value is left as it is; shapes are those of tensors after their rows.

    Two small masks that broadcast choose elements as well as a large one does.
    """
    changed, masks = copied(loss), dict[str, tuple[int, ...]]()
    nodes: list[onnx.NodeProto] = []
    for node in changed.graph.node:
        nodes.append(node)
        if not _is_narrow(node) or node.input[0] not in shapes:
            continue
        source, result = node.input[0], node.output[0]
        first, *others = shapes[source] or (1,)
        own = {f"{result}:drop": (first, *[1] * len(others))} | ({f"{result}:keep": (1, *others)} if others else {})
        masks |= own
        node.output[0] = f"{result}:quantized"
        chosen = next(iter(own))
        if others:
            chosen = f"{result}:left"
            nodes.append(helper.make_node("Xor", list(own), [chosen], name=chosen))
        nodes.append(helper.make_node("Where", [chosen, source, node.output[0]], [result], name=f"{result}:mixed"))
    kept = [helper.make_tensor_value_info(name, TensorProto.BOOL, ["rows", *shape]) for name, shape in masks.items()]
    refill(changed.graph.node, nodes)
    changed.graph.input.extend(kept)
    return Dropped(changed, masks)


def _is_narrow(node: onnx.NodeProto) -> bool:
    if (node.op_type, node.domain) != (FAKE_QUANTIZE, DOMAIN):
        return False
    limits = attributes(node)
    return int(limits["high"]) - int(limits["low"]) < FINE
