"""Adds nodes with bodies that hold layers and read tensors from outside: If, Loop and local functions."""

from __future__ import annotations

import numpy as np
from onnx import TensorProto, helper

from fuzzing.builder import Builder, Tensor
from fuzzing.elementwise import OTHERS
from fuzzing.shapes import SHAPES


def branch(b: Builder) -> bool:
    """An If whose branches work on captured tensors; their outputs have one shape."""
    x = b.pick(lambda t: t.rank in (2, 3, 4))
    if x is None or b.prefix.count("/") > 1 or len(b.nodes) > 60:
        return False
    condition = _condition(b)
    outputs = b.between(1, 5)
    bodies = [_body(b, x, outputs, number) for number in range(2)]
    shape = _made(x, outputs)
    b.add("If", [condition], shape, then_branch=bodies[0], else_branch=bodies[1])
    return True


def _condition(b: Builder) -> str:
    """Computed from the data, or a constant."""
    if b.chance(0.2):
        return b.constant(np.array(b.chance(0.5)))
    x = b.choose(b.tensors)
    total = b.silent("ReduceMax" if b.opset < 18 or b.chance(0.5) else "ReduceMean", [x.name], keepdims=0)
    return b.silent("Greater", [total, b.constant(float(b.choose([-1e3, 0.5, 1.0, 1e3])))])


def _made(x: Tensor, outputs: int) -> tuple[int | None, ...]:
    return (x.shape[0], outputs, *x.shape[2:]) if x.rank == 4 else (*x.shape[:-1], outputs)


def _body(b: Builder, x: Tensor, outputs: int, number: int) -> object:
    """A layer, and other ops before and after it, branches among them."""
    shared = {shape: [*names] for shape, names in b.weights.items()} if b.chance(0.3) else {}
    prefix = f"{b.prefix}{b.count[0]}_{number}/"
    inner = Builder(
        b.rng, b.opset, b.dtype, [x], weights=shared, prefix=prefix, plain_names=b.plain_names, count=b.count
    )
    x = _wandering(inner, x)
    if x.rank == 4:
        inputs = [x.name, inner.weight(outputs, x.inner[0], 1, 1, fan_in=x.inner[0])]
        made = inner.add("Conv", inputs, _made(x, outputs))
    else:
        features = x.shape[-1] or 1
        made = inner.add("MatMul", [x.name, inner.weight(features, outputs, fan_in=features)], _made(x, outputs))
    last = _wandering(inner, made)
    name = inner.silent("Identity", [last.name]) if b.chance(0.5) or last is x else last.name
    declared = helper.make_tensor_value_info(name, b.float_type, None if b.chance(0.5) else [*_declared(made)])
    b.noisy |= inner.noisy
    return helper.make_graph(inner.nodes, b.choose(["body", "then", ""]) or "g", [], [declared], inner.initializers)


def _wandering(inner: Builder, x: Tensor) -> Tensor:
    """Some ops on a tensor; what changes its shape is a dead end."""
    for _ in range(inner.between(0, 2)):
        inner.tensors = [x]
        if inner.choose([*OTHERS, *OTHERS, *SHAPES, branch])(inner) and inner.tensors[-1].shape == x.shape:
            x = inner.tensors[-1]
    return x


def _declared(x: Tensor) -> list[int | str]:
    return ["N" if size is None else size for size in x.shape]


def loop(b: Builder) -> bool:
    """A Loop that carries a tensor through a product with a captured weight."""
    x = b.pick(lambda t: t.rank in (2, 3))
    if x is None or b.prefix:
        return False
    features, trips = x.shape[-1] or 1, b.between(1, 3)
    weight = b.weight(features, features, fan_in=features)
    inner = Builder(b.rng, b.opset, b.dtype, [], prefix=f"{b.count[0]}_loop/", plain_names=b.plain_names, count=b.count)
    step, keep, carried = (inner.fresh(stem) for stem in ("i", "k", "h"))
    product = inner.silent("Tanh", [inner.silent("MatMul", [carried, weight])])
    result = inner.silent("Add", [product, x.name if b.chance(0.5) else carried])
    going = inner.silent("Identity", [keep])
    shape = [*_declared(x)] if b.chance(0.7) else None
    declared = [
        helper.make_tensor_value_info(step, TensorProto.INT64, []),
        helper.make_tensor_value_info(keep, TensorProto.BOOL, []),
        helper.make_tensor_value_info(carried, b.float_type, shape),
    ]
    results = [
        helper.make_tensor_value_info(going, TensorProto.BOOL, []),
        helper.make_tensor_value_info(result, b.float_type, shape),
    ]
    body = helper.make_graph(inner.nodes, "loop", declared, results, inner.initializers)
    inputs = [b.constant(np.array(trips, np.int64)), b.constant(np.array(True)), x.name]
    b.add("Loop", inputs, x.shape, body=body)
    return True


def function(b: Builder) -> bool:
    """A local function with a layer in it, of its own domain and perhaps another opset."""
    x = b.pick(lambda t: t.rank >= 2)
    if x is None or b.prefix or b.opset < 15:
        return False
    features, outputs = x.shape[-1] or 1, b.between(1, 6)
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["p"], name="product"),
        helper.make_node(b.choose(["Relu", "Sigmoid"]), ["p"], ["y"]),
    ]
    version = b.opset if b.chance(0.5) else b.choose([13, 15, 17])
    name = f"layer{len(b.functions)}"
    opset = [helper.make_opsetid("", version)]
    b.functions.append(helper.make_function("local", name, ["x", "w"], ["y"], nodes, opset))
    b.add(name, [x.name, b.weight(features, outputs, fan_in=features)], (*x.shape[:-1], outputs), domain="local")
    return True


def choice(b: Builder) -> bool:
    """The rows whose mean is large, and a layer on them: how many there are depends on rounding."""
    x = b.pick(lambda t: t.rank == 2)
    if x is None or b.prefix or b.opset < 11:
        return False
    features, outputs, inputs = x.inner[0], b.between(1, 5), [x.name]
    mean = b.silent("ReduceMean", inputs, keepdims=0, **b.axes(inputs, [1], 18))
    large = b.silent("Greater", [mean, b.constant(0.0)])
    if b.chance(0.5):
        rows = b.silent("Compress", [x.name, large], axis=0)
    else:
        places = [b.silent("NonZero", [large])]
        index = b.silent("Squeeze", places, **b.axes(places, [0], 13))
        rows = b.silent("Gather", [x.name, index], axis=0)
    made = b.silent("MatMul", [rows, b.weight(features, outputs, fan_in=features)])
    b.loose.append(Tensor(b.silent("Relu", [made]), (None, outputs)))
    return True


CONTROL = {branch: 1, loop: 0.4, function: 0.4, choice: 0.3}
