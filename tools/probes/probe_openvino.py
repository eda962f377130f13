"""OpenVINO on the CPU: the precision of every layer in its execution graph, and the outputs."""

from __future__ import annotations

import os
from pathlib import Path

# Virtual machines may advertise AMX and then stop at its first instruction.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_VNNI")

import openvino
from common import Feed, Found, main

LAYERS = {"Convolution", "FullyConnected", "MatMul", "Deconvolution"}
INTEGER = {"i8", "u8"}


def probe(model: Path, feeds: list[Feed]) -> Found:
    """The execution graph says for each node what it is and in which precision it runs."""
    settings = {"INFERENCE_PRECISION_HINT": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0}
    compiled = openvino.Core().compile_model(str(model), "CPU", settings)
    told = [op.get_rt_info() for op in compiled.get_runtime_model().get_ops()]
    nodes = [{key: _text(value) for key, value in node.items()} for node in told]
    layers = [node for node in nodes if node.get("layerType") in LAYERS]
    integer = [node for node in layers if node.get("runtimePrecision") in INTEGER]
    floats = [f"{node['originalLayersNames']} {node['runtimePrecision']}" for node in layers if node not in integer]
    outputs = [[compiled(feed)[port] for port in compiled.outputs] for feed in feeds]
    return outputs, {"int8": len(integer), "layers": len(layers), "note": "; ".join(floats)[:300]}


def _text(value: object) -> str:
    return str(getattr(value, "astype", lambda _kind: value)(str))


if __name__ == "__main__":
    main(lambda: openvino.__version__.split("-")[0], probe)
