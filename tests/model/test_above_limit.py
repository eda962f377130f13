"""Tools that take a serialized model are handed little of a large one, as protobuf holds less than 2 GB."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import inliner, numpy_helper, parser, shape_inference, version_converter
from said import refused

from models import HAS_TRAINING, build, normal, run
from onnxcalib.autodiff.gradients import Gradients
from onnxcalib.errors import ModelError
from onnxcalib.model.branches import branch_model, find_branches
from onnxcalib.model.external import move_out
from onnxcalib.model.functions import inline_functions
from onnxcalib.model.io import check_bodies
from onnxcalib.model.opset import raise_opset
from onnxcalib.recipe import Engine
from onnxcalib.runtime import opening, trial
from onnxcalib.runtime.bound import BoundSession
from onnxcalib.runtime.optimized import optimized

WIDE, LIMIT = 520, 100_000  # a matrix of so many rows and columns takes more than a megabyte; bytes that tools take
FUNCTION = """<ir_version: 8, opset_import: ["" : 17, "loc" : 1]>
net (float[N,520] x) => (float[N,520] y) { a = MatMul (x, w)  y = loc.soft (a) }
<domain: "loc", opset_import: ["" : 17]> soft (a) => (b) { b = Softplus (a) }"""


@pytest.fixture(autouse=True)
def small_protobuf(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tools that fail on larger models."""
    for module, name in (
        (shape_inference, "infer_shapes"),
        (inliner, "inline_local_functions"),
        (version_converter, "convert_version"),
    ):
        monkeypatch.setattr(module, name, _limited(getattr(module, name)))


def _limited(tool: Callable[..., Any]) -> Callable[..., Any]:
    def limited(model: onnx.ModelProto, *given: Any, **named: Any) -> Any:
        assert model.ByteSize() < LIMIT, "protobuf would not write this"
        return tool(model, *given, **named)

    return limited


def weight() -> np.ndarray[Any, np.dtype[np.float32]]:
    return normal(WIDE, WIDE, scale=0.05)


@pytest.mark.parametrize("as_numbers", [False, True])
def test_functions_are_inlined_beside_large_weights(as_numbers: bool) -> None:
    model = parser.parse_model(FUNCTION)
    if as_numbers:  # as some exporters write them
        model.graph.initializer.append(onnx.helper.make_tensor("w", 1, [WIDE, WIDE], weight().reshape(-1)))
    else:
        model.graph.initializer.append(numpy_helper.from_array(weight(), "w"))
    inlined = inline_functions(model, "it")
    assert [node.op_type for node in inlined.graph.node] == ["MatMul", "Softplus"]
    np.testing.assert_array_equal(numpy_helper.to_array(inlined.graph.initializer[0]), weight())


def test_opsets_are_raised_beside_large_weights() -> None:
    model = build("net (float[N,520] x) => (float[N,520] y) { a = MatMul (x, w) y = Softmax (a) }", 11, w=weight())
    feed = {"x": normal(2, WIDE)}
    raised = raise_opset(model, 13, "it")
    before = build("net (float[N,520] x) => (float[N,520] y) { a = MatMul (x, w) y = Softmax (a) }", 11, w=weight())
    np.testing.assert_allclose(run(raised, feed)["y"], run(before, feed)["y"], rtol=1e-5)


def branching(**stored: np.ndarray[Any, Any]) -> onnx.ModelProto:
    """An If whose branch reads a large weight, and leaves out what type it gives."""
    model = build(
        "net (float[2,520] x, bool c) => (float[2,520] y) {"
        "[if] y = If (c) <then_branch = g1 () => (float[2,520] p) { [dot] p = MatMul (x, w) },"
        " else_branch = g2 () => (float[2,520] q) { q = Relu (x) }> }",
        **stored,
    )  # fmt: skip
    for attribute in model.graph.node[0].attribute:
        attribute.g.output[0].ClearField("type")
    return model


def test_types_in_branches_are_inferred_without_large_weights() -> None:
    model = branching(w=weight())
    (branch,) = find_branches(model)
    (output,) = branch_model(model, branch).graph.output
    assert output.type.tensor_type.elem_type == onnx.TensorProto.FLOAT
    assert [dim.dim_value for dim in output.type.tensor_type.shape.dim] == [2, WIDE]


def test_bodies_that_no_message_could_hold_are_refused() -> None:
    model = branching()
    body = next(attribute.g for attribute in model.graph.node[0].attribute if attribute.name == "then_branch")
    check_bodies(model, "it", LIMIT)
    body.initializer.append(numpy_helper.from_array(weight(), "w"))
    with refused(ModelError, "it"):
        check_bodies(model, "it", LIMIT)


def test_models_are_tried_once_whatever_bodies_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[onnx.ModelProto] = []

    def note(model: onnx.ModelProto) -> tuple[str | None, str]:
        tried.append(model)
        return trial.LEVELS[0], ""

    monkeypatch.setattr(trial, "_tried", note)
    monkeypatch.setattr(trial, "_FOUND", {})
    for seed, kind in ((0, np.float32), (1, np.float32), (1, np.float64)):
        model = branching()
        for attribute in model.graph.node[0].attribute:
            if attribute.name == "then_branch":
                attribute.g.initializer.append(numpy_helper.from_array(normal(9, 9, seed=seed).astype(kind), "w"))
        trial.try_levels(model)
    assert len(tried) == 2  # values make no difference, types do
    model.graph.node[0].attribute[0].g.node[0].op_type = "Tanh"
    trial.try_levels(model)
    assert len(tried) == 3


def loss() -> onnx.ModelProto:
    return build(
        "net (float[N,520] x, float[520] s) => (float loss) {"
        "a = MatMul (x, w) b = Mul (a, s) c = Sigmoid (b) loss = ReduceMean <keepdims=0> (c) }",
        w=weight(),
    )


@pytest.mark.parametrize("engine", [Engine.STANDARD, Engine.TRAINING])
@pytest.mark.parametrize("outside", [False, True])
def test_losses_with_large_weights_are_differentiated(
    engine: Engine, outside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if engine is Engine.TRAINING:
        if not HAS_TRAINING:
            pytest.skip("needs onnxruntime-training-cpu")
        from onnxruntime.capi import _pybind_state as training

        builder = training.GradientGraphBuilder

        def limited(content: bytes, *given: Any) -> Any:
            assert len(content) < LIMIT, "protobuf would not write this"
            return builder(content, *given)

        monkeypatch.setattr(training, "GradientGraphBuilder", limited)
    model, feed, start = loss(), {"x": normal(3, WIDE)}, {"s": normal(WIDE, seed=1)}
    if outside:
        move_out(model)
        assert model.ByteSize() < LIMIT
    gradients = Gradients(model, start, engine)
    found = gradients.run(feed)
    sums = feed["x"].astype(np.float64) @ weight()
    sigmoid = 1 / (1 + np.exp(-sums * start["s"]))
    assert found == pytest.approx(sigmoid.mean(), rel=1e-5)
    expected = (sigmoid * (1 - sigmoid) * sums).sum(0) / sigmoid.size
    np.testing.assert_allclose(gradients.gradients["s"], expected, rtol=1e-3, atol=1e-7)


@pytest.mark.parametrize("outside", [False, True])
def test_training_sessions_open_models_of_any_size(outside: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Above the limit all goes through files; what lies in one is not read into the model's bytes."""
    handed: list[bytes | Path] = []
    original = opening.open_session

    def noted(model: bytes | Path, *given: Any, **named: Any) -> Any:
        handed.append(model)
        return original(model, *given, **named)

    monkeypatch.setattr("onnxcalib.runtime.handing.open_session", noted)
    model = loss()
    if outside:
        move_out(model)
    feed = {"x": normal(3, WIDE), "s": normal(WIDE, seed=1)}
    found = BoundSession(model, 1, LIMIT).run("loss", feed)
    assert found == pytest.approx(float(run(loss(), feed)["loss"]), rel=1e-5)
    (given,) = handed
    assert len(given) < LIMIT if isinstance(given, bytes) else not given.exists()
    assert isinstance(given, bytes) is outside


def test_what_the_runtime_optimizes_is_written_without_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "net.onnx"
    onnx.save(build("net (float[N,520] x) => (float[N,520] y) { a = Relu (x) y = MatMul (a, w) }", w=weight()), path)
    sizes = []
    original = onnx.load

    def noted(file: str, *given: Any, **named: Any) -> onnx.ModelProto:
        sizes.append(Path(file).stat().st_size)
        return original(file, *given, **named)

    monkeypatch.setattr(onnx, "load", noted)
    assert "MatMul" in {node.op_type for node in optimized(path).graph.node}
    assert sizes[-1] < LIMIT
