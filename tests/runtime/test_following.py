"""What follows layers, run from border to border, held to the whole of it."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from models import build, feed_for, normal, run
from onnxcalib.model.subgraph import Cutter, with_outputs
from onnxcalib.runtime.following import Following


def two_outputs() -> onnx.ModelProto:
    """A chain with a branch around one of its layers, an output on the way, and a layer that only this one reads."""
    text = """
    net (float[N,2,3,3] x) => (float[N,2,3,3] early, float[N,2,3,3] y) {
        [one] a = Conv (x, w1)
        [relu] r = Relu (a)
        [two] b = Conv (r, w2)
        [side] early = Conv (r, w3)
        [sum] s = Add (r, b)
        [three] c = Conv (s, w4)
        [four] d = Conv (c, w5)
        [end] y = Sigmoid (d)
    }"""
    return build(text, **{f"w{place}": normal(2, 2, 1, 1, seed=place) for place in range(1, 6)})


@pytest.mark.parametrize("least", [1, 2, 99])
@pytest.mark.parametrize("tensor", ["a", "b", "early", "c", "d"])
def test_outputs_are_those_of_all_that_follows(tensor: str, least: int) -> None:
    model = two_outputs()
    known = run(with_outputs(model, ["a", "r", "b", "early", "c", "d"]), feed_for(model, 3))
    known[tensor] = known[tensor] + 1
    cutter = Cutter(model)
    rest, fed = cutter.after(tensor)
    expected = {} if rest is None else run(rest, {name: known[name] for name in (tensor, *fed)})
    found = Following(cutter, ["a", "b", "early", "c", "d"], least).open(tensor)(known)
    assert expected.keys() <= found.keys()
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, rtol=1e-5, atol=1e-6)
