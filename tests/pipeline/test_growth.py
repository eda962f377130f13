"""What must not grow with the number of layers: sessions, searches and walks over the graph."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import onnx
import pytest
from jobs import job_on

from models import build, norm_of, normal, run
from onnxcalib import Pipeline, Recipe, quantize
from onnxcalib.algorithms import rounding
from onnxcalib.model.graph import GraphIndex
from onnxcalib.model.prepare import prepare
from onnxcalib.pipeline.stages import sensitivities
from onnxcalib.pipeline.sweep import candidates_of
from onnxcalib.runtime import session

NODES = 5  # a layer's in the base model: two quantizers of two nodes each, and more


def chain(layers: int) -> onnx.ModelProto:
    """Convolutions with batch norm and Relu."""
    stored: dict[str, np.ndarray] = {}
    lines = []
    for i in range(layers):
        source = f"r{i - 1}" if i else "x"
        norm = f"n{i}"
        lines += [
            f"[conv{i}] c{i} = Conv ({source}, w{i})",
            f"[norm{i}] b{i} = BatchNormalization (c{i}, {norm}_gamma, {norm}_beta, {norm}_mean, {norm}_var)",
            f"[relu{i}] {'y' if i == layers - 1 else f'r{i}'} = Relu (b{i})",
        ]
        stored |= {f"w{i}": normal(4, 4, 1, 1, seed=i, scale=0.5), **norm_of(norm, 4, i)}
    body = "\n".join(lines)
    return build(f"net (float[N,4,2,2] x) => (float[N,4,2,2] y) {{\n{body}\n}}", **stored)


def unrolled(steps: int) -> onnx.ModelProto:
    """A recurrent network written out: every step reads the same weights."""
    lines = []
    for i in range(steps):
        state = f"h{i - 1}" if i else "x"
        lines += [
            f"[step{i}] m{i} = Gemm ({state}, w, b)",
            f"[act{i}] {'y' if i == steps - 1 else f'h{i}'} = Tanh (m{i})",
        ]
    body = "\n".join(lines)
    return build(f"net (float[N,6] x) => (float[N,6] y) {{\n{body}\n}}", w=normal(6, 6, scale=0.4), b=normal(6))


def counted(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> Counter[str]:
    """Counts the calls of a function."""
    counts: Counter[str] = Counter()
    whole = getattr(owner, name)

    def spy(*given: Any, **named: Any) -> Any:
        counts[name] += 1
        return whole(*given, **named)

    monkeypatch.setattr(owner, name, spy)
    return counts


@pytest.mark.parametrize("pipeline", [Pipeline.PLAIN, Pipeline.LIGHT])
def test_sessions_and_walks_do_not_grow_with_layers(monkeypatch: pytest.MonkeyPatch, pipeline: Pipeline) -> None:
    found = []
    for layers in (3, 9):
        with monkeypatch.context() as patch:
            sessions = counted(patch, session, "open_model")
            walks = counted(patch, GraphIndex, "__init__")
            result = quantize(chain(layers), {"x": normal(8, 4, 2, 2)}, Recipe(pipeline))
            rounds = result.tuned.rounds if result.tuned is not None else 0
            found.append((sessions["open_model"], walks["__init__"], rounds))
    (few, short, once), (many, long, often) = found
    # A round of tuning measures, and tries two corrections.
    assert many - few <= 3 * max(often - once, 0)
    assert long - short <= 6 * max(often - once, 0)


def test_what_a_layer_takes_of_graphs_does_not_grow_with_layers_that_are_mixed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each layer has sessions of its own; what is indexed and opened for it must not be all that follows."""
    found = {}
    for layers in (40, 80):
        job = job_on(chain(layers), {"x": normal(8, 4, 2, 2)}, "w4a8,w8a8", compression=2.0)
        candidates = candidates_of(job)
        with monkeypatch.context() as patch:
            seen = nodes_seen(patch)
            assert sensitivities(job, candidates).probes == layers
        found[layers] = seen
    more = {what: (found[80][what] - found[40][what]) / 40 for what in found[40]}
    # What follows a layer is opened up to a border, of which the next is less than sixteen layers away.
    assert 0 < more["opened"] < 20 * NODES
    assert 0 < more["indexed"] < 30 * NODES


def nodes_seen(patch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts the nodes of graphs that are indexed, and of models that are opened."""
    seen: Counter[str] = Counter()
    indexed, opened = GraphIndex.__init__, session.Session.__init__

    def index(self: GraphIndex, graph: onnx.GraphProto) -> None:
        seen["indexed"] += len(graph.node)
        indexed(self, graph)

    def open_it(self: session.Session, model: onnx.ModelProto, *given: Any, **named: Any) -> None:
        seen["opened"] += len(model.graph.node)
        opened(self, model, *given, **named)

    patch.setattr(GraphIndex, "__init__", index)
    patch.setattr(session.Session, "__init__", open_it)
    return seen


def test_a_weight_is_searched_once_for_each_estimator_however_many_layers_share_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for steps in (2, 7):
        with monkeypatch.context() as patch:
            searches = counted(patch, rounding, "weight_qparams")
            result = quantize(unrolled(steps), {"x": normal(8, 6)}, Recipe())
        assert len(result.plan.layers) == steps
        assert searches["weight_qparams"] == 2  # mse and minmax


def test_a_tensor_is_searched_once_for_each_estimator(monkeypatch: pytest.MonkeyPatch) -> None:
    searches: Counter[str] = Counter()
    for method, whole in rounding.ESTIMATORS.items():

        def spy(*given: Any, method: str = method, whole: Any = whole) -> Any:
            searches[method] += 1
            return whole(*given)

        monkeypatch.setitem(rounding.ESTIMATORS, method, spy)
    result = quantize(chain(4), {"x": normal(8, 4, 2, 2)}, Recipe())
    grids = len({**result.plan.shared, **result.plan.inputs})
    assert 0 < searches["mse"] <= grids
    assert searches["percentile"] == searches["averaged"] == searches["mse"]


def test_norms_in_a_row_fold_into_one_layer() -> None:
    text = """
    net (float[N,3,4,4] x) => (float[N,5,4,4] y) {
        [conv] c = Conv (x, w)
        [add] a = Add (c, shift)
        [first] b = BatchNormalization (a, p_gamma, p_beta, p_mean, p_var)
        [second] y = BatchNormalization (b, q_gamma, q_beta, q_mean, q_var)
    }"""
    norms = {**norm_of("p", 5, 1), **norm_of("q", 5, 2)}
    model = build(text, w=normal(5, 3, 1, 1), shift=normal(1, 5, 1, 1), **norms)
    feed = {"x": normal(2, 3, 4, 4)}
    expected = run(model, feed)
    ready = prepare(model, "net").proto
    assert [node.op_type for node in ready.graph.node] == ["Conv"]
    np.testing.assert_allclose(run(ready, feed)["y"], expected["y"], rtol=1e-4, atol=1e-5)
