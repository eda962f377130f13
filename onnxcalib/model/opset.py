"""Moves a model into a range of opset versions, and not further than it must."""

from __future__ import annotations

import onnx
from onnx import defs, version_converter

from onnxcalib.errors import ModelError, first_line
from onnxcalib.model.conversion import correct
from onnxcalib.model.hollow import put_back, take_out
from onnxcalib.model.io import copy_identity, opset_of
from onnxcalib.model.walk import all_nodes, graphs_in, refill

# The oldest IR version that a runtime expects with each opset.
_IR_OF_OPSET = {13: 7, 15: 8, 19: 9, 21: 10}
NEWEST_IR = 10  # onnxruntime 1.19 reads no newer file


def within(model: onnx.ModelProto, oldest: int, newest: int, name: str, newest_ir: int = NEWEST_IR) -> onnx.ModelProto:
    """Requires a valid model; ensures oldest <= opset <= newest and an IR version that runtimes of that age read."""
    opset = opset_of(model)
    if opset < oldest:
        model = raise_opset(model, oldest, name)
    elif opset > newest and _fits(model, newest):
        next(entry for entry in model.opset_import if not entry.domain).version = newest
    least_ir = max(ir for version, ir in _IR_OF_OPSET.items() if version <= max(opset_of(model), 13))
    if opset_of(model) <= newest:
        model.ir_version = min(max(model.ir_version, least_ir), newest_ir, NEWEST_IR)
    return model


def raise_opset(model: onnx.ModelProto, opset: int, name: str) -> onnx.ModelProto:
    """The model at a newer opset, with nothing changed but its nodes."""
    weights = take_out(model)
    try:
        raised = version_converter.convert_version(model, opset)
    except Exception as error:  # the converter raises bare RuntimeErrors of many kinds
        raise ModelError(
            f"{name} cannot be raised from opset {opset_of(model)} to {opset}: {first_line(error)}.",
            f"Export it with opset {opset} or newer.",
        ) from error
    put_back(raised, weights)
    copy_identity(model, raised)
    correct(raised, opset_of(model))
    _restore_declarations(raised.graph, model.graph)
    return raised


def _restore_declarations(raised: onnx.GraphProto, graph: onnx.GraphProto) -> None:
    """The converter declares the shapes that it inferred, and runtimes believe them even where they are wrong."""
    for new, old in zip(graphs_in(raised), graphs_in(graph), strict=True):
        refill(new.value_info, old.value_info)
        for ends, given in ((new.input, old.input), (new.output, old.output)):  # one may be both, declared otherwise
            known = {value.name: value for value in given}
            for value in ends:
                if value.name in known:
                    value.CopyFrom(known[value.name])


def _fits(model: onnx.ModelProto, opset: int) -> bool:
    """Whether every node already is a valid node of the older opset: then only the number changes."""
    for node in all_nodes(model.graph):
        if node.domain:
            continue
        try:
            schema = defs.get_schema(node.op_type, opset, "")
        except defs.SchemaError:
            return False
        if schema.deprecated or any(attribute.name not in schema.attributes for attribute in node.attribute):
            return False
        if not schema.min_input <= len(node.input) <= schema.max_input:
            return False
    return True
