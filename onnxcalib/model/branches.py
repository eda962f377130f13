"""The branches of Ifs as models of their own: taken out, quantized like any model, and put back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import onnx

from onnxcalib.model.float_nodes import LAYER_OPS
from onnxcalib.model.graph import drop_unused_initializers, fresh_name
from onnxcalib.model.io import check_valid, copied
from onnxcalib.model.shapes import inferred
from onnxcalib.model.walk import all_nodes, bodies, refill

_TAKEN_WHEN = {"then_branch": True, "else_branch": False}


@dataclass(frozen=True)
class Branch:
    """One of the two bodies of an If in the main graph."""

    node: str
    attribute: str
    condition: str
    taken_when: bool
    captured: tuple[str, ...]  # computed tensors of the main graph, or its inputs, that the body reads


def find_branches(model: onnx.ModelProto) -> tuple[Branch, ...]:
    """Requires named nodes; gives the branches that hold layers, if all that they read has a known type."""
    stored = {tensor.name for tensor in model.graph.initializer}
    branches = []
    for node in model.graph.node:
        if node.op_type != "If" or node.domain:
            continue
        inside = {attribute.name: attribute.g for attribute in node.attribute}
        for attribute, taken_when in _TAKEN_WHEN.items():
            if any(inner.op_type in LAYER_OPS and not inner.domain for inner in inside[attribute].node):
                captured = tuple(name for name in _captured(inside[attribute]) if name not in stored)
                branches.append(Branch(node.name, attribute, node.input[0], taken_when, captured))
    types = _types(model) if branches else {}
    return tuple(branch for branch in branches if all(name in types for name in branch.captured))


def branch_model(model: onnx.ModelProto, branch: Branch) -> onnx.ModelProto:
    """The body of a branch that was found in the model, alone: what it captures becomes its inputs."""
    types = _types(model)
    alone = onnx.ModelProto(
        ir_version=model.ir_version, opset_import=model.opset_import, graph=_body(model.graph, branch)
    )
    read = _captured(alone.graph)
    alone.graph.initializer.extend(tensor for tensor in model.graph.initializer if tensor.name in read)
    for name in branch.captured:
        alone.graph.input.append(onnx.ValueInfoProto(name=name, type=types[name]))
    _name_apart(model.graph, alone.graph, branch)
    if not all(value.HasField("type") for value in alone.graph.output):  # a subgraph may leave them out
        known = {value.name: value for value in inferred(alone)}
        for value in alone.graph.output:
            if not value.HasField("type"):
                value.CopyFrom(known[value.name])
    return alone


def with_branch(model: onnx.ModelProto, branch: Branch, body: onnx.ModelProto) -> onnx.ModelProto:
    """A copy whose branch is the graph of the body; its inputs are captured again by their names."""
    spliced = copied(model)
    place = _body(spliced.graph, branch)
    name, outer = place.name, {tensor.name: tensor for tensor in model.graph.initializer}
    place.CopyFrom(body.graph)
    place.name = name
    del place.input[:]
    del place.value_info[:]
    refill(place.initializer, [tensor for tensor in body.graph.initializer if outer.get(tensor.name) != tensor])
    _rename_apart(place, dict.fromkeys(_made(model.graph)), {})
    _raise_opsets(spliced, body)
    drop_unused_initializers(spliced.graph)  # float weights that only the old body read
    check_valid(spliced, "the quantized model")
    return spliced


def outer_part(model: onnx.ModelProto, branch: Branch) -> onnx.ModelProto:
    """The part of the main graph that computes the condition and the captured tensors, with these as its outputs."""
    inputs = {value.name for value in model.graph.input}
    types = _types(model)
    types[branch.condition] = onnx.helper.make_tensor_type_proto(onnx.TensorProto.BOOL, None)
    wanted = [name for name in dict.fromkeys((branch.condition, *branch.captured)) if name not in inputs]
    part = copied(model)
    refill(part.graph.output, [onnx.ValueInfoProto(name=name, type=types[name]) for name in wanted])
    needed, kept = set(wanted), []
    for node in reversed(model.graph.node):  # a runtime would run the rest too, the If itself first of all
        if needed.intersection(node.output):
            needed.update(_reads(node))
            kept.append(node)
    refill(part.graph.node, reversed(kept))
    drop_unused_initializers(part.graph)
    return part


def _body(graph: onnx.GraphProto, branch: Branch) -> onnx.GraphProto:
    node = next(node for node in graph.node if node.name == branch.node and node.op_type == "If")
    body: onnx.GraphProto = next(attribute.g for attribute in node.attribute if attribute.name == branch.attribute)
    return body


def _made(graph: onnx.GraphProto) -> dict[str, None]:
    """The names that a graph gives to tensors, those of its subgraphs left out."""
    return dict.fromkeys(
        (
            *(value.name for value in graph.input),
            *(tensor.name for tensor in graph.initializer),
            *(tensor.values.name for tensor in graph.sparse_initializer),
            *(name for node in graph.node for name in node.output if name),
        )
    )


def _reads(node: onnx.NodeProto) -> dict[str, None]:
    """The tensors of its own graph, or of one around it, that a node and its subgraphs read."""
    inner = (name for body in bodies(node) for name in _captured(body))
    return dict.fromkeys((*(name for name in node.input if name), *inner))


def _captured(graph: onnx.GraphProto) -> dict[str, None]:
    """The tensors of the graphs around it that a graph reads, in the order of reading."""
    made = _made(graph)
    read = (*(name for node in graph.node for name in _reads(node)), *(value.name for value in graph.output))
    return dict.fromkeys(name for name in read if name not in made)


def _types(model: onnx.ModelProto) -> dict[str, onnx.TypeProto]:
    """The types of tensors in the main graph; declared shapes do not count, as exporters leave stale ones behind."""
    declared = {
        value.name: onnx.helper.make_tensor_type_proto(value.type.tensor_type.elem_type, None)
        for value in model.graph.value_info
    }
    types = declared | {value.name: value.type for value in inferred(model)}
    return {name: kind for name, kind in types.items() if kind.tensor_type.elem_type}


def _name_apart(outer: onnx.GraphProto, body: onnx.GraphProto, branch: Branch) -> None:
    """Names of layers tell them apart in the whole model, so that a plan or a pattern means one of them."""
    counts = Counter(node.name for node in all_nodes(outer))
    for node in body.node:
        if not node.name or counts[node.name] > 1:
            stem = node.name or f"{node.op_type}_{next(iter(node.output), '')}"
            node.name = f"{branch.node}/{branch.attribute}/{stem}"


def _rename_apart(graph: onnx.GraphProto, taken: Mapping[str, None], renamed: Mapping[str, str]) -> None:
    """ONNX forbids a tensor the name of one in a graph around it; `renamed` holds what these are called now."""
    made = _made(graph)
    used = {**taken, **made}
    names = dict(renamed)
    for name in made:
        if name in taken:
            names[name] = fresh_name(name, used)
            used[names[name]] = None
    for tensor in (*graph.input, *graph.initializer, *graph.output, *graph.value_info):
        tensor.name = names.get(tensor.name, tensor.name)
    for sparse in graph.sparse_initializer:
        sparse.values.name = names.get(sparse.values.name, sparse.values.name)
    for node in graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]
        node.output[:] = [names.get(name, name) for name in node.output]
        for body in bodies(node):
            _rename_apart(body, used, names)


def _raise_opsets(model: onnx.ModelProto, body: onnx.ModelProto) -> None:
    present = {entry.domain: entry for entry in model.opset_import}
    for entry in body.opset_import:
        if entry.domain not in present:
            model.opset_import.append(entry)
        elif entry.version > present[entry.domain].version:
            present[entry.domain].version = entry.version
