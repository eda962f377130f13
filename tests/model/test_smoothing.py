"""Channels scaled before products of matrices: where that is possible, and nothing changes for the float model."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest

from models import Arrays, build, normal, run
from onnxcalib.model.equalize import equalized_as
from onnxcalib.model.prepare import Model
from onnxcalib.model.read import read_prepared
from onnxcalib.model.smoothing import (
    METADATA,
    MOST,
    SiteKind,
    exponents_for,
    factors_of,
    find_sites,
    smoothed,
    smoothing_of,
)
from onnxcalib.targets import find_target

RMS = """
    [square] s = Mul (x, x)
    [mean] m = ReduceMean <axes=[-1]> (s)
    [plus] p = Add (m, eps)
    [root] r = Sqrt (p)
    [unit] u = Div (x, r)
    [norm] h = Mul (u, scale)
"""
LAYER = "[norm] h = LayerNormalization <axis=-1> (x, scale, shift)"
GATED = """
    [gate] g = MatMul (h, wg)
    [up] f = MatMul (h, wu)
    [upbias] fb = Add (f, bu)
    [sig] sg = Sigmoid (g)
    [silu] sl = Mul (g, sg)
    [product] gated = Mul (sl, fb)
    [down] d = MatMul (gated, wd)
"""


def attention(heads: int) -> str:
    """Four heads of queries; keys and values may have fewer, which are shared."""
    shared = "" if heads == 4 else "[wide] vw = Unsqueeze (v2, two)\n[more] vm = Expand (vw, five)\n"
    shared += "" if heads == 4 else "[flat] v3 = Reshape (vm, back)"
    return f"""
    [q] q = MatMul (h, wq)
    [v] v = MatMul (h, wv)
    [qs] q1 = Reshape (q, split)
    [qt] q2 = Transpose <perm=[0,2,1,3]> (q1)
    [kt] k2 = Transpose <perm=[0,2,3,1]> (q1)
    [vs] v1 = Reshape (v, vsplit)
    [vt] v2 = Transpose <perm=[0,2,1,3]> (v1)
    [size] size = Shape (v)
    {shared}
    [scores] a = MatMul (q2, k2)
    [soft] sm = Softmax <axis=-1> (a)
    [mix] mx = MatMul (sm, {"v2" if heads == 4 else "v3"})
    [mt] mt = Transpose <perm=[0,2,1,3]> (mx)
    [join] j = Reshape (mt, joined)
    [o] d = MatMul (j, wo)
    """


CONSTANTS: Arrays = {
    "eps": np.float32(1e-5), "scale": 1 + normal(8, scale=0.2), "shift": normal(8, seed=3), "wg": normal(8, 12),
    "wu": normal(8, 12, seed=1), "bu": normal(12), "wd": normal(12, 8), "wq": normal(8, 8), "wo": normal(8, 8, seed=2),
    "split": np.array([0, 0, 4, 2]), "joined": np.array([0, 0, 8]), "two": np.array([2]),
    "five": np.array([1, 1, 2, 1, 1]), "back": np.array([0, 4, -1, 2]),
}  # fmt: skip


def block(norm: str, body: str, tail: str = "[add] y = Add (x, d)", **more: Any) -> Model:
    text = f"net (float[N,T,8] x) => (float[N,T,8] y) {{ {norm} {body} {tail} }}"
    used = {name: value for name, value in {**CONSTANTS, **more}.items() if f"{name})" in text or f"{name}," in text}
    return read_prepared(build(text, opset=17, **used), find_target("ort"))


def values(heads: int) -> Arrays:
    return {"wv": normal(8, 2 * heads, seed=5), "vsplit": np.array([0, 0, heads, 2])}


CASES = {
    "rms, gated": (block(RMS, GATED), {"norm": SiteKind.NORM, "up": SiteKind.UP}),
    "layer norm, gated": (block(LAYER, GATED), {"norm": SiteKind.NORM, "up": SiteKind.UP}),
    "attention": (block(LAYER, attention(4), **values(4)), {"norm": SiteKind.NORM, "v": SiteKind.VALUES}),
    "shared heads": (block(RMS, attention(2), **values(2)), {"norm": SiteKind.NORM, "v": SiteKind.VALUES}),
}


@pytest.mark.parametrize("case", CASES)
def test_the_float_outputs_stay(case: str) -> None:
    model, expected = CASES[case]
    sites = find_sites(model)
    assert {site.name: site.kind for site in sites} == expected
    rng, feed = np.random.default_rng(0), {"x": normal(2, 5, 8)}
    before = run(model.proto, feed)["y"]
    for site in sites:
        exponents = rng.integers(-12, 12, site.channels)
        changed = smoothed(model, {site.name: exponents})
        shown = [onnx.helper.make_tensor_value_info(site.tensor, onnx.TensorProto.FLOAT, None)]
        tensors = []
        for each in (model, changed):
            proto = onnx.ModelProto()
            proto.CopyFrom(each.proto)
            proto.graph.output.extend(shown)
            tensors.append(run(proto, feed))
        np.testing.assert_allclose(tensors[1]["y"], before, rtol=1e-4, atol=1e-4)
        read = site.read(factors_of(exponents))
        np.testing.assert_allclose(tensors[1][site.tensor] * read, tensors[0][site.tensor], rtol=1e-4, atol=1e-5)


def test_a_file_tells_what_was_scaled() -> None:
    model, _ = CASES["rms, gated"]
    told = {site.name: exponents_for(np.exp2(np.linspace(-20, 20, site.channels))) for site in find_sites(model)}
    changed = smoothed(model, told)
    for name, exponents in smoothing_of(changed.proto).items():
        np.testing.assert_array_equal(exponents, told[name])
        assert np.abs(exponents).max() == MOST
    again = equalized_as(model, changed.proto)
    assert again.proto.graph == changed.proto.graph


@pytest.mark.parametrize("text", ["not json", "[1]", '{"norm": 5}', '{"norm": "!!"}'])
def test_metadata_of_others_is_left_alone(text: str) -> None:
    model, _ = CASES["rms, gated"]
    proto = onnx.ModelProto()
    proto.CopyFrom(model.proto)
    onnx.helper.set_model_props(proto, {METADATA: text})
    assert equalized_as(model, proto) is model


@pytest.mark.parametrize(
    ("norm", "body", "tail"),
    [
        (RMS, GATED, "[add] z = Add (h, d)\n [id] y = Identity (z)"),  # a residual reads the norm as well
        (RMS.replace("scale)", "r)"), GATED, "[add] y = Add (x, d)"),  # no constant to divide
    ],
)
def test_what_others_read_is_left_alone(norm: str, body: str, tail: str) -> None:
    assert [site.name for site in find_sites(block(norm, body, tail))] == ["up"]


def test_a_product_that_others_read_is_left_alone() -> None:
    tail = "[extra] e = MatMul (fb, wd)\n [sum] s2 = Add (d, e)\n [add] y = Add (x, s2)"
    assert [site.name for site in find_sites(block(RMS, GATED, tail))] == ["norm"]


def test_the_twin_of_an_embedding_is_left_alone() -> None:
    text = f"""net (int64[N,T] ids) => (float[N,T,9] y) {{
        [table] x = Gather (embedding, ids)
        {RMS}
        [head] y = MatMul (h, wh)
    }}"""
    table = normal(9, 8)
    for head, expected in ((table.T.copy(), []), (normal(8, 9, seed=4), ["norm"])):
        own = {name: CONSTANTS[name] for name in ("eps", "scale")}
        model = read_prepared(build(text, opset=17, embedding=table, wh=head, **own), find_target("ort"))
        assert [site.name for site in find_sites(model)] == expected
