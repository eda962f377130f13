"""Checks gradients against central differences of a double-precision copy of the model."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

import models
from models import Arrays, normal
from onnxcalib.autodiff.interface import gradient_name
from onnxcalib.autodiff.standard.gradient_model import gradient_model

SINGLE, DOUBLE = TensorProto.FLOAT, TensorProto.DOUBLE


def loss_model(body: str, inputs: dict[str, str], opset: int = 13, **stored: np.ndarray) -> onnx.ModelProto:
    """A loss from the nodes that make y; its slope differs from place to place."""
    kinds = ", ".join(f"float[{shape}] {name}" if shape else f"float {name}" for name, shape in inputs.items())
    tail = "square = Mul (y, y) both = Add (square, y) loss = ReduceMean <keepdims=0> (both)"
    return models.build(f"net ({kinds}) => (float loss) {{ {body} {tail} }}", opset, **stored)


def doubled(model: onnx.ModelProto) -> onnx.ModelProto:
    """The same model in double precision."""
    double = onnx.ModelProto()
    double.CopyFrom(model)
    for value in (*double.graph.input, *double.graph.output):
        if value.type.tensor_type.elem_type == SINGLE:
            value.type.tensor_type.elem_type = DOUBLE
    tensors = list(double.graph.initializer)
    for node in double.graph.node:
        for attribute in node.attribute:
            if attribute.name == "value":
                tensors.append(attribute.t)
            if node.op_type == "Cast" and attribute.name == "to" and attribute.i == SINGLE:
                attribute.i = DOUBLE
    for tensor in tensors:
        if tensor.data_type == SINGLE and tensor.name != "scales":  # Resize wants its scales in single precision
            tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float64), tensor.name))
    return double


class Erf(OpRun):
    """The error function; the reference's own has single precision."""

    op_domain = ""

    def _run(self, x: np.ndarray) -> tuple[np.ndarray]:
        return (np.vectorize(math.erf, otypes=[np.float64])(x),)


class Gelu(OpRun):
    """Gelu in double precision, for the same reason."""

    op_domain = ""

    def _run(self, x: np.ndarray, approximate: str = "none") -> tuple[np.ndarray]:
        if approximate == "tanh":
            return (0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))),)
        return (0.5 * x * (1 + np.vectorize(math.erf, otypes=[np.float64])(x / np.sqrt(2))),)


class Mean(OpRun):
    """The mean; the reference's own does not broadcast."""

    op_domain = ""

    def _run(self, *operands: np.ndarray) -> tuple[np.ndarray]:
        return (sum(operands) / len(operands),)


class ConvTranspose(OpRun):
    """Transposed convolution, a tap at a time; the reference's own is wrong for groups."""

    op_domain = ""

    def _run(
        self,
        x: np.ndarray,
        w: np.ndarray,
        b: np.ndarray | None = None,
        group: int = 1,
        **settings: list[int] | str | None,
    ) -> tuple[np.ndarray]:
        axes = w.ndim - 2
        strides, dilations = (settings.get(name) or [1] * axes for name in ("strides", "dilations"))
        pads, extra = settings.get("pads") or [0] * 2 * axes, settings.get("output_padding") or [0] * axes
        reach = [(n - 1) * s + (k - 1) * d + 1 + e for n, s, k, d, e in
                 zip(x.shape[2:], strides, w.shape[2:], dilations, extra, strict=True)]  # fmt: skip
        y = np.zeros((len(x), group * w.shape[1], *reach))
        parts = x.reshape(len(x), group, -1, *x.shape[2:]), w.reshape(group, -1, *w.shape[1:])
        for tap in np.ndindex(*w.shape[2:]):
            values = np.einsum("ngi...,gio->ngo...", parts[0], parts[1][(..., *tap)]).reshape(len(x), -1, *x.shape[2:])
            places = [slice(t * d, t * d + (n - 1) * s + 1, s) for t, d, n, s in
                      zip(tap, dilations, x.shape[2:], strides, strict=True)]  # fmt: skip
            y[(..., *places)] += values
        kept = [slice(pads[axis], reach[axis] - pads[axis + axes]) for axis in range(axes)]
        return (y[(..., *kept)] + (0 if b is None else b.reshape(-1, *[1] * axes)),)


def feed_for(model: onnx.ModelProto, samples: int = 3) -> Arrays:
    """Gaussian values, others for every input."""
    return {
        name: normal(*value.shape, seed=seed)
        for seed, (name, value) in enumerate(models.feed_for(model, samples).items())
    }


def check(
    model: onnx.ModelProto, parameters: Sequence[str], feed: Arrays | None = None, tolerance: float = 3e-4
) -> onnx.ModelProto:
    """Compares the slopes along random directions; gives the gradient model."""
    feed = feed_for(model) if feed is None else feed
    result = gradient_model(model, parameters)
    onnx.checker.check_model(result)
    outputs = models.run(result, feed)
    evaluator = ReferenceEvaluator(doubled(model), new_ops=[ConvTranspose, Erf, Gelu, Mean])
    exact = {
        name: value.astype(np.float64) if value.dtype == np.float32 else value  # integers are fed as they are
        for name, value in feed.items()
    }

    def loss(moved: Arrays) -> float:
        return float(evaluator.run(["loss"], exact | moved)[0])

    np.testing.assert_allclose(outputs["loss"], loss({}), rtol=1e-4, atol=1e-6)
    rng = np.random.default_rng(7)
    for name in parameters:
        gradient = outputs[gradient_name(name)].astype(np.float64)
        assert gradient.shape == feed[name].shape
        for _ in range(4):
            direction = rng.standard_normal(gradient.shape)
            ahead, behind = (loss({name: exact[name] + sign * 1e-6 * direction}) for sign in (1, -1))
            slope, claimed = (ahead - behind) / 2e-6, float(np.sum(gradient * direction))
            allowed = tolerance * max(float(np.linalg.norm(gradient)), abs(slope), 1e-3)
            assert abs(slope - claimed) <= allowed, f"{name}: {claimed} instead of {slope}"
    return result
