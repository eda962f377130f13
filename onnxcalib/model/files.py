"""The files that a model lies in: its own, and those of its external data."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import onnx
from google.protobuf.message import DecodeError

from onnxcalib.files import check_regular
from onnxcalib.model.walk import all_nodes, bodies

DATA_SUFFIX = ".data"  # behind the name of a model whose weights lie beside it


def model_outputs(name: str, path: Path) -> dict[str, Path]:
    """What writing a model may write: its file, and that of its weights where they are too many for one."""
    return {name: path} | ({"the weights of it,": path.with_name(path.name + DATA_SUFFIX)} if path.name else {})


def model_files(path: Path) -> Iterator[Path]:
    """The model's file, and every other that it names; just its own where it cannot be read."""
    yield path
    try:
        check_regular(path)
        model = onnx.load(str(path), "protobuf", load_external_data=False)
    except (OSError, ValueError, DecodeError):
        return
    for location in sorted({location for tensor in _tensors(model) for location in _locations(tensor)}):
        yield path.parent / location


def _tensors(model: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    nodes = [node for body in (model.graph, *model.functions) for node in all_nodes(body)]
    for graph in (model.graph, *(body for node in nodes for body in bodies(node))):
        yield from graph.initializer
        for sparse in graph.sparse_initializer:
            yield from (sparse.values, sparse.indices)
    for attribute in (attribute for node in nodes for attribute in node.attribute):
        yield from (attribute.t, *attribute.tensors)


def _locations(tensor: onnx.TensorProto) -> Iterator[str]:
    return (entry.value for entry in tensor.external_data if entry.key == "location")
