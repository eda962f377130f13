"""What transformers are made of, whether it is one op or spelled out: norms, Gelu, SiLU and rotary positions."""

from __future__ import annotations

import enum
import math
from collections.abc import Iterator
from dataclasses import dataclass

import onnx

from onnxcalib.model.graph import GraphIndex

LAYER_NORMS = ("LayerNormalization", "SkipLayerNormalization", "EmbedLayerNormalization")
RMS_NORMS = ("RMSNormalization", "SimplifiedLayerNormalization", "SkipSimplifiedLayerNormalization")
GELUS = ("Gelu", "FastGelu", "BiasGelu", "QuickGelu")
MEANS = ("ReduceMean", "GlobalAveragePool")
NEAR = 1e-3  # of constants that exporters round differently


class Kind(enum.StrEnum):
    """What a pattern computes."""

    LAYER_NORM = "LayerNorm"
    RMS_NORM = "RMSNorm"
    GELU = "Gelu"
    SILU = "SiLU"
    ROPE = "RoPE"


@dataclass(frozen=True)
class Pattern:
    """Nodes that together compute one thing."""

    kind: Kind
    name: str  # of the last node
    input: str
    output: str
    nodes: tuple[str, ...]  # by name, in the order of the graph


@dataclass(frozen=True)
class Norm(Pattern):
    """A norm over the last axes, with the constants that it multiplies by and adds; None where there are none."""

    scale: str | None
    bias: str | None


def find_patterns(graph: onnx.GraphProto) -> tuple[Pattern, ...]:
    """Requires named nodes and constants as initialisers; in the order of the graph."""
    index = GraphIndex(graph)
    return tuple(found for node in graph.node if (found := _pattern(index, node)) is not None)


def find_norms(graph: onnx.GraphProto) -> tuple[Norm, ...]:
    """The norms among them."""
    return tuple(it for it in find_patterns(graph) if isinstance(it, Norm))


def _pattern(index: GraphIndex, node: onnx.NodeProto) -> Pattern | None:
    if node.op_type in (*LAYER_NORMS, *RMS_NORMS):
        return _norm_op(node)
    if node.op_type in GELUS:
        return Pattern(Kind.GELU, node.name, node.input[0], node.output[0], (node.name,))
    if node.op_type in ("Swish", "SiLU"):
        return Pattern(Kind.SILU, node.name, node.input[0], node.output[0], (node.name,))
    if node.op_type == "RotaryEmbedding":
        return Pattern(Kind.ROPE, node.name, node.input[0], node.output[0], (node.name,))
    if node.domain:
        return None
    spelled = {"Sqrt": _norm, "Erf": _gelu, "Tanh": _gelu, "Sigmoid": _silu, "Concat": _rope, "Add": _rotated}
    return spelled[node.op_type](index, node) if node.op_type in spelled else None


def _norm_op(node: onnx.NodeProto) -> Norm:
    """Skip norms have the second summand before their scale, embedding norms three tables."""
    first = {"SkipLayerNormalization": 2, "SkipSimplifiedLayerNormalization": 2, "EmbedLayerNormalization": 5}
    place = first.get(node.op_type, 1)
    scale, bias = (next(iter(node.input[at : at + 1]), "") or None for at in (place, place + 1))
    is_rms = node.op_type in RMS_NORMS
    kind = Kind.RMS_NORM if is_rms else Kind.LAYER_NORM
    return Norm(kind, node.name, node.input[0], node.output[0], (node.name,), scale, None if is_rms else bias)


def _norm(index: GraphIndex, root: onnx.NodeProto) -> Norm | None:
    """From the root of the mean square back to what was squared, and on to what is divided by it."""
    nodes = [root]
    square = _maker(index, root.input[0], ("Add",), nodes) or root
    mean = _maker(index, _computed(index, square) or "", MEANS, nodes)
    squared = _maker(index, mean.input[0], ("Pow", "Mul"), nodes) if mean is not None else None
    if squared is None or not (squared.op_type == "Pow" or squared.input[0] == squared.input[1]):
        return None
    centred = squared.input[0]
    minus = _maker(index, centred, ("Sub",), nodes)
    average = _maker(index, minus.input[1], MEANS, nodes) if minus is not None else None
    is_layer = minus is not None and average is not None and average.input[0] == minus.input[0]
    source = minus.input[0] if is_layer and minus is not None else centred
    unit = _divided(index, root.output[0], centred, nodes)
    if unit is None:
        return _folded_norm(index, root, source, average, nodes) if is_layer else None
    scale, result = _with_constant(index, unit, "Mul", nodes)
    bias, result = _with_constant(index, result, "Add", nodes) if scale else (None, result)
    return _as_norm(index, Kind.LAYER_NORM if is_layer else Kind.RMS_NORM, source, result, nodes, scale, bias)


def _divided(index: GraphIndex, root: str, centred: str, nodes: list[onnx.NodeProto]) -> str | None:
    """The tensor that was squared, divided by the root, or multiplied by its reciprocal."""
    for node in index.readers.get(root, []):
        if node.op_type == "Div" and list(node.input) == [centred, root]:
            nodes.append(node)
            return str(node.output[0])
        inverse = node.op_type == "Reciprocal" or (node.op_type == "Div" and node.input[0] in index.initializers)
        for product in index.readers.get(node.output[0], []) if inverse else []:
            if product.op_type == "Mul" and centred in product.input:
                nodes += [node, product]
                return str(product.output[0])
    return None


def _folded_norm(
    index: GraphIndex, root: onnx.NodeProto, source: str, average: onnx.NodeProto | None, nodes: list[onnx.NodeProto]
) -> Norm | None:
    """As Keras has it: a factor of root and scale, by which both the input and its mean are multiplied."""
    inverse = index.only_reader(root.output[0])
    if inverse is None or inverse.op_type not in ("Reciprocal", "Div") or average is None:
        return None
    nodes.append(inverse)
    scale, factor = _with_constant(index, inverse.output[0], "Mul", nodes)
    products = {name: node for node in index.readers.get(factor, []) if node.op_type == "Mul" for name in node.input}
    if source not in products or average.output[0] not in products:
        return None
    shift = index.only_reader(products[average.output[0]].output[0])
    total = index.only_reader(products[source].output[0])
    if shift is None or shift.op_type != "Sub" or total is None or shift.output[0] not in total.input:
        return None
    bias = shift.input[0] if shift.input[0] in index.initializers else None
    nodes += [products[source], products[average.output[0]], shift, total]
    return _as_norm(index, Kind.LAYER_NORM, source, total.output[0], nodes, scale, bias)


def _as_norm(
    index: GraphIndex, kind: Kind, source: str, result: str, nodes: list[onnx.NodeProto], scale: str | None,
    bias: str | None,
) -> Norm:  # fmt: skip
    names = {node.name for node in nodes}
    ordered = tuple(node.name for node in index.graph.node if node.name in names)
    return Norm(kind, index.producers[result].name, source, result, ordered, scale, bias)


def _gelu(index: GraphIndex, node: onnx.NodeProto) -> Pattern | None:
    """One plus an Erf or a Tanh, times the input and one half, in whatever order."""
    nodes, plus = [node], index.only_reader(node.output[0])
    if plus is None or plus.op_type != "Add" or _scalar_beside(index, plus) != 1.0:
        return None
    nodes.append(plus)
    sources, half, tensor = set(_sources(index, node.input[0], nodes)), False, str(plus.output[0])
    source: str | None = None
    while source is None or not half:
        product = index.only_reader(tensor)
        if product is None or product.op_type != "Mul":
            return None
        nodes.append(product)
        other = next((name for name in product.input if name != tensor), tensor)
        scaled = index.producers.get(other)
        if _scalar_beside(index, product) == 0.5:
            half = True
        elif other in sources:
            source = other
        elif scaled is not None and scaled.op_type == "Mul" and _scalar_beside(index, scaled) == 0.5:
            half, source = True, _computed(index, scaled)
            nodes.append(scaled)
        else:
            return None
        tensor = str(product.output[0])
    return _as_pattern(index, Kind.GELU, source, tensor, nodes)


def _sources(index: GraphIndex, tensor: str, nodes: list[onnx.NodeProto]) -> Iterator[str]:
    """What the argument of an Erf or a Tanh may be computed from, up to the input's cube."""
    todo = [tensor]
    for _ in range(12):
        if not todo:
            return
        name = todo.pop(0)
        yield name
        maker = index.producers.get(name)
        if maker is not None and maker.op_type in ("Mul", "Div", "Add", "Pow"):
            nodes.append(maker)
            todo += [source for source in maker.input if source not in index.initializers]


def _silu(index: GraphIndex, node: onnx.NodeProto) -> Pattern | None:
    """The input times its Sigmoid; QuickGelu has a factor in it."""
    product, nodes = index.only_reader(node.output[0]), [node]
    if product is None or product.op_type != "Mul":
        return None
    other, source = next((name for name in product.input if name != node.output[0]), ""), node.input[0]
    nodes.append(product)
    if other == source:
        return _as_pattern(index, Kind.SILU, source, product.output[0], nodes)
    scaled = _maker(index, source, ("Mul",), nodes)
    factor = None if scaled is None else _scalar_beside(index, scaled)
    if scaled is None or factor is None or abs(factor - 1.702) > NEAR or other not in scaled.input:
        return None
    return _as_pattern(index, Kind.GELU, other, product.output[0], nodes)


def _rope(index: GraphIndex, node: onnx.NodeProto) -> Pattern | None:
    """Two halves, or neighbours, turned: the difference and the sum of the same four factors, side by side."""
    nodes, factors, ops = [node], [], set()
    for name in node.input:
        apart = _maker(index, name, ("Unsqueeze",), nodes)
        part = _maker(index, name if apart is None else apart.input[0], ("Add", "Sub"), nodes)
        products = [] if part is None else [_maker(index, each, ("Mul",), nodes) for each in part.input]
        ops.add("" if part is None else part.op_type)
        factors.append({each for product in products if product is not None for each in product.input})
    if ops != {"Add", "Sub"} or len(factors) != 2 or factors[0] != factors[1] or len(factors[0]) != 4:
        return None
    sources = [_cut_from(index, name, nodes) for name in sorted(factors[0])]
    doubled = [name for name in sources if name is not None and sources.count(name) == 2]
    return _as_pattern(index, Kind.ROPE, doubled[0], node.output[0], nodes) if doubled else None


def _rotated(index: GraphIndex, node: onnx.NodeProto) -> Pattern | None:
    """The tensor times cosines, and its halves, swapped and one of them negated, times sines."""
    for first, second in (node.input, node.input[::-1]):
        nodes = [node]
        straight, turned = (_maker(index, name, ("Mul",), nodes) for name in (first, second))
        if straight is None or turned is None:
            return None
        swap = next((it for name in turned.input if (it := _maker(index, name, ("Concat",), nodes))), None)
        if swap is None or len(swap.input) != 2:
            continue
        negated = [it for name in swap.input if (it := _maker(index, name, ("Neg",), nodes))]
        names = {it.output[0]: it.input[0] for it in negated}
        sources = {_cut_from(index, names.get(name, name), nodes) for name in swap.input}
        source = sources.pop() if len(sources) == 1 and len(negated) == 1 else None
        if source is not None and source in straight.input:
            return _as_pattern(index, Kind.ROPE, source, node.output[0], nodes)
    return None


def _cut_from(index: GraphIndex, name: str, nodes: list[onnx.NodeProto]) -> str | None:
    """The tensor that this one is a part of; None where none is cut."""
    while (maker := _maker(index, name, ("Slice", "Split", "Squeeze", "Gather"), nodes)) is not None:
        if maker.op_type != "Squeeze":
            return str(maker.input[0])
        name = maker.input[0]
    return None


def _as_pattern(
    index: GraphIndex, kind: Kind, source: str | None, result: str, nodes: list[onnx.NodeProto]
) -> Pattern | None:
    if source is None:
        return None
    names = {node.name for node in nodes} & index.downstream([source])[1]
    ordered = tuple(node.name for node in index.graph.node if node.name in names)
    return Pattern(kind, index.producers[result].name, source, result, ordered)


def _maker(index: GraphIndex, name: str, ops: tuple[str, ...], nodes: list[onnx.NodeProto]) -> onnx.NodeProto | None:
    """The node that makes the tensor, if it is one of these ops; it is noted."""
    node: onnx.NodeProto | None = index.producers.get(name)
    if node is None or node.op_type not in ops or node.domain:
        return None
    nodes.append(node)
    return node


def _computed(index: GraphIndex, node: onnx.NodeProto) -> str | None:
    """The one input that is no constant."""
    names = [name for name in node.input if name and name not in index.initializers]
    return names[0] if len(names) == 1 else None


def _scalar_beside(index: GraphIndex, node: onnx.NodeProto) -> float | None:
    """The one number that a node adds to something, or multiplies it by."""
    for name in node.input:
        value = index.constant(name)
        if value is not None and value.size == 1 and math.isfinite(value.item()):
            return float(value.item())
    return None


def _with_constant(index: GraphIndex, tensor: str, op: str, nodes: list[onnx.NodeProto]) -> tuple[str | None, str]:
    """The constant that the only reader multiplies by or adds, and the result; none, and the tensor itself."""
    node = index.only_reader(tensor)
    constant = "" if node is None else next((name for name in node.input if name in index.initializers), "")
    if node is None or node.op_type != op or not constant or math.prod(index.initializers[constant].dims) < 2:
        return None, tensor
    nodes.append(node)
    return constant, str(node.output[0])
