"""Names for what every stage starts from: the model and the data."""

from __future__ import annotations

import hashlib

import onnx

from onnxcalib.cache.codec import checksum, digest
from onnxcalib.data import Dataset
from onnxcalib.model.external import embedded_tensor
from onnxcalib.model.io import without_weights

BATCH = 16


def model_digest(model: onnx.ModelProto) -> str:
    """Names a model of any size: protobuf serializes no more than 2 GB at a time."""
    total = hashlib.sha256()
    total.update(without_weights(model).SerializeToString(deterministic=True))
    for tensor in model.graph.initializer:
        total.update(embedded_tensor(tensor).SerializeToString(deterministic=True))
    return total.hexdigest()


def data_digest(data: Dataset) -> str:
    """Names the content of the data, wherever it lies."""
    total = hashlib.sha256()
    for feed in data.batches(BATCH):
        total.update(checksum(" ".join(feed), list(feed.values())).encode())
    return digest(total.hexdigest(), data.labels)
