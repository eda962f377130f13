"""Why a session fails: what the hint says for each cause, with the messages of real runtimes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

from models import build, normal
from onnxcalib.errors import ModelError, first_line
from onnxcalib.runtime.bound import BoundSession
from onnxcalib.runtime.opening import hint_for
from onnxcalib.runtime.optimized import optimized
from onnxcalib.runtime.session import Session

# As onnxruntime 1.19 and 1.31 say them, without what comes before and after.
MEMORY = [
    MemoryError("std::bad_alloc"),
    MemoryError(),
    RuntimeError("1 : FAIL : Exception during loading: std::bad_alloc"),
    RuntimeError("1 : FAIL : Load model from model.onnx failed:std::bad_alloc"),
    RuntimeError("6 : RUNTIME_EXCEPTION : Exception during initialization: bad allocation"),
    RuntimeError("6 : RUNTIME_EXCEPTION : bfc_arena.cc:376 Failed to allocate memory for requested buffer of size 14"),
]
UNSUPPORTED = [
    "1 : FAIL : ONNX Runtime only *guarantees* support for official onnx opset versions. Opset 28 is under development",
    "2 : INVALID_ARGUMENT : Failed to load model with error: model.cc:180 Unsupported model IR version: 12",
    '10 : INVALID_GRAPH : In Node, ("", Nope, "", -1), Error No Op registered for Nope with domain_version of 17',
    "1 : FAIL : Fatal error: com.microsoft:Nope(-1) is not a registered function/op",
    "9 : NOT_IMPLEMENTED : Could not find an implementation for Gemm(13) node with name ''",
    "2 : INVALID_ARGUMENT : Failed to load model with error: Invalid tensor data type 25.",
]
OTHERS = [
    "2 : INVALID_ARGUMENT : Invalid model. Node input 'nowhere' is not a graph input or output of a previous node.",
    "1 : FAIL : Node () Op (MatMul) [ShapeInferenceError] Incompatible dimensions for matrix multiplication",
    "7 : INVALID_PROTOBUF : Failed to load model because protobuf parsing failed.",
]


@pytest.mark.parametrize("error", MEMORY, ids=str)
def test_too_little_memory_is_told_as_that(error: Exception) -> None:
    hint = hint_for(error, "otherwise")
    assert "memory" in hint
    assert "newer" not in hint


@pytest.mark.parametrize("text", UNSUPPORTED)
def test_what_the_runtime_lacks_asks_for_a_newer_one(text: str) -> None:
    hint = hint_for(RuntimeError(text), "otherwise")
    assert "newer" in hint
    assert "memory" not in hint


@pytest.mark.parametrize("text", OTHERS)
def test_other_errors_have_the_callers_hint(text: str) -> None:
    assert hint_for(RuntimeError(text), "otherwise") == "otherwise"


def test_an_error_without_words_is_named() -> None:
    assert first_line(MemoryError()) == "MemoryError"
    assert first_line(RuntimeError("One.\nTwo.")) == "One"


def opened(way: str, model: onnx.ModelProto, folder: Path) -> None:
    if way == "file":
        onnx.save(model, folder / "model.onnx")
        optimized(folder / "model.onnx")
    else:
        Session(model, "a net") if way == "session" else BoundSession(model, 1)


WAYS = pytest.mark.parametrize("way", ["session", "file", "bound"])
NAMED = {"session": "a net", "file": "model.onnx", "bound": "loss"}


@WAYS
@pytest.mark.parametrize(("op", "opset"), [("Relu", 99), ("Nope", 17)])
def test_a_model_that_this_runtime_cannot_load(way: str, op: str, opset: int, tmp_path: Path) -> None:
    with pytest.raises(ModelError) as caught:
        opened(way, build(f"net (float[2,3] x) => (float[2,3] y) {{ y = {op} (x) }}", opset), tmp_path)
    assert "newer" in caught.value.hint
    assert NAMED[way] in caught.value.message
    assert "\n" not in str(caught.value)


@WAYS
def test_a_model_that_is_invalid_does_not_ask_for_another_runtime(way: str, tmp_path: Path) -> None:
    broken = build("net (float[2,3] x) => (float[2,3] y) { y = MatMul (x, w) }", w=normal(4, 3))
    with pytest.raises(ModelError) as caught:
        opened(way, broken, tmp_path)
    assert "runtime" not in caught.value.hint
    assert ("checker" in caught.value.hint) == (way != "bound")


def test_a_run_that_needs_too_much_memory() -> None:
    session = Session(build("net (float[1] x, int64[1] s) => (float[K] y) { y = Expand (x, s) }"))
    one = np.ones(1, np.float32)
    with pytest.raises(ModelError) as caught:
        session.run({"x": one, "s": np.array([2**50])})  # four petabytes
    assert "memory" in caught.value.hint
    with pytest.raises(ModelError) as caught:
        session.run({"x": np.ones(2, np.float32), "s": np.array([3])})
    assert "shapes" in caught.value.hint
