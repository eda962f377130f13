"""How a model of any size gets to onnxruntime: as bytes while protobuf can hold them, as files otherwise."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import onnx

from onnxcalib.data.arrays import give_all_back
from onnxcalib.model.external import has_external, relative
from onnxcalib.model.io import PROTOBUF_LIMIT, serialized, serialized_outside, write_model
from onnxcalib.runtime.opening import INVALID, open_session
from onnxcalib.runtime.providers import CPU
from onnxcalib.runtime.trial import LEVELS

SEES_FOLDER = (1, 21)  # the version from which onnxruntime is told where the files of weights lie


def open_model(
    model: onnx.ModelProto,
    options: Any,
    source: str,
    hint: str = INVALID,
    levels: Sequence[str] = LEVELS,
    provider: str = CPU,
    limit: int = PROTOBUF_LIMIT,
) -> Any:
    """A session of a model, whose weights may lie in files; from so many bytes on, all of it goes through a file."""
    if has_external(model):
        give_all_back()  # the runtime maps the same files
    if model.ByteSize() < limit:
        return open_session(_content(model, options), options, source, hint, levels, provider)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        write_model(model, path, limit)
        return open_session(path, options, source, hint, levels, provider)


def _content(model: onnx.ModelProto, options: Any) -> bytes:
    """The model's bytes; weights that lie in files stay there, and onnxruntime maps them."""
    if not has_external(model):
        return serialized(model)
    import onnxruntime as ort

    if tuple(map(int, ort.__version__.split(".")[:2])) < SEES_FOLDER:
        return serialized_outside(model)  # it takes paths from the root
    named, folder = relative(model)
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", folder)
    return serialized_outside(named)
