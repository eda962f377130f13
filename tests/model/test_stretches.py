"""Stretches of a model, run one after the other, held to the whole."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import pytest

from models import BUILDERS, Arrays, build, feed_for, normal, run
from onnxcalib.model.layers import Layer, find_layers
from onnxcalib.model.prepare import Model
from onnxcalib.model.read import read_prepared
from onnxcalib.model.stretches import Stretches
from onnxcalib.model.subgraph import with_outputs
from onnxcalib.targets import find_target


def layers_of(model: onnx.ModelProto) -> tuple[Model, tuple[Layer, ...]]:
    ready = read_prepared(model, find_target("ort"))
    return ready, find_layers(ready).layers


def sums_of(model: onnx.ModelProto, layers: tuple[Layer, ...], most: int, feed: Arrays) -> dict[str, np.ndarray]:
    """What layers make where every stretch reads what earlier ones made, and nothing else."""
    known, found = dict(feed), {}
    for stretch, part in Stretches(model, layers, most):
        shown = with_outputs(part, [*stretch.makes, *(layer.summed for layer in stretch.layers)])
        made = run(shown, {name: known[name] for name in stretch.reads})
        found |= {layer.summed: made[layer.summed] for layer in stretch.layers}
        known |= {name: made[name] for name in stretch.makes}
    return found


@pytest.mark.parametrize("most", [1, 2, 3])
@pytest.mark.parametrize("builder", BUILDERS.values(), ids=BUILDERS)
def test_stretches_make_what_the_whole_makes(builder: Callable[[], onnx.ModelProto], most: int) -> None:
    model, layers = layers_of(builder())
    feed = feed_for(model.proto, 4)
    whole = run(with_outputs(model.proto, [layer.summed for layer in layers]), feed)
    found = sums_of(model.proto, layers, most, feed)
    assert found.keys() == whole.keys()
    for name, values in whole.items():
        np.testing.assert_allclose(found[name], values, rtol=1e-5, atol=1e-6)


def chain(layers: int) -> onnx.ModelProto:
    """Pairs of convolutions, around each of which its input is added again."""
    lines, weights, last = [], {}, "x"
    for place in range(0, layers, 2):
        lines += [
            f"[c{place}] a{place} = Conv ({last}, w{place})",
            f"[c{place + 1}] b{place} = Conv (a{place}, w{place + 1})",
            f"[s{place}] s{place} = Add ({last}, b{place})",
        ]
        last = f"s{place}"
        weights |= {f"w{place + more}": normal(2, 2, 1, 1, seed=place + more) for more in (0, 1)}
    lines.append(f"[end] y = Relu ({last})")
    return build(f"net (float[N,2,3,3] x) => (float[N,2,3,3] y) {{ {' '.join(lines)} }}", **weights)


def test_cuts_lie_where_one_tensor_crosses() -> None:
    model, layers = layers_of(chain(20))
    stretches = [stretch for stretch, _ in Stretches(model.proto, layers, 7)]
    assert [len(stretch.layers) for stretch in stretches] == [6, 6, 7, 1]
    assert [stretch.makes for stretch in stretches] == [("s4",), ("s10",), ("a18",), ()]
    places = [place for stretch in stretches for place in stretch.nodes]
    assert len(places) == len(set(places)) == 29  # neither the last sum nor the Relu is read by any layer


def test_few_layers_are_not_cut() -> None:
    model, layers = layers_of(chain(6))
    ((stretch, part),) = Stretches(model.proto, layers, 6)
    assert part is model.proto
    assert (stretch.layers, stretch.makes) == (layers, ())


def test_layers_stay_with_their_biases_and_integers_stay_integers() -> None:
    text = """
    net (float[N,3,4] x) => (float[N,3,4] y) {
        [one] m1 = MatMul (x, w1)
        [two] m2 = MatMul (x, w2)
        [bias1] s1 = Add (m1, b1)
        [bias2] s2 = Add (m2, b2)
        [most] best = ArgMax <axis = 2> (s1)
        [three] m3 = MatMul (s2, w3)
        [bias3] s3 = Add (m3, b3)
        [cast] c = Cast <to = 1> (best)
        [plus] p = Add (s3, c)
        [four] m4 = MatMul (p, w4)
        [bias4] y = Add (m4, b4)
    }"""
    given = {f"w{place}": normal(4, 4, seed=place) for place in (1, 2, 3, 4)}
    given |= {f"b{place}": normal(4, seed=9 + place) for place in (1, 2, 3, 4)}
    model, layers = layers_of(build(text, **given))
    parts = list(Stretches(model.proto, layers, 1))
    assert [[layer.name for layer in stretch.layers] for stretch, _ in parts] == [["one", "two"], ["three"], ["four"]]
    assert set(parts[0][0].makes) == {"best", "s2"}
    kinds = {value.name: value.type.tensor_type.elem_type for value in parts[0][1].graph.output}
    assert kinds["best"] == onnx.TensorProto.INT64
    feed = feed_for(model.proto, 5)
    whole = run(with_outputs(model.proto, ["y"]), feed)["y"]
    np.testing.assert_allclose(sums_of(model.proto, layers, 1, feed)["y"], whole, rtol=1e-5)
