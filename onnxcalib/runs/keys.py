"""What the value of a stage was computed from, as a key."""

from __future__ import annotations

import dataclasses
import hashlib
from functools import cache
from pathlib import Path
from typing import Any

import onnx

import onnxcalib
from onnxcalib.data import Dataset
from onnxcalib.engine.runtime import find_runtime
from onnxcalib.recipe import Recipe
from onnxcalib.runs.values import checksum, digest

BATCH = 16
_TRAINING = {"engine", "layer_optimizer", "training", "steps", "seed", "strict"}
_MENU = {"bits", "edge_bits", "block_size", "pins"}
_AIM = {"compression", "max_loss", "limits", "costs", "minimise"}
# The options that a stage reads itself; earlier ones lie in the values that it starts from.
OWN = {
    "equalization": set[str](),
    "statistics": set[str](),
    "ranges": {"ranges"} | _MENU,
    "parallel": _TRAINING,
    "sensitivity": {"loss"} | _MENU,
    "allocation": {"loss"} | _MENU | _AIM,
    "batch norm": {"loss", "bn_reference"},
    "sequential": _TRAINING,
    "joint": {"engine", "strict", "steps"},
    "biases": {"engine", "strict"},
}
# These decide what the layers are, which the key holds anyway, or only which stages run.
_ELSEWHERE = {"pipeline", "target", "include", "exclude"}
_KNOWN = set.union(*OWN.values()) | _ELSEWHERE


def options_of(stage: str, recipe: Recipe) -> dict[str, Any]:
    """The options that matter to a stage; one that nobody has sorted in above matters to all."""
    names = [field.name for field in dataclasses.fields(recipe)]
    return {name: getattr(recipe, name) for name in names if name in OWN[stage] or name not in _KNOWN}


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
