"""What a file's metadata says of tensors and layers that were left float, as eight bits would break an output."""

from __future__ import annotations

import json
from dataclasses import asdict

import onnx

from onnxcalib.model.equalize import properties
from onnxcalib.model.io import copied
from onnxcalib.plan import LeftFloat

METADATA = "onnxcalib.left_float"


def with_left_float(model: onnx.ModelProto, left: LeftFloat) -> onnx.ModelProto:
    """A copy that says so, if anything was left."""
    if not left:
        return model
    told = copied(model)
    onnx.helper.set_model_props(told, {**properties(told), METADATA: json.dumps(asdict(left))})
    return told


def left_float_of(model: onnx.ModelProto) -> LeftFloat:
    """What a file says of it; nothing where another tool wrote it."""
    try:
        told = json.loads(properties(model).get(METADATA, "{}"))
        tensors, inputs, layers = (tuple(map(str, told.get(key, ()))) for key in ("tensors", "inputs", "layers"))
        before = {str(name): float(db) for name, db in told.get("before", {}).items()}
        return LeftFloat(tensors, inputs, layers, before, {name: float(told["after"][name]) for name in before})
    except (ValueError, KeyError, AttributeError, TypeError):  # somebody else's use of our name
        return LeftFloat()


def sentences(left: LeftFloat) -> list[str]:
    """What was left float, why, and what it brought."""
    if not left:
        return []
    lines = [
        f"output '{name}': {db:.1f} dB signal to noise with all of it quantized, {left.after[name]:.1f} dB as it is"
        for name, db in left.before.items()
    ]
    lines += [f"left for it: the input of {name} is float, its weights are quantized" for name in left.inputs]
    lines += [f"left for it: {name} is float" for name in left.layers]
    # A tensor that only other ops read has no better name.
    return lines + (
        [] if left.inputs or left.layers else [f"left for it: tensor {name} is float" for name in left.tensors]
    )
