"""Names for what every stage starts from: the model, the data, the software."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

import onnx

import onnxcalib
from onnxcalib.cache.codec import checksum, digest
from onnxcalib.data import Dataset
from onnxcalib.runtime.installed import find_runtime

BATCH = 16


def model_digest(model: onnx.ModelProto) -> str:
    """Names a model of any size: protobuf serializes no more than 2 GB at a time."""
    total, skeleton = hashlib.sha256(), onnx.ModelProto()
    skeleton.CopyFrom(model)
    del skeleton.graph.initializer[:]
    for part in (skeleton, *model.graph.initializer):
        total.update(part.SerializeToString(deterministic=True))
    return total.hexdigest()


def data_digest(data: Dataset) -> str:
    """Names the content of the data, wherever it lies."""
    total = hashlib.sha256()
    for feed in data.batches(BATCH):
        total.update(checksum(" ".join(feed), list(feed.values())).encode())
    return digest(total.hexdigest(), data.labels)


@cache
def software() -> dict[str, str]:
    """The version of this package with a digest of its code, for checkouts change more often, and the runtime's."""
    total = hashlib.sha256()
    for path in sorted(Path(onnxcalib.__file__).parent.rglob("*.py")):
        total.update(path.read_bytes())
    runtime = find_runtime()
    return {
        "version": onnxcalib.__version__,
        "code": total.hexdigest()[:16],
        "runtime": f"{' '.join(runtime.packages) or 'onnxruntime'} {runtime.version}",
    }
