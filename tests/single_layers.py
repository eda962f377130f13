"""Models of one layer each, ready to be trained, and what such a layer gives by another road."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper

from models import Arrays, build, feed_for, normal, run
from onnxcalib.algorithms.reconstruction.activations import DiskActivations
from onnxcalib.algorithms.reconstruction.adaquant import LayerProblem
from onnxcalib.model.layers import Layer, find_layers, weights_of
from onnxcalib.model.prepare import Model
from onnxcalib.model.read import read_prepared
from onnxcalib.numerics.quant_params import QuantParams, fake_quantize, make_qparams, quantize
from onnxcalib.numerics.range_estimators import weight_qparams
from onnxcalib.plan import LayerParams
from onnxcalib.recipe import LayerOptimizer, RangeMethod
from onnxcalib.targets import Target, find_target

BOUNDS = {"zero": np.float32(0), "one": np.float32(1)}

# Shapes of a sample's input and output, nodes, constants.
LAYERS: dict[str, tuple[str, str, str, Arrays]] = {
    "conv_relu": (
        "3,6,6", "5,6,6", "[layer] c = Conv <pads=[1,1,1,1]> (x, w, b) [act] y = Relu (c)",
        {"w": normal(5, 3, 3, 3, scale=0.3), "b": normal(5, scale=0.5)},
    ),
    "conv_bare": ("3,6,6", "4,3,3", "[layer] y = Conv <strides=[2,2], pads=[1,1,0,0]> (x, w)",
        {"w": normal(4, 3, 3, 3, scale=0.3)}),
    "conv_hardswish": (
        "4,9", "3,9", "[layer] c = Conv <pads=[1,1]> (x, w, b) [act] y = HardSwish (c)",
        {"w": normal(3, 4, 3, scale=0.5), "b": normal(3)},
    ),
    "depthwise_clip": (
        "6,5,5", "6,5,5", "[layer] c = Conv <pads=[1,1,1,1], group=6> (x, w, b) [act] y = Clip (c, zero, one)",
        {"w": normal(6, 1, 3, 3, scale=0.4), "b": normal(6, scale=0.3), **BOUNDS},
    ),
    "up_relu": (
        "4,4,4", "5,9,9", "[layer] c = ConvTranspose <strides=[2,2]> (x, w, b) [act] y = Relu (c)",
        {"w": normal(4, 5, 3, 3, scale=0.3), "b": normal(5, scale=0.5)},
    ),
    "up_groups": (
        "8,4,4", "6,6,6", "[layer] y = ConvTranspose <group=2> (x, w)", {"w": normal(8, 3, 3, 3, scale=0.3)}
    ),
    "gemm_relu": (
        "16", "7", "[layer] c = Gemm (x, w, b) [act] y = Relu (c)", {"w": normal(16, 7, scale=0.3), "b": normal(7)}
    ),
    "gemm_turned": (
        "16", "7", "[layer] y = Gemm <transB=1> (x, w, b)", {"w": normal(7, 16, scale=0.3), "b": normal(7)}
    ),
    "gemm_bare": ("12", "9", "[layer] y = Gemm <transB=1> (x, w)", {"w": normal(9, 12, scale=0.3)}),
    "matmul_clip": (
        "3,10", "3,8", "[layer] m = MatMul (x, w) [bias] a = Add (b, m) [act] y = Clip (a, zero, one)",
        {"w": normal(10, 8, scale=0.3), "b": normal(8, scale=0.3), **BOUNDS},
    ),
    "matmul_bare": ("3,10", "3,8", "[layer] y = MatMul (x, w)", {"w": normal(10, 8, scale=0.3)}),
}  # fmt: skip


@dataclass(frozen=True)
class Single:
    """A model of one layer with the inputs and the float outputs of some samples."""

    model: Model
    layer: Layer
    weight: np.ndarray
    bias: np.ndarray | None
    inputs: np.ndarray
    targets: np.ndarray

    @property
    def shapes(self) -> tuple[Sequence[int], Sequence[int]]:
        """Of a sample's input and output."""
        return self.inputs.shape[1:], self.targets.shape[1:]

    @property
    def energy(self) -> float:
        """The mean square of the targets."""
        return float(np.mean(self.targets.astype(np.float64) ** 2))

    def output(self, weight: np.ndarray, bias: np.ndarray | None, inputs: np.ndarray) -> np.ndarray:
        """The activated output with another weight and bias."""
        proto = onnx.ModelProto()
        proto.CopyFrom(self.model.proto)
        graph = proto.graph
        others = {self.layer.weight: weight}
        if bias is not None:
            others[self.layer.bias or "own_bias"] = bias
            if self.layer.bias is None:
                node = next(node for node in graph.node if node.name == self.layer.name)
                node.input.extend(["own_bias"])
        kept = [tensor for tensor in graph.initializer if tensor.name not in others]
        del graph.initializer[:]
        graph.initializer.extend([*kept, *(numpy_helper.from_array(value, name) for name, value in others.items())])
        return run(proto, {self.layer.input: inputs})[self.layer.activated]

    def error(self, params: LayerParams, read: QuantParams | None, chosen: Sequence[int]) -> float:
        """The relative squared error of a layer as a runtime computes it from its quantized values."""
        inputs = self.inputs[chosen]
        steps = params.quantized.astype(np.float32) - channels(params.qparams.zero_point.astype(np.float32), params)
        real = steps * channels(params.qparams.scale, params)
        found = self.output(real, params.bias, inputs if read is None else fake_quantize(inputs, read))
        gap = found.astype(np.float64) - self.targets[chosen]
        return float(np.mean(gap**2)) / self.energy


def channels(values: np.ndarray, params: LayerParams) -> np.ndarray:
    """Channel values in the shape of the weight."""
    axes = [axis for axis in range(params.quantized.ndim) if axis != params.qparams.axis]
    return values if values.ndim == 0 else np.expand_dims(values, axes)


def single(name: str, samples: int = 16, opset: int = 14) -> Single:
    """The layer of that name with some samples."""
    given, made, nodes, stored = LAYERS[name]
    proto = build(f"net (float[N,{given}] x) => (float[N,{made}] y) {{ {nodes} }}", opset, **stored)
    model = read_prepared(proto, find_target("ort"))
    (layer,) = find_layers(model).layers
    values = weights_of(model, [each for each in (layer.weight, layer.bias) if each])
    inputs = correlated(feed_for(proto, samples)["x"], -1 if layer.op in ("Gemm", "MatMul") else 1)
    targets = run(model.proto, {layer.input: inputs})[layer.activated]
    return Single(model, layer, values[layer.weight], values.get(layer.bias or ""), inputs, targets)


def correlated(noise: np.ndarray, axis: int) -> np.ndarray:
    """Channels that rise and fall together, mostly above zero: what is lost in one can be made good in another."""
    shape = [1] * noise.ndim
    shape[axis] = noise.shape[axis]
    inputs = 0.3 * noise
    for seed in (1, 2):
        strength = normal(len(noise), seed=seed).reshape(-1, *[1] * (noise.ndim - 1))
        inputs = inputs + strength * normal(shape[axis], seed=seed + 2).reshape(shape)
    return np.where(inputs < 0, 0.3 * inputs, inputs).astype(np.float32)


def start_of(case: Single, target: Target, bits: int) -> LayerParams:
    """The layer rounded to nearest."""
    axis = case.layer.channel_axis if target.per_channel and case.layer.per_channel else None
    qparams = weight_qparams(case.weight, target.weight_scheme(bits), axis, RangeMethod.MSE)
    return LayerParams(quantize(case.weight, qparams), qparams, case.bias, case.weight)


def input_qparams(case: Single, target: Target, bits: int) -> QuantParams:
    """A grid that cuts off the largest inputs."""
    return make_qparams(0.8 * case.inputs.min(), 0.8 * case.inputs.max(), target.activation_scheme(bits))


def problem_of(
    case: Single,
    target: Target,
    bits: tuple[int, int] = (3, 4),
    optimizer: LayerOptimizer = LayerOptimizer.ADAQUANT,
    *,
    trains_input: bool = True,
) -> LayerProblem:
    """The layer to train, at bits for its weight and its input."""
    start, qparams = start_of(case, target, bits[0]), input_qparams(case, target, bits[1])
    kind = target.activation_scheme(bits[1])
    return LayerProblem(case.model, case.layer, target, start, bits[0], qparams, kind, trains_input, optimizer)


def activations(path: Path, rows: np.ndarray, samples: int | None = None) -> DiskActivations:
    """Rows in a file, all at once."""
    held = DiskActivations(path)
    assert held.append(rows, samples or len(rows))
    return held
