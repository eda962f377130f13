"""Reading a model with clear refusals, and writing one atomically."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from google.protobuf.message import DecodeError, EncodeError
from onnx import checker, external_data_helper

from onnxcalib.errors import ModelError, OutputError, first_line, understanding
from onnxcalib.files import check_regular, replacing
from onnxcalib.model.external import (
    LARGE_MODEL,
    bare_inputs,
    embedded,
    is_external,
    is_large,
    keep_outside,
    model_bytes,
    move_out,
    point_to,
    tensor_bytes,
    values_of,
)
from onnxcalib.model.normalize import normalize
from onnxcalib.model.walk import all_nodes, bodies, refill
from onnxcalib.model.wellformed import check_well_formed

OLDEST_OPSET, NEWEST_OPSET = 7, onnx.defs.onnx_opset_version()
# protobuf cannot hold more than 2 GB in one message; larger weights go beside the file.
PROTOBUF_LIMIT = 2**31 - 2**20
LEAST_OUTSIDE = 1024  # bytes of a weight beside a file
QUANTIZED_OPS = {
    "QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear", "QLinearConv", "QLinearMatMul", "QLinearAdd",
    "ConvInteger", "MatMulInteger", "MatMulNBits", "QGemm", "FakeQuant", "DynamicQuantizeMatMul",
    "MatMulIntegerToFloat",
}  # fmt: skip


def read_model(source: str | Path | onnx.ModelProto) -> onnx.ModelProto:
    """Reads a float model; a proto is copied, so that nothing ever changes the caller's."""
    if isinstance(source, onnx.ModelProto):
        model, name = copied(source), "the given model"
        if _belongs_outside(model, LARGE_MODEL):
            move_out(model)
        _put_in_order(model, name)
    else:
        name = str(source)
        model = load(Path(source))
    with understanding(name):
        _check(model, name)
    return model


def load(path: Path, large: int = LARGE_MODEL) -> onnx.ModelProto:
    """Loads any ONNX file with its external data, or says in one sentence why that cannot be.

    Large weights of a model with so many bytes of them stay in files.
    """
    try:
        check_regular(path)
        model = onnx.load(str(path), "protobuf", load_external_data=False)  # whatever the file is called
    except (DecodeError, ValueError) as error:
        raise ModelError(f"{path} is not an ONNX file, or it is cut short.", "Export or copy it again.") from error
    except FileNotFoundError as error:
        raise ModelError(f"model {path} does not exist.", "Check the path.") from error
    except OSError as error:
        hint = "Name the .onnx file in it." if isinstance(error, IsADirectoryError) else "Check path and permissions."
        raise ModelError(f"model {path} cannot be read: {error.strerror}.", hint) from error
    if not model.HasField("graph") or not model.graph.node:
        raise ModelError(f"{path} is not an ONNX file, or it is cut short.", "Export or copy it again.")
    try:
        _load_weights(model, path.parent, large)
    except (OSError, ValueError, RuntimeError, checker.ValidationError) as error:
        raise ModelError(
            f"the external data of {path} cannot be read: {first_line(error)}.", "Keep its data files beside the model."
        ) from error
    _put_in_order(model, str(path))
    return model


def _put_in_order(model: onnx.ModelProto, name: str) -> None:
    with understanding(name):
        check_well_formed(model, name)
        normalize(model, name)
        check_bodies(model, name)


def check_bodies(model: onnx.ModelProto, name: str, limit: int = PROTOBUF_LIMIT) -> None:
    """Fails where bodies hold so many bytes: weights elsewhere can lie in files, or be left out."""
    inner = (body for node in model.graph.node for body in bodies(node))
    held = sum(int(each.ByteSize()) for each in (*inner, *model.functions))
    if held >= limit:
        raise ModelError(
            f"the Ifs, Loops and functions of {name} hold {held / 2**30:.1f} GB of constants, too much.",
            "Export it with these as initialisers of the main graph, outside of which protobuf takes less than 2 GB.",
        )


def _belongs_outside(model: onnx.ModelProto, large: int) -> bool:
    """Whether weights should stay in files; what a branch reads is copied into it, where nobody would look for them."""
    return is_large(model, large) and not any(True for node in model.graph.node for _ in bodies(node))


def _load_weights(model: onnx.ModelProto, folder: Path, large: int) -> None:
    if not _belongs_outside(model, large):
        external_data_helper.load_external_data_for_model(model, str(folder))
        return
    keep_outside(model, folder)
    move_out(model)
    bare = without_weights(model)
    external_data_helper.load_external_data_for_model(bare, str(folder))  # constants of nodes
    refill(model.graph.node, bare.graph.node)


def copied(model: onnx.ModelProto) -> onnx.ModelProto:
    """Another model with the same content."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    return copy


def without_weights(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy but for the initialisers of its graph, which are not copied on the way either."""
    bare = onnx.ModelProto()
    parts = (bare, model, "graph"), (bare.graph, model.graph, "initializer")
    for copy, whole, left_out in parts:
        for field, value in whole.ListFields():
            if field.name == left_out:
                continue
            if hasattr(value, "extend"):
                getattr(copy, field.name).extend(value)
            elif hasattr(value, "CopyFrom"):
                getattr(copy, field.name).CopyFrom(value)
            else:
                setattr(copy, field.name, value)
    return bare


def copy_identity(source: onnx.ModelProto, target: onnx.ModelProto) -> None:
    """Gives a model what tools drop when they rebuild one: who made it, and its metadata."""
    for field in ("producer_name", "producer_version", "domain", "model_version", "doc_string"):
        setattr(target, field, getattr(source, field))
    refill(target.metadata_props, source.metadata_props)


def opset_of(model: onnx.ModelProto | onnx.FunctionProto) -> int:
    """The version of the standard operators; 0 when the model names none."""
    return next((entry.version for entry in model.opset_import if not entry.domain), 0)


def _check(model: onnx.ModelProto, name: str) -> None:
    opset = opset_of(model)
    if not OLDEST_OPSET <= opset <= NEWEST_OPSET:
        raise ModelError(
            f"{name} uses opset {opset}; onnxcalib reads {OLDEST_OPSET} to {NEWEST_OPSET}.",
            f"Export it with an opset between {OLDEST_OPSET} and {NEWEST_OPSET}.",
        )
    for node in (node for body in (model.graph, *model.functions) for node in all_nodes(body)):
        if node.op_type in QUANTIZED_OPS:
            raise ModelError(
                f"{name} is already quantized: node '{node.name or node.output[0]}' is a {node.op_type}.",
                "Give the float model it was made from.",
            )
    if not model.functions:  # those of other opsets are invalid until they are inlined
        check_valid(model, name)


def check_valid(model: onnx.ModelProto, name: str) -> None:
    """Fails where the checker does; ends without a type or a shape are for inference to find."""
    model = _without_external(model)
    if model.ByteSize() >= PROTOBUF_LIMIT:  # the checker wants a serialized model
        return
    ends = [value for value in (*model.graph.input, *model.graph.output) if _lacks_shape(value)]
    declared = [onnx.ValueInfoProto.FromString(value.SerializeToString()) for value in ends]
    for value in ends:
        kind = value.type.tensor_type
        kind.elem_type = kind.elem_type or onnx.TensorProto.FLOAT
        kind.shape.SetInParent()
    try:
        checker.check_model(model)
    except UnicodeDecodeError as error:
        raise ModelError(f"{name} holds text that is not UTF-8.", "Export it again.") from error
    except Exception as error:  # the checker raises more than its ValidationError
        raise ModelError(f"{name} is not a valid ONNX model: {first_line(error)}.", "Export it again.") from error
    finally:
        for value, before in zip(ends, declared, strict=True):
            value.CopyFrom(before)


def _without_external(model: onnx.ModelProto) -> onnx.ModelProto:
    """What a checker that cannot find the files of weights takes: inputs in their place."""
    outside = [tensor for tensor in model.graph.initializer if is_external(tensor)]
    if not outside:
        return model
    bare = without_weights(model)
    bare.graph.initializer.extend(tensor for tensor in model.graph.initializer if not is_external(tensor))
    known = {value.name for value in bare.graph.input}
    bare.graph.input.extend(bare_inputs(tensor for tensor in outside if tensor.name not in known))
    bare.ir_version = max(bare.ir_version, 4)  # before, initialisers had to be inputs
    return bare


def _lacks_shape(value: onnx.ValueInfoProto) -> bool:
    kind = value.type.WhichOneof("value")
    return kind is None or (kind == "tensor_type" and not value.type.tensor_type.HasField("shape"))


def file_bytes(path: str | Path) -> int:
    """Bytes on disk, external data files included."""
    path = Path(path)
    model = onnx.load(str(path), "protobuf", load_external_data=False)
    names = {
        entry.value
        for tensor in model.graph.initializer
        if external_data_helper.uses_external_data(tensor)
        for entry in tensor.external_data
        if entry.key == "location"
    }
    beside: int = sum((path.parent / name).stat().st_size for name in names)
    return path.stat().st_size + beside


def constant_bytes(model: onnx.ModelProto) -> int:
    """Bytes of all initialisers: what is left of a file without its graph."""
    return sum(map(tensor_bytes, model.graph.initializer))


def write_model(model: onnx.ModelProto, path: str | Path, limit: int = PROTOBUF_LIMIT) -> None:
    """Writes the file under a temporary name and renames it, so that a half-written one never stands there.

    Args:
        model: The model to write, which stays as it is.
        path: The file to write.
        limit: From so many bytes on, the weights go into a file beside it, PATH.data.
    """
    path = Path(path)
    if model_bytes(model) < limit:
        with replacing(path) as temporary:
            temporary.write_bytes(serialized(model))
        return
    data = path.with_name(path.name + ".data")
    with replacing(path) as temporary, replacing(data) as temporary_data:
        temporary.write_bytes(serialized_outside(_with_weights_in(model, temporary_data, data.name)))
        # Two files cannot appear at once: none is better than an old model beside other weights.
        path.unlink(missing_ok=True)


def serialized(model: onnx.ModelProto) -> bytes:
    """The model's bytes with all weights, the same for the same model."""
    return serialized_outside(embedded(model) if model_bytes(model) < PROTOBUF_LIMIT else model)


def serialized_outside(model: onnx.ModelProto) -> bytes:
    """The model's bytes without the weights that lie in files."""
    try:
        return bytes(model.SerializeToString(deterministic=True))
    except (EncodeError, ValueError) as error:
        raise OutputError(
            f"the model cannot be serialized: {error}.",
            "Constants in its nodes, those in Ifs and Loops too, must take less than 2 GB.",
        ) from error


def _with_weights_in(model: onnx.ModelProto, data: Path, name: str) -> onnx.ModelProto:
    """A copy whose weights were written to a file, one after the other."""
    outside = without_weights(model)
    with data.open("wb") as file:
        for given in model.graph.initializer:
            tensor = outside.graph.initializer.add()
            tensor.CopyFrom(given)
            numbers = is_external(given) or given.float_data  # some exporters write these instead of bytes
            content = values_of(given).reshape(-1).view(np.uint8).data if numbers else given.raw_data
            if len(content) >= LEAST_OUTSIDE:
                tensor.ClearField("float_data")
                point_to(tensor, name, file.tell(), file.write(content))
    return outside
