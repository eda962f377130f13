"""What every script here does: read a model and calibration samples, let a tool quantize, and say how it went.

    python TOOL.py MODEL.onnx CALIBRATION.npz OUTPUT.onnx METHOD WEIGHT_BITS STEPS

A script runs in the environment of its tool and knows nothing of onnxcalib or of the other tools. It writes OUTPUT.onnx
and, beside it, OUTPUT.json with the tool's version, what is worth a note or, in one line, why it failed.
Activations have 8 bits; with fewer WEIGHT_BITS the weights of the first and the last layer keep 8. STEPS are iterations
a layer, for methods that train.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import onnx

Feed = dict[str, np.ndarray[Any, Any]]
LAYERS = ("Conv", "ConvTranspose", "Gemm", "MatMul")


@dataclass(frozen=True)
class Asked:
    """What a tool has to do."""

    model: Path
    calibration: Path
    output: Path
    method: str
    weight_bits: int
    steps: int

    def samples(self) -> Feed:
        """All samples, by the model's inputs."""
        return dict(np.load(self.calibration))

    def feeds(self, batch: int = 1) -> Iterator[Feed]:
        """The samples in batches."""
        arrays = self.samples()
        for start in range(0, len(next(iter(arrays.values()))), batch):
            yield {name: values[start : start + batch] for name, values in arrays.items()}

    def beside(self, name: str) -> Path:
        """A file of the tool's own, next to the output."""
        return self.output.with_name(f"{self.output.stem}_{name}")


def folded(asked: Asked) -> Path:
    """The model after onnxruntime's basic optimisations, which fold batch norm, as its pre-processing does."""
    import onnxruntime

    path, options = asked.beside("folded.onnx"), onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.optimized_model_filepath = str(path)
    onnxruntime.InferenceSession(asked.model, options, providers=["CPUExecutionProvider"])
    return path


def edge_weights(model: onnx.ModelProto) -> list[str]:
    """The weights of the first and the last layer."""
    constants = {each.name for each in model.graph.initializer}
    weights = [node.input[1] for node in model.graph.node if node.op_type in LAYERS and node.input[1] in constants]
    return [weights[0], weights[-1]]


def main(package: str, quantize: Callable[[Asked], str | None]) -> None:
    """Runs the tool; what it refuses is part of the answer, in its own words."""
    model, calibration, output = (Path(argument).resolve() for argument in sys.argv[1:4])
    asked = Asked(model, calibration, output, sys.argv[4], int(sys.argv[5]), int(sys.argv[6]))
    answer = {"version": f"{package} {version(package)}"}
    try:
        answer["note"] = quantize(asked) or ""
    except Exception as error:  # every tool has exceptions of its own
        traceback.print_exc()
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        answer["error"] = f"{type(error).__name__}: {lines[0] if lines else ''}"[:300]
    output.with_suffix(".json").write_text(json.dumps(answer), encoding="utf-8")
