"""Folds into a layer what directly follows it: added constants, and batch norm, of which it remembers what it was."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx

from onnxcalib.model.graph import (
    GraphIndex,
    attributes,
    drop_nodes,
    drop_unused_initializers,
    replace_input,
    take_over,
)

FloatArray = npt.NDArray[np.float32]

FOLDABLE_INTO = ("Conv", "ConvTranspose", "Gemm")


@dataclass(frozen=True)
class BatchNorm:
    """What a folded batch norm was."""

    gamma: FloatArray
    beta: FloatArray
    eps: float


def channel_values(value: npt.NDArray[Any], shape: Sequence[int]) -> npt.NDArray[Any] | None:
    """One value a channel of what broadcasts to a shape with no other axis than that of channels; None otherwise."""
    try:
        return np.broadcast_to(value, shape).reshape(-1)
    except ValueError:
        return None


def fold_bias_adds(graph: onnx.GraphProto) -> None:
    """Makes a constant that is added to every place of a channel the bias of the convolution before it."""
    index, dropped = GraphIndex(graph), set[str]()
    for conv in graph.node:
        if conv.op_type not in ("Conv", "ConvTranspose") or len(conv.input) > 2:
            continue
        add, weight = index.only_reader(conv.output[0]), index.initializers.get(conv.input[1])
        if add is None or add.op_type != "Add" or weight is None:
            continue
        groups = attributes(conv).get("group", 1)
        channels = weight.dims[0] if conv.op_type == "Conv" else weight.dims[1] * groups
        added = next((index.constant(name) for name in add.input if name in index.initializers), None)
        bias = None if added is None else channel_values(added, [1, channels, *[1] * (len(weight.dims) - 2)])
        if bias is None:
            continue
        replace_input(index, conv, 2, bias, f"{conv.name}_bias")
        take_over(index, conv, add)
        dropped.add(add.name)
    drop_nodes(graph, dropped)
    drop_unused_initializers(graph)


def fold_batch_norms(graph: onnx.GraphProto) -> dict[str, BatchNorm]:
    """Requires named nodes, constants as initialisers; ensures that no norm follows a layer that it could join."""
    index, dropped = GraphIndex(graph), set[str]()
    folded: dict[str, BatchNorm] = {}
    for norm in graph.node:
        if norm.op_type != "BatchNormalization":
            continue
        layer = index.producers.get(norm.input[0])
        if layer is None or not _can_fold(index, layer, norm):
            continue
        folded[layer.name] = _fold(index, layer, norm)
        take_over(index, layer, norm)
        dropped.add(norm.name)
    drop_nodes(graph, dropped)
    drop_unused_initializers(graph)
    return folded


def _can_fold(index: GraphIndex, layer: onnx.NodeProto, norm: onnx.NodeProto) -> bool:
    if attributes(norm).get("training_mode", 0) or len([name for name in norm.output if name]) > 1:
        return False
    constants = (*layer.input[1:], *norm.input[1:])
    return (
        layer.op_type in FOLDABLE_INTO
        and index.only_reader(layer.output[0]) is not None
        and all(name in index.initializers for name in constants if name)
        and not (layer.op_type == "Gemm" and attributes(layer).get("transA", 0))
        and len({tuple(index.initializers[name].dims) for name in norm.input[1:5]}) == 1
    )


def _fold(index: GraphIndex, layer: onnx.NodeProto, norm: onnx.NodeProto) -> BatchNorm:
    gamma, beta, mean, variance = (index.value(name) for name in norm.input[1:5])
    weight = index.value(layer.input[1])
    eps = float(attributes(norm).get("epsilon", 1e-5))
    factor = gamma.astype(np.float64) / np.sqrt(variance.astype(np.float64) + eps)
    bias = index.value(layer.input[2]) if len(layer.input) > 2 and layer.input[2] else np.zeros_like(gamma)
    scaled = _scale_channels(layer, weight, factor)
    shifted = (bias - mean) * factor + beta
    replace_input(index, layer, 1, scaled.astype(weight.dtype), f"{layer.name}_weight_folded")
    replace_input(index, layer, 2, shifted.astype(weight.dtype), f"{layer.name}_bias_folded")
    return BatchNorm(gamma.astype(np.float32), beta.astype(np.float32), eps)


def _scale_channels(
    layer: onnx.NodeProto, weight: npt.NDArray[np.float32], factor: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """Multiplies each output channel of the weight by its factor."""
    if layer.op_type == "Conv" or (layer.op_type == "Gemm" and attributes(layer).get("transB", 0)):
        return weight * factor.reshape(-1, *[1] * (weight.ndim - 1))
    if layer.op_type == "Gemm":
        return weight * factor
    # ConvTranspose keeps [inputs, outputs of a group, ...]: each group of inputs has its own outputs.
    groups = attributes(layer).get("group", 1)
    by_group = weight.reshape(groups, weight.shape[0] // groups, *weight.shape[1:])
    factors = factor.reshape(groups, 1, weight.shape[1], *[1] * (weight.ndim - 2))
    return (by_group * factors).reshape(weight.shape)
