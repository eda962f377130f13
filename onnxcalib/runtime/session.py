"""Sessions, streaming over batches, captured tensors."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx

from onnxcalib.data import Dataset
from onnxcalib.errors import ModelError
from onnxcalib.model.io import PROTOBUF_LIMIT, serialized, write_model
from onnxcalib.runtime.installed import check_runtime

Tensors = dict[str, npt.NDArray[Any]]

# Captured tensors of one batch stay below this, whatever the number of samples.
CAPTURE_BYTES = 96 * 2**20
LARGEST_BATCH = 64


class Session:
    """A model ready to run on the CPU."""

    def __init__(self, model: onnx.ModelProto, source: str = "the model", limit: int = PROTOBUF_LIMIT) -> None:
        check_runtime()
        import onnxruntime as ort

        options = ort.SessionOptions()
        options.log_severity_level = 4
        # Freed after each run: a pool would keep the largest batch's memory for good.
        options.enable_cpu_mem_arena = False
        self.source = source
        try:
            if model.ByteSize() < limit:
                self._session = ort.InferenceSession(serialized(model), options, providers=["CPUExecutionProvider"])
            else:
                with tempfile.TemporaryDirectory() as folder:
                    path = Path(folder) / "model.onnx"
                    write_model(model, path, limit)
                    self._session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        except Exception as error:  # the runtime's exceptions share no base class but this one
            raise ModelError(
                f"onnxruntime {ort.__version__} cannot load {source}: {first_line(error)}.",
                "If the model is newer than the runtime, install a newer one.",
            ) from error
        self.outputs = [value.name for value in self._session.get_outputs()]

    def run(self, feed: Tensors) -> Tensors:
        """All outputs for one feed."""
        try:
            return dict(zip(self.outputs, self._session.run(None, feed), strict=True))
        except Exception as error:
            raise ModelError(
                f"onnxruntime failed while running {self.source}: {first_line(error)}.",
                "Check that the data has the shapes the model was exported for.",
            ) from error


def first_line(error: Exception) -> str:
    """What a runtime's error says first."""
    return str(error).strip().splitlines()[0].rstrip(".")


def stream(session: Session, data: Dataset, batch: int | None = None) -> Iterator[tuple[int, Tensors]]:
    """Runs over the data; gives for each batch its number of samples and all outputs."""
    size = batch or fitting_batch(session, data)
    for feed in data.batches(size):
        yield samples_in(feed, data), session.run(feed)


def fitting_batch(session: Session, data: Dataset) -> int:
    """How many samples' outputs fit into the memory for captured tensors, measured on one sample."""
    feed = next(iter(data.batches(1)))
    held = sum(value.nbytes for value in session.run(feed).values())
    return int(np.clip(CAPTURE_BYTES // max(held, 1), 1, LARGEST_BATCH))


def samples_in(feed: Tensors, data: Dataset) -> int:
    """Samples in one feed: the common first axis, or one where the inputs share none."""
    sizes = {value.shape[0] for value in feed.values() if value.ndim}
    return sizes.pop() if len(sizes) == 1 and all(value.ndim for value in feed.values()) and len(data) > 0 else 1


def run_all(session: Session, data: Dataset, names: Sequence[str] | None = None, batch: int | None = None) -> Tensors:
    """The model's outputs over all samples, joined; for outputs that are small."""
    parts: dict[str, list[npt.NDArray[Any]]] = {name: [] for name in names or session.outputs}
    for _, outputs in stream(session, data, batch):
        for name, values in parts.items():
            values.append(outputs[name])
    return {name: join(values) for name, values in parts.items()}


def join(parts: Sequence[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    """Batches end to end; outputs whose other axes differ between runs are flattened first."""
    if parts[0].ndim and len({part.shape[1:] for part in parts}) == 1:
        return np.concatenate(parts)
    return np.concatenate([part.reshape(-1) for part in parts])
