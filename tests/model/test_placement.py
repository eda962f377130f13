"""Where QDQ nodes go, before any range is known."""

from __future__ import annotations

import numpy as np
import pytest

from models import BUILDERS, build, conv_net, normal
from onnxcalib.model.layers import choose, find_layers
from onnxcalib.model.placement import InsertionPoints, find_insertion_points
from onnxcalib.model.prepare import Model
from onnxcalib.model.read import read_prepared
from onnxcalib.targets import find_target


def places_of(model: Model, target: str, exclude: tuple[str, ...] = ()) -> InsertionPoints:
    return find_insertion_points(model, choose(find_layers(model), (), exclude), find_target(target))


def placed(builder: str, target: str) -> InsertionPoints:
    return places_of(read_prepared(BUILDERS[builder](), find_target(target)), target)


def rows(places: InsertionPoints) -> list[tuple[str, tuple[str, ...], bool, str | None]]:
    return [(tensor.name, tensor.layers, tensor.shared, tensor.same_qparams_as) for tensor in places.tensors.values()]


# Tensor, the layers that read it, whether others read the quantized value too, and whose grid it keeps.
FUSED = {
    "conv_net": [
        ("x", ("stem",), False, None),
        ("r1", ("depth",), True, None),
        ("r2", ("project",), False, None),
        ("b3", (), True, None),
        ("s", ("head",), False, None),
        ("r4", (), True, None),
        ("p", (), True, None),
        ("f", ("fc",), True, "p"),
    ],
    "transformer_block": [
        ("x", ("query", "key", "value"), False, None),
        ("h", ("up",), False, None),
        ("u", ("down",), False, None),
    ],
    "conv_transpose": [("x", ("down",), False, None), ("r", ("up",), False, None), ("k", ("last",), False, None)],
    "branches": [
        ("x", ("stem",), False, None),
        ("r", ("left",), True, None),
        ("l", (), True, None),
        ("g", (), True, None),
        ("s", (), True, None),
        ("m", (), True, "r"),
        ("k", ("last",), False, None),
        ("y", (), True, None),
    ],
}


def test_tensors_know_the_bounds_of_the_activation_that_makes_them() -> None:
    text = """
    net (float[N,2,4,4] x, float top) => (float[N,2,2,2] y) {
        [a] c1 = Conv (x, w) r1 = Relu (c1)
        [b] c2 = Conv (r1, w) r2 = Clip (c2, one, six)
        [c] c3 = Conv (r2, w) r3 = Clip (c3, , six)
        [d] c4 = Conv (r3, w) r4 = Clip (c4, one, top)
        [e] c5 = Conv (r4, w) r5 = Clip (c5, one) m = MaxPool <kernel_shape=[2,2], strides=[2,2]> (r5)
        [f] y = Conv (m, w)
    }"""
    model = build(text, w=normal(2, 2, 1, 1), one=np.float32(-1), six=np.float32(6))
    tensors = places_of(read_prepared(model, find_target("ort")), "ort").tensors
    assert {name: tensor.bounds for name, tensor in tensors.items()} == {
        "x": (-np.inf, np.inf),
        "r1": (0, np.inf),
        "r2": (-1, 6),
        "r3": (-np.inf, 6),
        "r4": (-np.inf, np.inf),  # a bound is computed
        "r5": (-1, np.inf),
        "m": (-1, np.inf),  # the grid is that of r5
        "y": (-np.inf, np.inf),
    }


@pytest.mark.parametrize("builder", FUSED)
def test_the_ort_target_keeps_integers_between_integer_ops(builder: str) -> None:
    assert rows(placed(builder, "ort")) == FUSED[builder]


LAYER_INPUTS = {
    "conv_net": [("x", "stem"), ("r1", "depth"), ("r2", "project"), ("s", "head"), ("f", "fc")],
    "transformer_block": [("x", "query key value"), ("h", "up"), ("u", "down")],
    "branches": [("x", "stem"), ("r", "left"), ("k", "last")],
    "conv1d": [("x", "first"), ("r", "second")],
}


@pytest.mark.parametrize("builder", LAYER_INPUTS)
def test_the_paper_target_quantizes_what_layers_read(builder: str) -> None:
    expected = [(name, tuple(layers.split()), False, None) for name, layers in LAYER_INPUTS[builder]]
    assert rows(placed(builder, "paper")) == expected


@pytest.mark.parametrize("target", ["ort", "paper"])
@pytest.mark.parametrize("builder", BUILDERS)
def test_every_layer_reads_a_quantized_tensor(builder: str, target: str) -> None:
    model = read_prepared(BUILDERS[builder](), find_target(target))
    places = places_of(model, target)
    for layer in find_layers(model).layers:
        assert layer.name in places.group(layer).layers


def test_excluded_layers_read_and_make_float() -> None:
    model = read_prepared(conv_net(), find_target("ort"))
    places = places_of(model, "ort", exclude=("stem", "fc"))
    assert "x" not in places.tensors
    assert "f" not in places.tensors
    assert places.tensors["r1"].layers == ("depth",)


def test_nothing_after_the_last_layers_is_quantized() -> None:
    text = """net (float[N,3,6,6] x) => (float[N,4] y) {
        [one] c = Conv (x, w)
        p = GlobalAveragePool (c)
        f = Flatten (p)
        y = Sigmoid (f)
    }"""
    model = read_prepared(build(text, w=normal(4, 3, 3, 3)), find_target("ort"))
    assert list(places_of(model, "ort").tensors) == ["x", "c"]


def test_an_add_with_a_constant_stays_float() -> None:
    text = """net (float[N,3,6,6] x) => (float[N,2,4,4] y) {
        [one] c = Conv (x, w, b)
        a = Mul (c, k)
        [two] y = Conv (a, v)
    }"""
    model = build(text, w=normal(4, 3, 3, 3), b=normal(4), k=normal(4, 1, 1), v=normal(2, 4, 1, 1))
    tensors = places_of(read_prepared(model, find_target("ort")), "ort").tensors
    assert set(tensors) == {"x", "c", "a", "y"}
    assert tensors["a"].layers == ("two",)
    assert not tensors["a"].shared


@pytest.mark.parametrize("op", ["Add (c, x)", "Mul (x, c)", "Concat <axis=1> (c, x)"])
def test_an_integer_op_wants_all_its_inputs_quantized(op: str) -> None:
    channels = 6 if "Concat" in op else 3
    text = f"""net (float[N,3,6,6] x) => (float[N,2,6,6] y) {{
        [one] c = Conv (x, w)
        s = {op}
        [two] y = Conv (s, v)
    }}"""
    model = build(text, w=normal(3, 3, 1, 1), v=normal(2, channels, 1, 1))
    places = places_of(read_prepared(model, find_target("ort")), "ort")
    assert rows(places) == [
        ("x", ("one",), True, None), ("c", (), True, None), ("s", ("two",), False, None), ("y", (), True, None),
    ]  # fmt: skip
