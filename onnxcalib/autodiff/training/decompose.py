"""Ops that ONNX Runtime training cannot differentiate, or does wrongly, written as ops that it can."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from functools import reduce
from itertools import accumulate, pairwise
from math import pi, sqrt
from typing import Any

import numpy as np
import onnx

from onnxcalib.autodiff.interface import NoGradientError
from onnxcalib.autodiff.writer import Facts, Writer
from onnxcalib.errors import ModelError
from onnxcalib.model.graph import attributes
from onnxcalib.model.loss_writer import FAKE_QUANTIZE

MICROSOFT = "com.microsoft"


class Rewriter(Writer):
    """Writes a model's nodes anew, some of them as several others."""

    def __init__(self, model: onnx.ModelProto, active: Collection[str]) -> None:
        super().__init__(model.graph, Facts.of(model, batch=1))
        self.graph, self.active = model.graph, active

    def rewrite(self) -> None:
        """Replaces the model's quantizers, and of its other nodes those that pass gradients and have a rule."""
        nodes = [onnx.NodeProto.FromString(node.SerializeToString()) for node in self.graph.node]
        for node in nodes:
            rule = RULES.get(node.op_type)
            passes = node.op_type == FAKE_QUANTIZE or any(name in self.active for name in node.output)
            result = rule(self, node) if rule and passes else None
            if result is None:
                self.nodes.append(node)
            elif result:
                self.nodes[-1].output[0], self.nodes[-1].name = node.output[0], node.name or node.output[0]
        del self.graph.node[:]
        self.graph.node.extend(single for node in self.nodes for single in self._read_once(node))
        self.graph.initializer.extend(self.constants)

    def _read_once(self, node: onnx.NodeProto) -> Iterator[onnx.NodeProto]:
        """The node, with repeated inputs under other names: their gradients would get one name."""
        for position, name in enumerate(node.input):
            if name and name in node.input[:position]:
                node.input[position] = self.fresh("onnxcalib/again")
                yield onnx.helper.make_node("Identity", [name], [node.input[position]])
        yield node


# Writes what takes a node's place, and names what becomes its output, empty where the outputs are written already;
# None keeps the node, with what the rule has changed in it.
Rule = Callable[[Rewriter, onnx.NodeProto], str | None]


def _fake_quantize(write: Rewriter, node: onnx.NodeProto) -> str | None:
    values, (x, scale, zero) = attributes(node), node.input
    if "axis" in values:
        return _by_channel(write, node)
    # Its gradient is wanted with that of the scale, whatever else reads the tensor.
    x = write.op("Identity", x)
    quantizer = onnx.helper.make_node(
        "FakeQuant", [x, scale, zero], [node.output[0], write.fresh("inside")], node.name or node.output[0],
        domain=MICROSOFT, quant_min=values["low"], quant_max=values["high"],
    )  # fmt: skip
    node.CopyFrom(quantizer)
    return None


def _by_channel(write: Rewriter, node: onnx.NodeProto) -> str:
    values, (x, scale, zero) = attributes(node), node.input
    shape = write.facts.shape(x)
    if shape is None:
        raise ModelError(f"the rank of '{x}' is unknown; a quantizer by channel needs it.")
    channels = [1] * len(shape)
    channels[values["axis"]] = -1
    scale, zero = write.reshape(scale, channels), write.reshape(zero, channels)
    code = write.op("Add", write.op("Round", write.op("Div", x, scale)), zero)
    inside = write.op("Clip", code, values["low"], values["high"])
    return write.op("Mul", write.op("Sub", inside, zero), scale)


def _hard_sigmoid(write: Rewriter, node: onnx.NodeProto, slope: float = 0.2) -> str:
    values = attributes(node)
    line = write.op("Mul", node.input[0], values.get("alpha", slope))
    return write.op("Clip", write.op("Add", line, values.get("beta", 0.5)), 0, 1)


def _hard_swish(write: Rewriter, node: onnx.NodeProto) -> str:
    return write.op("Mul", node.input[0], _hard_sigmoid(write, node, 1 / 6))


def _negative_part(write: Rewriter, x: str) -> str:
    return write.op("Neg", write.op("Relu", write.op("Neg", x)))


def _prelu(write: Rewriter, node: onnx.NodeProto) -> str:
    x, slope = node.input
    below = write.op("Mul", _negative_part(write, x), slope)
    return write.op("Add", write.op("Relu", x), below)


def _elu(write: Rewriter, node: onnx.NodeProto) -> str:
    grown = write.op("Exp", _negative_part(write, node.input[0]))
    below = write.op("Mul", write.op("Sub", grown, 1), attributes(node).get("alpha", 1.0))
    return write.op("Add", write.op("Relu", node.input[0]), below)


def _mish(write: Rewriter, node: onnx.NodeProto) -> str:
    return write.op("Mul", node.input[0], write.op("Tanh", write.op("Softplus", node.input[0])))


def _sum(write: Rewriter, node: onnx.NodeProto) -> str:
    terms: list[str] = list(node.input)
    if len(terms) == 1:
        return write.op("Identity", terms[0])
    return reduce(lambda total, term: write.op("Add", total, term), terms)


def _mean(write: Rewriter, node: onnx.NodeProto) -> str:
    return write.op("Mul", _sum(write, node), 1 / len(node.input))


def _batch_norm(write: Rewriter, node: onnx.NodeProto) -> str | None:
    values = attributes(node)
    if values.get("training_mode", 0):
        return None
    x, gamma, beta, mean, variance = node.input
    spread = write.op("Sqrt", write.op("Add", variance, values.get("epsilon", 1e-5)))
    factor = write.op("Div", gamma, spread)
    shift = write.op("Sub", beta, write.op("Mul", mean, factor))
    return _affine(write, write.reshape(x, (0, 0, -1)), factor, shift, x)


def _normalized(write: Rewriter, rows: str, epsilon: float) -> str:
    """The tensor with mean zero and variance one over its last axis."""
    centred = write.op("Sub", rows, write.reduce_mean(rows, [-1]))
    variance = write.reduce_mean(write.op("Mul", centred, centred), [-1])
    return write.op("Div", centred, write.op("Sqrt", write.op("Add", variance, epsilon)))


def _affine(write: Rewriter, rows: str, scale: str, bias: str, like: str) -> str:
    """Rows scaled and shifted by channel, in the shape of a tensor."""
    scale, bias = (write.op("Unsqueeze", name, write.integers([1])) for name in (scale, bias))
    moved = write.op("Add", write.op("Mul", rows, scale), bias)
    return write.op("Reshape", moved, write.op("Shape", like))


def _instance_norm(write: Rewriter, node: onnx.NodeProto) -> str:
    x, scale, bias = node.input
    normalized = _normalized(write, write.reshape(x, (0, 0, -1)), attributes(node).get("epsilon", 1e-5))
    return _affine(write, normalized, scale, bias, x)


def _group_norm(write: Rewriter, node: onnx.NodeProto) -> str:
    values, (x, scale, bias) = attributes(node), node.input
    rows = write.reshape(x, (0, values["num_groups"], -1))
    normalized = _normalized(write, rows, values.get("epsilon", 1e-5))
    if write.facts.opset >= 21:  # from then on scale and bias are by channel, not by group
        by_channel = write.op("Concat", write.op("Shape", x, end=2), write.integers([-1]), axis=0)
        normalized = write.op("Reshape", normalized, by_channel)
    return _affine(write, normalized, scale, bias, x)


def _extreme(write: Rewriter, node: onnx.NodeProto) -> str:
    """A maximum or minimum as the mean of the values that attain it, which share its gradient."""
    values = attributes(node)
    x, *axes = node.input
    keep = values.pop("keepdims", 1)
    attained = write.op("Equal", x, write.op(node.op_type, *node.input, keepdims=1, **values))
    if "axes" in values:
        axes = [write.integers(values["axes"])]
    return _mean_where(write, x, attained, lambda y: write.op("ReduceSum", y, *axes, keepdims=keep))


def _global_max(write: Rewriter, node: onnx.NodeProto) -> str:
    attained = write.op("Equal", node.input[0], write.op("GlobalMaxPool", node.input[0]))
    return _mean_where(write, node.input[0], attained, lambda y: write.op("GlobalAveragePool", y))


def _mean_where(write: Rewriter, x: str, attained: str, reduced: Callable[[str], str]) -> str:
    values = write.op("Where", attained, x, 0)
    count = write.op("Cast", attained, to=onnx.TensorProto.FLOAT)
    return write.op("Div", reduced(values), reduced(count))


def _split(write: Rewriter, node: onnx.NodeProto) -> str | None:
    """Slices instead: a part that gradients do not pass would shift the gradients of the others."""
    if all(name in write.active for name in node.output):
        return None
    axis = attributes(node).get("axis", 0)
    ends = accumulate(_parts(write, node, axis), initial=0)
    for name, (start, stop) in zip(node.output, pairwise(ends), strict=True):
        if name:
            write.op("Slice", node.input[0], *(write.integers([it]) for it in (start, stop, axis)), output=name)
    return ""


def _parts(write: Rewriter, node: onnx.NodeProto, axis: int) -> list[int]:
    if len(node.input) > 1 and node.input[1]:
        sizes = write.facts.value(node.input[1])
        if sizes is not None:
            return [int(size) for size in sizes]
    else:
        size = (write.facts.shape(node.input[0]) or {axis: None})[axis]
        if isinstance(size, int):
            part, last = -(-size // len(node.output)), len(node.output) - 1
            return [part] * last + [size - part * last]
    raise ModelError(f"the sizes of the parts of Split '{node.name or node.output[0]}' are unknown.")


def _where(write: Rewriter, node: onnx.NodeProto) -> str:
    """Both values in their full shape: gradients of a broadcast one are not summed."""
    whole = write.op("Shape", write.op("Where", *node.input))
    values = [write.op("Expand", name, whole) if name in write.active else name for name in node.input[1:]]
    return write.op("Where", node.input[0], *values)


def _dropout(write: Rewriter, node: onnx.NodeProto) -> str | None:
    training = write.facts.value(node.input[2]) if len(node.input) > 2 and node.input[2] else np.array(False)
    if training is None or training or len([name for name in node.output if name]) > 1:
        return None
    return write.op("Identity", node.input[0])


def _padded(write: Rewriter, node: onnx.NodeProto) -> None:
    """A window with explicit pads: the gradient takes automatic ones for none."""
    values = attributes(node)
    kind = values.pop("auto_pad", b"NOTSET")
    if kind in (b"NOTSET", b""):
        return
    sizes = [size for size in (write.facts.shape(node.input[0]) or ())[2:] if isinstance(size, int)]
    kernel = values.get("kernel_shape") or (write.facts.shape(node.input[1]) or ())[2:]
    if not kernel or len(sizes) != len(kernel):
        raise ModelError(f"the pads of {node.op_type} '{node.name or node.output[0]}' depend on an unknown size.")
    ones = [1] * len(kernel)
    strides, dilations = values.get("strides", ones), values.get("dilations", ones)
    pairs = [_pads(kind, *axis) for axis in zip(sizes, kernel, strides, dilations, strict=True)]
    values["pads"] = [pad for side in zip(*pairs, strict=True) for pad in side]
    del node.attribute[:]
    node.attribute.extend(onnx.helper.make_attribute(name, value) for name, value in values.items())


def _conv(write: Rewriter, node: onnx.NodeProto) -> str | None:
    """With explicit pads; and groups along a line as those of an image of one row.

    Of one or three axes the gradient clears as much for each group as for all, so past its end: other tensors are lost.
    """
    _padded(write, node)
    values = attributes(node)
    groups, axes = values.get("group", 1), _window_axes(write, node)
    if groups == 1 or node.input[0] not in write.active or axes == 2:
        return None
    if axes != 1:
        name = node.name or node.output[0]
        raise NoGradientError(node.op_type, name, "that of ONNX Runtime training is wrong", "Try `engine='standard'`")
    row: dict[str, Any] = {
        name: [1, *values[name]] for name in ("kernel_shape", "strides", "dilations") if name in values
    }
    before, after = values.get("pads", (0, 0))
    axis = write.integers([2])
    x, weight = (write.op("Unsqueeze", each, axis) for each in node.input[:2])
    image = write.op("Conv", x, weight, *node.input[2:], group=groups, pads=[0, before, 0, after], **row)
    return write.op("Squeeze", image, axis)


def _window_axes(write: Rewriter, node: onnx.NodeProto) -> int:
    """Along how many axes a convolution goes, 0 where nothing tells."""
    kernel = attributes(node).get("kernel_shape") or (write.facts.shape(node.input[1]) or ())[2:]
    return len(kernel)


def _pads(kind: bytes, size: int, kernel: int, stride: int, dilation: int) -> tuple[int, int]:
    if kind == b"VALID":
        return 0, 0
    total = max((-(-size // stride) - 1) * stride + (kernel - 1) * dilation + 1 - size, 0)
    small, large = total // 2, total - total // 2
    return (small, large) if kind == b"SAME_UPPER" else (large, small)


def _layer_norm(write: Rewriter, node: onnx.NodeProto) -> None:
    """All three outputs and a bias: the gradient reads them."""
    x, scale, *bias = node.input
    zeros = [] if any(bias) else [write.op("ConstantOfShape", write.op("Shape", scale))]
    node.input[:] = [x, scale, *(zeros or bias)]
    node.output[:] = [name or write.fresh("statistic") for name in [*node.output, "", ""][:3]]


def _gelu(write: Rewriter, node: onnx.NodeProto) -> str | None:
    """The approximation spelled out: its gradient would be that of the exact function."""
    if attributes(node).get("approximate", b"none") == b"none":
        return None
    x = node.input[0]
    bent = write.op("Mul", write.op("Mul", x, x), 0.044715 * sqrt(2 / pi))
    inner = write.op("Mul", write.op("Add", bent, sqrt(2 / pi)), x)
    return write.op("Mul", x, write.op("Sigmoid", write.op("Mul", inner, 2)))


def _power(write: Rewriter, node: onnx.NodeProto) -> str:
    """The exponent as a float and the base in its full shape: the gradient takes both for given."""
    base, exponent = node.input
    value = write.facts.value(exponent)
    if value is not None and value.dtype.kind in "iu":
        exponent = write.op("Cast", exponent, to=onnx.TensorProto.FLOAT)
    if value is None or value.ndim:
        base = write.op("Expand", base, write.op("Shape", write.op("Pow", *node.input)))
    return write.op("Pow", base, exponent)


RULES: dict[str, Rule] = {
    FAKE_QUANTIZE: _fake_quantize,
    "AveragePool": _padded,
    "BatchNormalization": _batch_norm,
    "Conv": _conv,
    "Dropout": _dropout,
    "Elu": _elu,
    "Gelu": _gelu,
    "GlobalMaxPool": _global_max,
    "GroupNormalization": _group_norm,
    "HardSigmoid": _hard_sigmoid,
    "HardSwish": _hard_swish,
    "InstanceNormalization": _instance_norm,
    "LayerNormalization": _layer_norm,
    "MaxPool": _padded,
    "Mean": _mean,
    "Mish": _mish,
    "PRelu": _prelu,
    "Pow": _power,
    "ReduceMax": _extreme,
    "ReduceMin": _extreme,
    "Split": _split,
    "Sum": _sum,
    "Where": _where,
}
