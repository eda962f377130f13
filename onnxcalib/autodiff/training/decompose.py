"""Ops that ONNX Runtime training cannot differentiate, or does wrongly, written as ops that it can."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from functools import cached_property
from itertools import accumulate, pairwise
from math import pi, sqrt
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper

from onnxcalib.errors import ModelError
from onnxcalib.model.builder import ProtoBuilder
from onnxcalib.model.graph import attributes
from onnxcalib.model.io import opset_of
from onnxcalib.model.loss_writer import FAKE_QUANTIZE
from onnxcalib.model.shapes import infer_shapes

MICROSOFT = "com.microsoft"


class Rewriter(ProtoBuilder):
    """Writes a model's nodes anew, some of them as several others."""

    def __init__(self, model: onnx.ModelProto, active: Collection[str]) -> None:
        super().__init__(model.graph)
        self.model = model
        self.active = active
        self.opset = opset_of(model)
        self._replaced = onnx.NodeProto()

    def rewrite(self) -> None:
        """Replaces the model's quantizers, and of its other nodes those that pass gradients and have a rule."""
        for node in self.model.graph.node:
            self._replaced = node
            rule = RULES.get(node.op_type)
            if rule and (node.op_type == FAKE_QUANTIZE or any(name in self.active for name in node.output)):
                rule(self, node)
            else:
                self.keep(node)
        nodes = [single for node in self.nodes for single in self._read_once(node)]
        del self.model.graph.node[:]
        self.model.graph.node.extend(nodes)
        self.model.graph.initializer.extend(self.constants)

    def keep(self, node: onnx.NodeProto, **changed: Any) -> None:
        """Adds the node as it is, or with some attributes changed; None removes one."""
        kept = onnx.NodeProto()
        kept.CopyFrom(node)
        if changed:
            values = {name: value for name, value in {**attributes(node), **changed}.items() if value is not None}
            del kept.attribute[:]
            kept.attribute.extend(onnx.helper.make_attribute(name, value) for name, value in values.items())
        self.nodes.append(kept)

    def op(self, op: str, *inputs: str, output: str = "", **values: Any) -> str:
        """Adds a node with one output, whose name it returns; a given output is that of the replaced node."""
        if not output:
            return self.node(op, inputs, f"onnxcalib/{op}", **values)
        name = self._replaced.name or output
        self.nodes.append(onnx.helper.make_node(op, inputs, [output], name=name, **values))
        return output

    def number(self, value: float) -> str:
        """A float constant of rank 0."""
        return self.constant("onnxcalib/constant", np.array(value, np.float32))

    def integers(self, *values: int) -> str:
        """A list of integers as a constant."""
        return self.constant("onnxcalib/constant", np.array(values, np.int64))

    def shape(self, name: str) -> tuple[int | None, ...] | None:
        """The shape of a tensor, with a batch of one; None where it is unknown."""
        return self._shapes.get(name)

    def value(self, name: str) -> np.ndarray[Any, Any] | None:
        """The value of an initialiser, None for anything else."""
        found = (tensor for tensor in self.model.graph.initializer if tensor.name == name)
        return next((numpy_helper.to_array(tensor) for tensor in found), None)

    def _read_once(self, node: onnx.NodeProto) -> Iterator[onnx.NodeProto]:
        """The node, with repeated inputs under other names: their gradients would get one name."""
        for position, name in enumerate(node.input):
            if name and name in node.input[:position]:
                node.input[position] = self.fresh("onnxcalib/again")
                yield onnx.helper.make_node("Identity", [name], [node.input[position]])
        yield node

    @cached_property
    def _shapes(self) -> dict[str, tuple[int | None, ...]]:
        return infer_shapes(self.model)


def _fake_quantize(write: Rewriter, node: onnx.NodeProto) -> None:
    values = attributes(node)
    if "axis" in values:
        _by_channel(write, node, values)
        return
    x, scale, zero = node.input
    # Its gradient is wanted with that of the scale, whatever else reads the tensor.
    x = write.op("Identity", x)
    quantizer = onnx.helper.make_node(
        "FakeQuant", [x, scale, zero], [node.output[0], write.fresh("inside")], node.name or node.output[0],
        domain=MICROSOFT, quant_min=values["low"], quant_max=values["high"],
    )  # fmt: skip
    write.keep(quantizer)


def _by_channel(write: Rewriter, node: onnx.NodeProto, values: dict[str, Any]) -> None:
    x, scale, zero = node.input
    shape = write.shape(x)
    if shape is None:
        raise ModelError(f"the rank of '{x}' is unknown; a quantizer by channel needs it.")
    channels = [1] * len(shape)
    channels[values["axis"]] = -1
    wide = write.integers(*channels)
    scale, zero = write.op("Reshape", scale, wide), write.op("Reshape", zero, wide)
    code = write.op("Add", write.op("Round", write.op("Div", x, scale)), zero)
    inside = write.op("Clip", code, write.number(values["low"]), write.number(values["high"]))
    write.op("Mul", write.op("Sub", inside, zero), scale, output=node.output[0])


def _hard_sigmoid(write: Rewriter, x: str, slope: float, offset: float, output: str = "") -> str:
    line = write.op("Add", write.op("Mul", x, write.number(slope)), write.number(offset))
    return write.op("Clip", line, write.number(0), write.number(1), output=output)


def _hard_sigmoid_node(write: Rewriter, node: onnx.NodeProto) -> None:
    values = attributes(node)
    _hard_sigmoid(write, node.input[0], values.get("alpha", 0.2), values.get("beta", 0.5), node.output[0])


def _hard_swish(write: Rewriter, node: onnx.NodeProto) -> None:
    gate = _hard_sigmoid(write, node.input[0], 1 / 6, 0.5)
    write.op("Mul", node.input[0], gate, output=node.output[0])


def _negative_part(write: Rewriter, x: str) -> str:
    return write.op("Neg", write.op("Relu", write.op("Neg", x)))


def _prelu(write: Rewriter, node: onnx.NodeProto) -> None:
    x, slope = node.input
    below = write.op("Mul", _negative_part(write, x), slope)
    write.op("Add", write.op("Relu", x), below, output=node.output[0])


def _elu(write: Rewriter, node: onnx.NodeProto) -> None:
    alpha = write.number(attributes(node).get("alpha", 1.0))
    grown = write.op("Exp", _negative_part(write, node.input[0]))
    below = write.op("Mul", write.op("Sub", grown, write.number(1)), alpha)
    write.op("Add", write.op("Relu", node.input[0]), below, output=node.output[0])


def _mish(write: Rewriter, node: onnx.NodeProto) -> None:
    gate = write.op("Tanh", write.op("Softplus", node.input[0]))
    write.op("Mul", node.input[0], gate, output=node.output[0])


def _sum(write: Rewriter, node: onnx.NodeProto) -> None:
    _add_all(write, list(node.input), node.output[0])


def _mean(write: Rewriter, node: onnx.NodeProto) -> None:
    total = _add_all(write, list(node.input))
    write.op("Mul", total, write.number(1 / len(node.input)), output=node.output[0])


def _add_all(write: Rewriter, terms: list[str], output: str = "") -> str:
    if len(terms) == 1:
        return write.op("Identity", terms[0], output=output)
    total = terms[0]
    for term in terms[1:-1]:
        total = write.op("Add", total, term)
    return write.op("Add", total, terms[-1], output=output)


def _batch_norm(write: Rewriter, node: onnx.NodeProto) -> None:
    values = attributes(node)
    if values.get("training_mode", 0):
        write.keep(node)
        return
    x, gamma, beta, mean, variance = node.input
    spread = write.op("Sqrt", write.op("Add", variance, write.number(values.get("epsilon", 1e-5))))
    factor = write.op("Div", gamma, spread)
    shift = write.op("Sub", beta, write.op("Mul", mean, factor))
    one = write.integers(1)
    factor, shift = write.op("Unsqueeze", factor, one), write.op("Unsqueeze", shift, one)
    scaled = write.op("Mul", write.op("Reshape", x, write.integers(0, 0, -1)), factor)
    write.op("Reshape", write.op("Add", scaled, shift), write.op("Shape", x), output=node.output[0])


def _normalized(write: Rewriter, rows: str, epsilon: float) -> str:
    """The tensor with mean zero and variance one over its last axis."""
    centred = write.op("Sub", rows, _last_mean(write, rows))
    variance = _last_mean(write, write.op("Mul", centred, centred))
    return write.op("Div", centred, write.op("Sqrt", write.op("Add", variance, write.number(epsilon))))


def _last_mean(write: Rewriter, x: str) -> str:
    if write.opset < 18:
        return write.op("ReduceMean", x, axes=[-1])
    return write.op("ReduceMean", x, write.integers(-1))


def _affine(write: Rewriter, rows: str, scale: str, bias: str) -> str:
    one = write.integers(1)
    scaled = write.op("Mul", rows, write.op("Unsqueeze", scale, one))
    return write.op("Add", scaled, write.op("Unsqueeze", bias, one))


def _instance_norm(write: Rewriter, node: onnx.NodeProto) -> None:
    x, scale, bias = node.input
    rows = write.op("Reshape", x, write.integers(0, 0, -1))
    normalized = _normalized(write, rows, attributes(node).get("epsilon", 1e-5))
    write.op("Reshape", _affine(write, normalized, scale, bias), write.op("Shape", x), output=node.output[0])


def _group_norm(write: Rewriter, node: onnx.NodeProto) -> None:
    x, scale, bias = node.input
    values = attributes(node)
    rows = write.op("Reshape", x, write.integers(0, values["num_groups"], -1))
    normalized = _normalized(write, rows, values.get("epsilon", 1e-5))
    if write.opset >= 21:  # from then on scale and bias are by channel, not by group
        by_channel = write.op("Concat", write.op("Shape", x, end=2), write.integers(-1), axis=0)
        normalized = write.op("Reshape", normalized, by_channel)
    write.op("Reshape", _affine(write, normalized, scale, bias), write.op("Shape", x), output=node.output[0])


def _extreme(write: Rewriter, node: onnx.NodeProto) -> None:
    """A maximum or minimum as the mean of the values that attain it, which share its gradient."""
    values = attributes(node)
    x, *axes = node.input
    if "axes" in values:
        axes = [write.integers(*values["axes"])]
    kept = {"axes": values["axes"]} if "axes" in values else {}
    inputs = [x] if kept else list(node.input)
    noop = {"noop_with_empty_axes": values["noop_with_empty_axes"]} if "noop_with_empty_axes" in values else {}
    attained = write.op("Equal", x, write.op(node.op_type, *inputs, keepdims=1, **kept, **noop))
    _mean_where(write, node, attained, lambda y: write.op("ReduceSum", y, *axes, keepdims=values.get("keepdims", 1)))


def _global_max(write: Rewriter, node: onnx.NodeProto) -> None:
    attained = write.op("Equal", node.input[0], write.op("GlobalMaxPool", node.input[0]))
    _mean_where(write, node, attained, lambda y: write.op("GlobalAveragePool", y))


def _mean_where(write: Rewriter, node: onnx.NodeProto, attained: str, reduced: Callable[[str], str]) -> None:
    values = write.op("Where", attained, node.input[0], write.number(0))
    count = write.op("Cast", attained, to=onnx.TensorProto.FLOAT)
    write.op("Div", reduced(values), reduced(count), output=node.output[0])


def _split(write: Rewriter, node: onnx.NodeProto) -> None:
    """Slices instead: a part that gradients do not pass would shift the gradients of the others."""
    if all(name in write.active for name in node.output):
        write.keep(node)
        return
    axis = attributes(node).get("axis", 0)
    ends = list(accumulate(_parts(write, node, axis), initial=0))
    for name, (start, stop) in zip(node.output, pairwise(ends), strict=True):
        if name:
            bounds = (write.integers(start), write.integers(stop), write.integers(axis))
            write.op("Slice", node.input[0], *bounds, output=name)


def _parts(write: Rewriter, node: onnx.NodeProto, axis: int) -> list[int]:
    if len(node.input) > 1 and node.input[1]:
        sizes = write.value(node.input[1])
        if sizes is not None:
            return [int(size) for size in sizes]
    else:
        size = (write.shape(node.input[0]) or {axis: None})[axis]
        if size is not None:
            part, last = -(-size // len(node.output)), len(node.output) - 1
            return [part] * last + [size - part * last]
    raise ModelError(f"the sizes of the parts of Split '{node.name or node.output[0]}' are unknown.")


def _where(write: Rewriter, node: onnx.NodeProto) -> None:
    """Both values in their full shape: gradients of a broadcast one are not summed."""
    whole = write.op("Shape", write.op("Where", *node.input))
    values = [write.op("Expand", name, whole) if name in write.active else name for name in node.input[1:]]
    write.op("Where", node.input[0], *values, output=node.output[0])


def _dropout(write: Rewriter, node: onnx.NodeProto) -> None:
    training = write.value(node.input[2]) if len(node.input) > 2 and node.input[2] else np.array(False)
    if training is None or training or len([name for name in node.output if name]) > 1:
        write.keep(node)
    else:
        write.op("Identity", node.input[0], output=node.output[0])


def _padded(write: Rewriter, node: onnx.NodeProto) -> None:
    """A window with explicit pads: the gradient takes automatic ones for none."""
    values = attributes(node)
    kind = values.get("auto_pad", b"NOTSET")
    if kind in (b"NOTSET", b""):
        write.keep(node)
        return
    sizes = [size for size in (write.shape(node.input[0]) or ())[2:] if size is not None]
    kernel = values.get("kernel_shape") or (write.shape(node.input[1]) or ())[2:]
    if not kernel or len(sizes) != len(kernel):
        raise ModelError(f"the pads of {node.op_type} '{node.name or node.output[0]}' depend on an unknown size.")
    ones = [1] * len(kernel)
    strides, dilations = values.get("strides", ones), values.get("dilations", ones)
    pairs = [_pads(kind, *axis) for axis in zip(sizes, kernel, strides, dilations, strict=True)]
    write.keep(node, auto_pad=None, pads=[pair[0] for pair in pairs] + [pair[1] for pair in pairs])


def _pads(kind: bytes, size: int, kernel: int, stride: int, dilation: int) -> tuple[int, int]:
    if kind == b"VALID":
        return 0, 0
    total = max((-(-size // stride) - 1) * stride + (kernel - 1) * dilation + 1 - size, 0)
    small, large = total // 2, total - total // 2
    return (small, large) if kind == b"SAME_UPPER" else (large, small)


def _layer_norm(write: Rewriter, node: onnx.NodeProto) -> None:
    """All three outputs and a bias: the gradient reads them."""
    x, scale, *bias = node.input
    whole = onnx.NodeProto()
    whole.CopyFrom(node)
    del whole.input[:], whole.output[:]
    zeros = () if any(bias) else (write.op("ConstantOfShape", write.op("Shape", scale)),)
    whole.input.extend([x, scale, *(bias if any(bias) else zeros)])
    names = [*node.output, "", ""][:3]
    whole.output.extend(name or write.fresh("statistic") for name in names)
    write.keep(whole)


def _gelu(write: Rewriter, node: onnx.NodeProto) -> None:
    """The approximation spelled out: its gradient would be that of the exact function."""
    if attributes(node).get("approximate", b"none") == b"none":
        write.keep(node)
        return
    x = node.input[0]
    bent = write.op("Mul", write.op("Mul", x, x), write.number(0.044715 * sqrt(2 / pi)))
    inner = write.op("Mul", write.op("Add", bent, write.number(sqrt(2 / pi))), x)
    gate = write.op("Sigmoid", write.op("Mul", inner, write.number(2)))
    write.op("Mul", x, gate, output=node.output[0])


def _power(write: Rewriter, node: onnx.NodeProto) -> None:
    """The exponent as a float and the base in its full shape: the gradient takes both for given."""
    base, exponent = node.input
    value = write.value(exponent)
    if value is not None and value.dtype.kind in "iu":
        exponent = write.op("Cast", exponent, to=onnx.TensorProto.FLOAT)
    if value is None or value.ndim:
        base = write.op("Expand", base, write.op("Shape", write.op("Pow", *node.input)))
    write.op("Pow", base, exponent, output=node.output[0])


RULES: dict[str, Callable[[Rewriter, onnx.NodeProto], None]] = {
    FAKE_QUANTIZE: _fake_quantize,
    "AveragePool": _padded,
    "BatchNormalization": _batch_norm,
    "Conv": _padded,
    "Dropout": _dropout,
    "Elu": _elu,
    "Gelu": _gelu,
    "GlobalMaxPool": _global_max,
    "GroupNormalization": _group_norm,
    "HardSigmoid": _hard_sigmoid_node,
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
