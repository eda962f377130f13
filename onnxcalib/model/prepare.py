"""Rewrites before analysis, so that every later stage meets one form of each thing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import onnx

from onnxcalib.errors import ModelError
from onnxcalib.model.biases import biases_before_reshapes
from onnxcalib.model.constants import constants_to_initializers, fold_constants
from onnxcalib.model.einsum import einsums_to_matmuls
from onnxcalib.model.external import model_bytes, names_files
from onnxcalib.model.fold import BatchNorm, channel_values, fold_batch_norms, fold_bias_adds
from onnxcalib.model.functions import inline_functions
from onnxcalib.model.graph import (
    GraphIndex,
    attributes,
    drop_dead_nodes,
    drop_nodes,
    drop_unused_initializers,
    fresh_name,
    replace_input,
    take_over,
)
from onnxcalib.model.io import check_valid
from onnxcalib.model.opset import NEWEST_IR, within
from onnxcalib.model.shapes import LARGE, float_tensors, infer_shapes, inferred
from onnxcalib.model.walk import all_nodes, bodies, refill
from onnxcalib.model.widen import widened
from onnxcalib.model.workarounds import avoid_clipped_inputs, avoid_softmax_of_one, avoid_wide_pools


@dataclass(frozen=True)
class Model:
    """A prepared float model; nobody changes its proto."""

    proto: onnx.ModelProto
    batch_norms: Mapping[str, BatchNorm]  # by the name of the layer that it was folded into
    source: str
    output_types: Mapping[str, int] = field(default_factory=dict)  # of outputs that are float32 here only
    given_bytes: int = 0  # of the model as it was given
    names_files: bool = False  # its large weights lie beside it, and those of what becomes of it should too


def prepare(
    model: onnx.ModelProto, source: str, oldest_opset: int = 13, newest_opset: int = 21, newest_ir: int = NEWEST_IR
) -> Model:
    """Requires a valid float model; ensures unique names, constants as initialisers and folded batch norms.

    The model given is used up: read_model made a copy of it for this.
    """
    given_bytes, outside = model_bytes(model), names_files(model)
    if model.functions:
        model = inline_functions(model, source)
        check_valid(model, source)
    real_inputs_only(model)
    output_types = widened(model)
    model = within(model, oldest_opset, newest_opset, source, newest_ir)
    drop_dead_nodes(model.graph)
    name_nodes(model.graph)
    constants_to_initializers(model.graph)
    _declare_outputs(model, source)
    for node in reversed([*all_nodes(model.graph)]):  # inner ones first: moving nodes copies what is within them
        for body in bodies(node):
            constants_to_initializers(body, LARGE)  # sizes and such stay where inference sees them
    fold_constants(model)
    einsums_to_matmuls(model.graph)
    _plain_weights(model)
    _plain_gemms(model.graph)
    _channel_biases(model.graph)
    _explicit_pads(model)
    biases_before_reshapes(model)
    _matmuls_to_gemms(model)
    _means_to_pools(model)
    fold_bias_adds(model.graph)
    avoid_clipped_inputs(model.graph)
    avoid_softmax_of_one(model)
    avoid_wide_pools(model)
    return Model(model, fold_batch_norms(model.graph), source, output_types, given_bytes, outside)


def real_inputs_only(model: onnx.ModelProto) -> None:
    """Files before IR 4 list initialisers among the inputs, and must: without these the file is one of IR 4."""
    stored = {tensor.name for tensor in model.graph.initializer}
    refill(model.graph.input, [value for value in model.graph.input if value.name not in stored])
    model.ir_version = max(model.ir_version, 4)


def name_nodes(graph: onnx.GraphProto) -> None:
    """Gives every node a name of its own; names that are unique stay."""
    used: set[str] = set()
    for node in sorted(graph.node, key=lambda node: not node.name):
        node.name = fresh_name(node.name or f"{node.op_type}_{next(iter(node.output), '')}", used)
        used.add(node.name)


def _is_declared(value: onnx.ValueInfoProto) -> bool:
    return value.type.tensor_type.HasField("shape") and value.type.tensor_type.elem_type != 0


def _declare_outputs(model: onnx.ModelProto, source: str) -> None:
    """Gives outputs the type and shape that the file leaves out, as far as these can be inferred."""
    bare = [value for value in model.graph.output if not _is_declared(value)]
    known = {value.name: value for value in inferred(model)} if bare else {}
    for value in bare:
        if value.name in known and known[value.name].type.WhichOneof("value"):
            value.CopyFrom(known[value.name])
        kind = value.type.WhichOneof("value")
        if kind is None or (kind == "tensor_type" and not value.type.tensor_type.elem_type):
            raise ModelError(
                f"the output '{value.name}' of {source} has no type, and none can be inferred.",
                "Export the model with typed outputs.",
            )


def _plain_weights(model: onnx.ModelProto) -> None:
    """Makes the weight of a MatMul a matrix where its first axes have one place, and its input has these axes too."""
    graph, index = model.graph, GraphIndex(model.graph)
    deep = [node for node in graph.node if node.op_type == "MatMul" and _is_deep(index.initializers.get(node.input[1]))]
    shapes = infer_shapes(model) if deep else {}
    for node in deep:
        weight = index.value(node.input[1])
        if len(shapes.get(node.input[0], ())) >= weight.ndim:
            replace_input(index, node, 1, weight.reshape(weight.shape[-2:]), f"{node.input[1]}_matrix")
    drop_unused_initializers(graph)


def _is_deep(weight: onnx.TensorProto | None) -> bool:
    return weight is not None and len(weight.dims) > 2 and all(size == 1 for size in weight.dims[:-2])


def _plain_gemms(graph: onnx.GraphProto) -> None:
    """Moves alpha and beta of a Gemm with constant weight and bias into these constants."""
    index = GraphIndex(graph)
    for node in graph.node:
        values = attributes(node)
        if node.op_type != "Gemm" or (values.get("alpha", 1.0) == 1.0 and values.get("beta", 1.0) == 1.0):
            continue
        if any(name not in index.initializers for name in node.input[1:] if name):
            continue
        for position, key in ((1, "alpha"), (2, "beta")):
            factor = values.get(key, 1.0)
            if position < len(node.input) and node.input[position] and factor != 1.0:
                old = index.value(node.input[position])
                name = f"{node.name}_{key}_times_{node.input[position]}"
                replace_input(index, node, position, (old * factor).astype(old.dtype), name)
        refill(node.attribute, [it for it in node.attribute if it.name not in ("alpha", "beta")])
    drop_unused_initializers(graph)


def _channel_biases(graph: onnx.GraphProto) -> None:
    """Gives a Gemm that adds the same constant to every row a bias of one value a channel."""
    index = GraphIndex(graph)
    for node in graph.node:
        weight = index.initializers.get(node.input[1]) if node.op_type == "Gemm" and len(node.input) > 2 else None
        bias = index.constant(node.input[2]) if weight is not None else None
        if weight is None or bias is None:
            continue
        values = channel_values(bias, (1, weight.dims[0 if attributes(node).get("transB", 0) else 1]))
        if values is not None and values.shape != bias.shape:
            replace_input(index, node, 2, values, f"{node.name}_bias")
    drop_unused_initializers(graph)


def _matmuls_to_gemms(model: onnx.ModelProto) -> None:
    """Makes a MatMul of a matrix and its added vector one Gemm, as runtimes do: then the bias is quantized with it.

    One before a batch norm becomes a Gemm too, which has a place for what is folded into it.
    What is added to every row of a product of more axes becomes a vector too, whatever its shape was.
    """
    graph, shapes, index, dropped = model.graph, infer_shapes(model), GraphIndex(model.graph), set[str]()
    for node in graph.node:
        weight = index.initializers.get(node.input[1]) if node.op_type == "MatMul" else None
        add = index.only_reader(node.output[0]) if weight is not None and len(weight.dims) == 2 else None
        if weight is None or add is None or weight.data_type != onnx.TensorProto.FLOAT:
            continue
        if add.op_type == "BatchNormalization" and len(shapes.get(node.input[0], ())) == 2:
            node.op_type = "Gemm"
        if add.op_type != "Add":
            continue
        bias = next((name for name in add.input if name in index.initializers), "")
        added, rank = index.constant(bias), len(shapes.get(node.input[0], ()))  # 0: unknown
        values = None if added is None else channel_values(added, [*[1] * (rank - 1), weight.dims[1]])
        if added is None or values is None:
            continue
        place = list(add.input).index(bias)
        if values.shape != added.shape:
            replace_input(index, add, place, values, f"{node.name}_bias")
        if rank == 2:
            node.op_type = "Gemm"
            node.input.append(add.input[place])
            take_over(index, node, add)
            dropped.add(add.name)
    drop_nodes(graph, dropped)
    drop_unused_initializers(graph)


def _means_to_pools(model: onnx.ModelProto) -> None:
    """Makes a mean of whole images a pool, for which runtimes have integer kernels where they have none for means."""
    means = [node for node in model.graph.node if node.op_type == "ReduceMean"]
    if not means:
        return
    shapes, floats, index = infer_shapes(model), float_tensors(model), GraphIndex(model.graph)
    for node in means:
        values, rank = attributes(node), len(shapes.get(node.input[0], ()))
        given = index.constant(node.input[1]) if len(node.input) > 1 and node.input[1] else None
        axes = values.get("axes", []) if given is None else given.tolist()
        # With one axis it may be the mean of a layer norm, which runtimes look for.
        if node.input[0] not in floats or rank < 4 or sorted(axis % rank for axis in axes) != list(range(2, rank)):
            continue
        result = node.output[0]
        del node.attribute[:], node.input[1:]
        node.op_type = "GlobalAveragePool"
        if not values.get("keepdims", 1):
            node.output[0] = f"{result}_pooled"
            flat = onnx.helper.make_node("Flatten", [node.output[0]], [result], f"{node.name}_flat")
            model.graph.node.insert(list(model.graph.node).index(node) + 1, flat)
    drop_unused_initializers(model.graph)


def _explicit_pads(model: onnx.ModelProto) -> None:
    """Replaces auto_pad of convolutions where the spatial size is known."""
    automatic = [
        node for node in model.graph.node if attributes(node).get("auto_pad", b"NOTSET") not in (b"NOTSET", b"")
    ]
    if not automatic:
        return
    shapes = infer_shapes(model)
    index = GraphIndex(model.graph)
    for node in automatic:
        weight = index.initializers.get(node.input[1]) if len(node.input) > 1 else None
        pads = _pads(node, shapes.get(node.input[0]), weight) if node.op_type == "Conv" and weight else None
        if pads is not None:
            others = [attribute for attribute in node.attribute if attribute.name not in ("auto_pad", "pads")]
            refill(node.attribute, [*others, onnx.helper.make_attribute("pads", pads)])


def _pads(node: onnx.NodeProto, shape: tuple[int | None, ...] | None, weight: onnx.TensorProto) -> list[int] | None:
    values = attributes(node)
    rank = len(weight.dims) - 2
    if values["auto_pad"] == b"VALID":
        return [0] * (2 * rank)
    sizes = [size for size in (shape or ())[2:] if size is not None]
    if len(sizes) != rank:
        return None
    strides, dilations = values.get("strides", [1] * rank), values.get("dilations", [1] * rank)
    reaches = [(size - 1) * dilation + 1 for size, dilation in zip(weight.dims[2:], dilations, strict=True)]
    totals = [
        max((-(-size // stride) - 1) * stride + reach - size, 0)
        for size, stride, reach in zip(sizes, strides, reaches, strict=True)
    ]
    small, large = [total // 2 for total in totals], [total - total // 2 for total in totals]
    return small + large if values["auto_pad"] == b"SAME_UPPER" else large + small
