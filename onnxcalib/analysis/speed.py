"""Why a quantized file is not faster: what the runtime makes of it, and patterns that are known to be slow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from onnxcalib.analysis.layer_rows import ReportData
from onnxcalib.errors import listed
from onnxcalib.model.graph import GraphIndex
from onnxcalib.model.placement import SAME_QPARAMS_OPS
from onnxcalib.model.quantized import QuantizedLayer
from onnxcalib.recipe import MAX_BITS
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
    "MatMulNBits",
)


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
        between = sorted({node.op_type for node in graph.node if not _is_integer(node.op_type)} - set(FLOAT_LAYERS))
        lines.append(
            f"{converters} QuantizeLinear and DequantizeLinear remain between integer and float parts"
            + (f"; float ops: {', '.join(between)}." if between else ".")
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


def _is_integer(op: str) -> bool:
    """Integer kernels, and ops that only move or clip quantized values."""
    return op.startswith("QLinear") or op in (
        *INTEGER_LAYERS,
        *SAME_QPARAMS_OPS,
        "QuantizeLinear",
        "DequantizeLinear",
        "Clip",
    )


def _slow_patterns(layers: Sequence[QuantizedLayer]) -> list[str]:
    """What is known to be slow on onnxruntime's CPU provider."""
    patterns: tuple[tuple[str, Callable[[QuantizedLayer], bool]], ...] = (
        ("depthwise: little to compute for each byte, so integers gain less", lambda each: each.depthwise),
        ("weights are unsigned, which is slower than float on some versions", lambda each: not each.weight.signed),
        (
            "weight zero points are not 0: slow, or refused, in convolutions",
            lambda each: each.weight.signed and bool(each.weight.zero_point.any()),
        ),
        ("only weights are quantized: it computes in float", lambda each: each.input is None),
        (
            "activations of 16 bits: it computes in float",
            lambda each: each.input is not None and each.input.bits > MAX_BITS,
        ),
        (
            "its bias is float, which onnxruntime 1.19 does not fuse",
            lambda each: each.bias == "float" and each.op == "Conv",
        ),
    )
    lines = []
    for words, fits in patterns:
        names = [each.name for each in layers if fits(each)]
        if names:
            lines.append(f"{len(names)} of {len(layers)} layers, {words}: {listed(names)}.")
    return lines
