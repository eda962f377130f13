"""Why a quantized file is not faster: what the runtime makes of it, and patterns that are known to be slow."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from onnxcalib.analysis.layer_rows import ReportData
from onnxcalib.errors import listed
from onnxcalib.model.graph import GraphIndex
from onnxcalib.model.placement import SAME_QPARAMS_OPS
from onnxcalib.model.quantized import QuantizedLayer
from onnxcalib.recipe import FLOAT_BITS, MAX_BITS
from onnxcalib.runtime.installed import find_runtime
from onnxcalib.runtime.optimized import optimized

FLOAT_LAYERS = ("Conv", "FusedConv", "ConvTranspose", "Gemm", "FusedGemm", "MatMul", "FusedMatMul")
INTEGER_LAYERS = (
    "QLinearConv",
    "QLinearMatMul",
    "QGemm",
    "MatMulInteger",
    "ConvInteger",
    "MatMulIntegerToFloat",
    "DynamicQuantizeMatMul",
    "MatMulNBits",
)
MOVING_OPS = (
    *SAME_QPARAMS_OPS,
    "QuantizeLinear",
    "DequantizeLinear",
    "DynamicQuantizeLinear",
    "Clip",
)  # of values that stay quantized


def speed(path: Path, layers: Sequence[QuantizedLayer], report: ReportData | None) -> list[str]:
    """What runs in integer kernels, what does not, and what is slow even so."""
    graph = optimized(path).graph
    runtime = find_runtime().version
    ops = [node.op_type for node in graph.node]
    integer = sum(ops.count(op) for op in INTEGER_LAYERS)
    slow = [node.name or node.output[0] for node in graph.node if node.op_type in FLOAT_LAYERS]
    converters = sum(ops.count(op) for op in ("QuantizeLinear", "DequantizeLinear"))
    lines = [f"onnxruntime {runtime} runs {integer} layers in integer kernels and {len(slow)} in float."]
    if slow:
        lines.append(f"In float: {listed(slow)}.")
    if converters:
        between = {op for op in ops if not op.startswith("QLinear")} - {*FLOAT_LAYERS, *INTEGER_LAYERS, *MOVING_OPS}
        floats = f"; float ops: {', '.join(sorted(between))}" if between else ""
        lines.append(
            f"{converters} QuantizeLinear and DequantizeLinear remain between integer and float parts{floats}."
        )
    index = GraphIndex(graph)
    makers = (index.producers.get(node.input[0]) for node in graph.node if node.op_type == "Clip")
    clips = sum(maker is not None and maker.op_type.startswith(("Quantize", "QLinear")) for maker in makers)
    if clips:
        lines.append(f"{clips} activations below 8 bits are clipped in a step of their own.")
    lines += _slow_patterns(layers)
    if report is not None:
        out = report["outcome"]
        ratio, spent = out["quantized"]["latency_ratio"], out["float"]["latency_ms"]
        lines.append(f"Measured by the run: {ratio:.2f} of the float model's {spent:.2f} ms, one sample at a time.")
        if spent < 1:
            lines.append("Of a model this small, the time to start each op is a good part; integers do not lessen it.")
    else:
        lines.append("For a measured ratio: onnxcalib evaluate OUT.onnx -d DATA --reference FLOAT.onnx")
    return lines


def _slow_patterns(layers: Sequence[QuantizedLayer]) -> list[str]:
    """What is known to be slow on onnxruntime's CPU provider."""
    patterns: Mapping[str, Callable[[QuantizedLayer], bool]] = {
        "depthwise: little to compute for each byte, so integers gain less": lambda it: it.depthwise,
        "weights are unsigned, which is slower than float on some versions": lambda it: not it.weight.signed,
        "weight zero points are not 0: slow, or refused, in convolutions": lambda it: (
            it.weight.signed and not it.shifted and bool(it.weight.zero_point.any())
        ),
        "only weights are quantized: it computes in float": lambda it: it.activation_bits == FLOAT_BITS,
        "activations of 16 bits: it computes in float": lambda it: it.input is not None and it.input.bits > MAX_BITS,
        "its bias is float, which onnxruntime 1.19 does not fuse": lambda it: it.bias == "float" and it.op == "Conv",
    }
    found = {words: [it.name for it in layers if fits(it)] for words, fits in patterns.items()}
    return [
        f"{len(names)} of {len(layers)} layers, {words}: {listed(names)}." for words, names in found.items() if names
    ]
