"""Odd but valid graphs are quantized by every pipeline, and what onnxruntime's optimizer dies of is not written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from command_line import call

from models import Arrays, build, feed_for, normal, run
from onnxcalib import Recipe, quantize
from onnxcalib.errors import OnnxcalibWarning
from onnxcalib.model import placement
from onnxcalib.recipe import Pipeline, RangeMethod, parse_bits
from onnxcalib.runtime.session import Session, refusal

VERSION = tuple(int(part) for part in onnxruntime.__version__.split(".")[:2])
W = {"w1": normal(4, 3, 3, 3, scale=0.4), "w2": normal(4, 4, 3, 3, scale=0.4), "m": normal(4, 4), "r": normal(3, 4)}
CONV = "net (float[N,3,8,8] x) => (float[N,4,6,6] y%s) { [one] a = Conv (x, w1)  [act] y = Relu (a)  %s }"
BRANCHED = """net (float[N,3,8,8] x, bool c) => (float[N,6,6,4] z) {
    [one] a = Conv (x, w1)
    y = Relu (a)
    i = Identity (y)
    t = Transpose <perm=[0,2,3,1]> (i)
    z = If (c) <
        then_branch = p () => (float[N,6,6,4] u) { u = MatMul (t, m) },
        else_branch = q () => (float[N,6,6,4] v) { v0 = MatMul (t, m)  v = Relu (v0) }
    >
}"""
ODD = {
    "dead layer": CONV % ("", "[dead] d = Conv (y, w2)"),
    "every layer reads an input": CONV % (", float[N,4,6,6] z", "[two] z = Conv (x, w1)"),
    "a weight and an input as outputs": CONV % (", float[4,3,3,3] w1, float[N,3,8,8] x", ""),
    "nodes named as outputs": CONV % (", float[N,4,4,4] z", "[y] z = Conv (y, w2)"),
    "a sequence and a size as outputs": CONV % (", int64[4] s", "q = SequenceConstruct (y, y)  s = Shape (y)"),
}
ODD[
    "an input that products of attention read as output"
] = """net (float[N,4,3] x) => (float[N,4,4] y, float[N,4,3] x) {
    t = Transpose <perm=[0,2,1]> (x)
    s = MatMul (x, t)
    p = Softmax <axis=2> (s)
    o = MatMul (p, x)
    q = MatMul (o, r)
    [one] y = MatMul (q, m)
}"""
PIPELINES = {
    "plain": Recipe(),
    "mixed": Recipe(pipeline=Pipeline.LIGHT, bits=parse_bits("w4a8,w8a8"), compression=9.0),
    "advanced": Recipe(pipeline=Pipeline.ADVANCED, steps=2),
}


def near(model: onnx.ModelProto, other: Any, feed: Arrays) -> None:
    expected, found = run(model, feed), run(other, feed)
    assert list(found) == list(expected)
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, atol=0.1 * np.abs(value).max())


@pytest.mark.parametrize("pipeline", PIPELINES)
@pytest.mark.parametrize("case", ODD)
def test_odd_graphs(case: str, pipeline: str) -> None:
    model = build(ODD[case], **W)
    feed = feed_for(model, 16)
    near(model, quantize(model, feed, PIPELINES[pipeline]).model, feed)


@pytest.mark.parametrize("opset", [17, 21, 23])
@pytest.mark.parametrize("target", ["xnnpack", "qonnx"])
def test_what_only_moves_after_a_layer(opset: int, target: str) -> None:
    text = "net (float[N,3,8,8] x) => (float[N,144] y) { a = Conv (x, w1)  y = Reshape (a, s) }"
    model, older = (build(text, each, 10, s=np.array([-1, 144]), **W) for each in (opset, 17))
    feed = feed_for(model, 8)
    told: list[Any] = []
    written = quantize(model, feed, Recipe(target=target), progress=Listening(told)).model
    assert not [event for event in told if event.name == "warning"]
    if target != "qonnx":
        near(older, written, feed)


def test_outputs_outlive_the_session() -> None:
    text = "net (float[N,4] x) => (float[N,4] y, float[64,64] k) { y = Relu (x)  k = Tanh (m) }"
    model = build(text, m=normal(64, 64))
    feed = feed_for(model, 2)
    found = [Session(model).run(feed)["k"] for _ in range(8)]
    for value in found:
        np.testing.assert_allclose(value, np.tanh(normal(64, 64)), rtol=1e-4)


class Listening:
    """Progress that keeps events."""

    def __init__(self, told: list[Any]) -> None:
        self.event = told.append

    def __call__(self, stage: str, done: int, total: int) -> None:
        """Nobody counts."""


def branch_feeds() -> list[Arrays]:
    return [{"x": normal(1, 3, 8, 8, seed=seed), "c": np.array(seed % 2 == 0)} for seed in range(8)]


def test_a_tensor_moved_into_branches(tmp_path: Path) -> None:
    """In a process of its own: an assertion of onnxruntime would end this one."""
    model, feeds = build(BRANCHED, **W), branch_feeds()
    onnx.save(model, tmp_path / "model.onnx")
    np.savez(tmp_path / "data.npz", x=np.concatenate([feed["x"] for feed in feeds]), c=np.array([True, False] * 4))
    for command in (["quantize", "-o", "q.onnx", "-c"], ["evaluate", "q.onnx", "--reference", "model.onnx", "-d"]):
        words = [*command, "data.npz"]
        done = call(*words[:1], *(["model.onnx"] if command[0] == "quantize" else []), *words[1:], cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert "Warning" not in done.stderr
    for feed in feeds[:2]:
        near(model, tmp_path / "q.onnx", feed)


def test_where_the_optimizer_dies_parts_stay_float_and_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "_moved", lambda *_: {})  # what keeps the optimizer from it
    model, told = build(BRANCHED, **W), list[Any]()
    with pytest.warns(OnnxcalibWarning, match="ORT_DISABLE_ALL"):
        result = quantize(model, branch_feeds(), progress=Listening(told))
    assert refusal(result.model, "it") is None
    assert ["'y'" in event.values["message"] for event in told if event.name == "warning"] == [True]
    assert len(result.plan.layers) == 3  # a shared tensor was enough
    for feed in branch_feeds()[:2]:
        near(model, result.model, feed)


def test_a_refusal_at_full_optimization_is_measured_at_less() -> None:
    """Signed quantizers that are moved across a Reshape, which newer runtimes give two types."""
    text = """net (float[N,3,8,8] x) => (float[N,144] y) {
        xq = QuantizeLinear (x, s, z)  xd = DequantizeLinear (xq, s, z)
        wd = DequantizeLinear (codes, s, z)
        a = Conv (xd, wd)
        aq = QuantizeLinear (a, s, z)  ad = DequantizeLinear (aq, s, z)
        y = Reshape (ad, to)
    }"""
    codes = np.random.default_rng(0).integers(-9, 9, (4, 3, 3, 3)).astype(np.int8)
    model = build(text, 21, 10, s=np.float32(0.1), z=np.int8(0), codes=codes, to=np.array([-1, 144]))
    why = refusal(model, "it")
    feed = feed_for(model, 2)
    if why is None:  # a runtime that does it well
        assert Session(model).run(feed)["y"].shape == (2, 144)
    else:
        with pytest.warns(OnnxcalibWarning, match="QuantizeLinear"):
            assert Session(model, "moved quantizers").run(feed)["y"].shape == (2, 144)


def test_a_network_deeper_than_the_stack() -> None:
    chain = " ".join(f"a{number + 1} = Add (a{number}, x)" for number in range(1050))
    text = f"net (float[N,4] x) => (float[N,4] y) {{ a0 = MatMul (x, m)  {chain}  y = MatMul (a1050, m) }}"
    model = build(text, m=normal(4, 4))
    assert len(quantize(model, feed_for(model, 4), Recipe(ranges=RangeMethod.MINMAX)).plan.layers) == 2


FROM_NORM = """net (float[2,4,5,5] x) => (float[2,5,4] y) {
    [axes] i = Constant <value_ints=[-1]> ()
    g = GroupNormalization <num_groups=1> (x, one4, zero4)
    r = ReduceL2 <keepdims=0> (g, i)
    t = Transpose <perm=[0,2,1]> (r)"""
FROM_INPUT = """net (float[N,T,4] x) => (float[N,T,4] y) {
    t = Identity (x)"""
ATTENTION = """
    q0 = MatMul (t, wq)  q = Add (q0, b)
    k0 = MatMul (t, wk)  k = Add (k0, b)
    v0 = MatMul (t, wv)  v = Add (v0, b)
    a = Attention <q_num_heads=4, kv_num_heads=4> (q, k, v)
    [out] y = MatMul (a, wo)
}"""


@pytest.mark.skipif(VERSION < (1, 23), reason="this onnxruntime has no Attention")
@pytest.mark.parametrize(("start", "shape"), [(FROM_NORM, (2, 4, 5, 5)), (FROM_INPUT, (2, 5, 4))])
def test_attention_of_sizes_that_are_known_at_run_time(start: str, shape: tuple[int, ...]) -> None:
    wide = {name: normal(4, 16, seed=seed) for seed, name in enumerate(("wq", "wk", "wv"))}
    norm = {"one4": np.ones(4, np.float32), "zero4": np.zeros(4, np.float32)} if start is FROM_NORM else {}
    model = build(start + ATTENTION, opset=23, ir=11, **wide, **norm, b=normal(16), wo=normal(16, 4))
    feed = {"x": normal(*shape)}
    near(model, quantize(model, [feed]).model, feed)
