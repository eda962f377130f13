"""Local functions put where they are called, whatever opset each of them was written for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import onnx
from onnx import defs, inliner, version_converter

from onnxcalib.errors import ModelError, first_line
from onnxcalib.model.hollow import put_back, take_out
from onnxcalib.model.io import check_valid, opset_of
from onnxcalib.model.opset import raise_opset
from onnxcalib.model.walk import all_nodes, refill

HINT = "Export the model without local functions."

Functions = Mapping[tuple[str, str], onnx.FunctionProto]


def inline_functions(model: onnx.ModelProto, source: str) -> onnx.ModelProto:
    """Ensures that the model calls no function of its own; all of them are brought to one opset first.

    The model given is used up.
    """
    if not model.functions:
        return model
    try:
        _renumber(model)
        model = _raise_all(model, max(opset_of(each) for each in (model, *model.functions)), source)
        check_valid(model, source)
        weights = take_out(model)
        inlined = inliner.inline_local_functions(model)
        put_back(inlined, weights)
    except ModelError:
        raise
    except Exception as error:  # inliner and converter raise bare RuntimeErrors of many kinds
        raise ModelError(f"the local functions of {source} cannot be inlined: {first_line(error)}.", HINT) from error
    left = {function.name for function in inlined.functions} & {node.op_type for node in all_nodes(inlined.graph)}
    if left:
        raise ModelError(f"the local function '{min(left)}' of {source} cannot be inlined.", HINT)
    return inlined


def _renumber(model: onnx.ModelProto) -> None:
    """Gives functions the model's opset where each of their nodes means the same by it."""
    opset = opset_of(model)
    for function in model.functions:
        standard = [entry for entry in function.opset_import if not entry.domain]
        if not standard:
            function.opset_import.append(onnx.helper.make_opsetid("", opset))
        elif all(_same(node, standard[0].version, opset) for node in all_nodes(function)):
            standard[0].version = opset


def _same(node: onnx.NodeProto, one: int, other: int) -> bool:
    if node.domain or one == other:
        return True
    try:
        versions = {defs.get_schema(node.op_type, opset, "").since_version for opset in (one, other)}
    except defs.SchemaError:
        return False
    return len(versions) == 1


def _raise_all(model: onnx.ModelProto, opset: int, source: str) -> onnx.ModelProto:
    """The model and its functions at one opset; each call gets a function of its own, which has no attributes left.

    onnx's inliner would leave out what an attribute is by default, and its converter fails on such a reference.
    """
    known = {(function.domain, function.name): function for function in model.functions}
    bound: list[onnx.FunctionProto] = []
    _bind(all_nodes(model.graph), known, bound, len(known))
    del model.functions[:]
    if opset_of(model) < opset:
        check_valid(model, source)  # an invalid graph would crash the converter
        model = raise_opset(model, opset, source)
    model.functions.extend(_raised(function, opset, source) for function in bound)
    return model


def _bind(nodes: Iterable[onnx.NodeProto], known: Functions, bound: list[onnx.FunctionProto], depth: int) -> None:
    for node in nodes:
        function = known.get((node.domain, node.op_type))
        if function is None:
            continue
        if not depth:
            raise ModelError(f"the local function '{function.name}' calls itself.", HINT)
        copy = onnx.FunctionProto()
        copy.CopyFrom(function)
        copy.name = node.op_type = f"{function.name}_{len(bound)}"
        values = {each.name: each for each in (*function.attribute_proto, *node.attribute)}
        for inner in all_nodes(copy):
            refill(inner.attribute, _values(inner, values))
        del copy.attribute[:], copy.attribute_proto[:], node.attribute[:]
        bound.append(copy)
        _bind(all_nodes(copy), known, bound, depth - 1)


def _values(node: onnx.NodeProto, given: Mapping[str, onnx.AttributeProto]) -> list[onnx.AttributeProto]:
    """The node's attributes with the values that its function was given; one that it was not given falls away."""
    found = []
    for attribute in node.attribute:
        value = given.get(attribute.ref_attr_name) if attribute.ref_attr_name else attribute
        if value is not None:
            found.append(onnx.AttributeProto())
            found[-1].CopyFrom(value)
            found[-1].name = attribute.name
    return found


def _raised(function: onnx.FunctionProto, opset: int, source: str) -> onnx.FunctionProto:
    if opset_of(function) < opset:
        body = onnx.ModelProto(ir_version=8, opset_import=function.opset_import)
        body.graph.MergeFrom(onnx.GraphProto(name=function.name, node=function.node))
        body.graph.input.extend(onnx.ValueInfoProto(name=name) for name in function.input)
        body.graph.output.extend(onnx.ValueInfoProto(name=name) for name in function.output)
        check_valid(body, f"function '{function.name}' of {source}")
        raised = version_converter.convert_version(body, opset)
        stored = [
            onnx.helper.make_node("Constant", [], [tensor.name], value=tensor) for tensor in raised.graph.initializer
        ]
        refill(function.node, [*stored, *raised.graph.node])
        refill(function.opset_import, raised.opset_import)
    return function
