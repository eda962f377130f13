"""What may be given for a model: a path, a model in memory, or the result of a run."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeAlias

import onnx

from onnxcalib.model.io import write_model
from onnxcalib.pipeline.result import Result

ModelSource: TypeAlias = str | Path | onnx.ModelProto | Result


def in_memory(model: ModelSource) -> str | Path | onnx.ModelProto:
    """The model, of a result that which was written."""
    return model.model if isinstance(model, Result) else model


@contextlib.contextmanager
def as_files(models: Sequence[ModelSource | None]) -> Iterator[list[Path | None]]:
    """The files of models; those in memory are written to a temporary folder while the block runs."""
    with tempfile.TemporaryDirectory(prefix="onnxcalib-") as folder:
        yield [_as_file(model, Path(folder) / str(number)) for number, model in enumerate(models)]


@contextlib.contextmanager
def as_file(model: ModelSource) -> Iterator[Path]:
    """The same for one model."""
    with as_files([model]) as (path,):
        assert path is not None
        yield path


def _as_file(model: ModelSource | None, folder: Path) -> Path | None:
    if isinstance(model, Result):
        model = model.output if model.output is not None and model.output.exists() else model.model
    if not isinstance(model, onnx.ModelProto):
        return None if model is None else Path(model)
    folder.mkdir()
    path = folder / f"{_named(model)}.onnx"
    write_model(model, path)
    return path


def _named(model: onnx.ModelProto) -> str:
    """The graph's name, as far as it is good for a file."""
    return "".join(letter if letter.isalnum() or letter in "-_" else "_" for letter in model.graph.name)[:80] or "model"
