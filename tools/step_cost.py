"""What a training step of a 3x3 convolution costs in forward passes of the same layer: the benchmark's part `step`."""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper

from onnxcalib import Pipeline, Recipe
from onnxcalib.algorithms.reconstruction.activations import capture
from onnxcalib.algorithms.reconstruction.adaquant import PAPER, STANDARD, LayerTraining
from onnxcalib.pipeline.job import start
from onnxcalib.pipeline.stages import layerwise
from onnxcalib.pipeline.sweep import candidates_of
from onnxcalib.recipe import Engine, parse_bits

TIMES = 7


def step(_cases: object, folder: Path) -> None:
    """Steps and forward passes in one run, in turn, several times."""
    for channels, size in ((64, 56), (256, 14)):
        rng = np.random.default_rng(0)
        model = _convolution(channels, size, rng)
        images = np.maximum(rng.standard_normal((48, channels, size, size)), 0).astype(np.float32)
        job = start(model, {"x": images}, Recipe(Pipeline.ADVANCED, bits=parse_bits("w4a8"))).jobs[0]
        candidates, layer, precision = candidates_of(job), job.layers[0], job.recipe.bits[0]
        activations = capture(job.model.proto, ["x", "y"], job.data, folder)
        params, qparams = candidates.layers[layer.name][precision], candidates.inputs["x"][8]
        problem = layerwise(job).trainer.problem(layer, precision, params, qparams)
        options = ort.SessionOptions()
        options.intra_op_num_threads = 1
        session = ort.InferenceSession(job.model.proto.SerializeToString(), options, ["CPUExecutionProvider"])
        for engine, schedule in itertools.product((Engine.AUTO, Engine.STANDARD), (STANDARD, PAPER)):
            training = LayerTraining(problem, activations["x"], activations["y"], schedule, engine, 1)
            batch = images[: min(training.batch, len(training.train))]
            ratios = []
            for number in range(1, TIMES + 1):
                began = time.process_time()
                session.run(None, {"x": batch})
                middle = time.process_time()
                training.step(rng, number)
                ratios.append((time.process_time() - middle) / (middle - began))
            print(
                f"conv {channels} 3x3 on {size}x{size}, engine {engine}, batch {len(batch)}: "
                f"a step takes the processor time of {np.median(ratios):.2f} forward passes of the float layer"
            )


def _convolution(channels: int, size: int, rng: Any) -> onnx.ModelProto:
    """A 3x3 convolution with a Relu, as many channels in as out."""
    weight = (rng.standard_normal((channels, channels, 3, 3)) / np.sqrt(9 * channels)).astype(np.float32)
    bias = np.zeros(channels, np.float32)
    value, shape = helper.make_tensor_value_info, ["n", channels, size, size]
    nodes = [
        helper.make_node("Conv", ["x", "w", "b"], ["c"], "conv", pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["c"], ["y"], "relu"),
    ]
    constants = [onnx.numpy_helper.from_array(weight, "w"), onnx.numpy_helper.from_array(bias, "b")]
    ends = [[value(name, TensorProto.FLOAT, shape)] for name in ("x", "y")]
    graph = helper.make_graph(nodes, "g", *ends, constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
