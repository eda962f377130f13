"""Standard operators under the long name of their domain, which onnxruntime takes for the empty one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, parser
from prepared import assert_same_outputs, prepared

from models import BUILDERS, build, conv_net, feed_for, normal, op_types, run
from onnxcalib import evaluate, inspect, quantize
from onnxcalib.checks.check import check_file
from onnxcalib.model.constants import fold_constants
from onnxcalib.model.io import load, opset_of, read_model
from onnxcalib.model.layers import find_layers
from onnxcalib.model.quantized import read_quantized
from onnxcalib.model.walk import all_nodes
from onnxcalib.targets import find_target

LONG = "ai.onnx"


def long_named(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy with the long name wherever the empty one stood."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    nodes = [node for body in (copy.graph, *copy.functions) for node in all_nodes(body)]
    opsets = [entry for each in (copy, *copy.functions) for entry in each.opset_import]
    for named in (*nodes, *opsets):
        named.domain = named.domain or LONG
    return copy


def with_opsets(model: onnx.ModelProto, opsets: Sequence[tuple[str, int]]) -> onnx.ModelProto:
    del model.opset_import[:]
    model.opset_import.extend(helper.make_opsetid(*opset) for opset in opsets)
    return model


@pytest.mark.parametrize("builder", BUILDERS)
def test_layers_and_outputs_are_those_of_the_short_name(builder: str) -> None:
    model = BUILDERS[builder]()
    found = find_layers(prepared(long_named(model)))
    assert [(layer.name, layer.weight) for layer in found.layers] == [
        (layer.name, layer.weight) for layer in find_layers(prepared(model)).layers
    ]
    assert found.layers


@pytest.mark.parametrize("builder", ["conv_net", "transformer_block"])
def test_quantized_models_are_those_of_the_short_name(builder: str, tmp_path: Path) -> None:
    model = BUILDERS[builder]()
    onnx.save(long_named(model), tmp_path / "long.onnx")
    found = quantize(tmp_path / "long.onnx", feed_for(model)).model
    assert found.graph == quantize(model, feed_for(model)).model.graph
    assert "QuantizeLinear" in op_types(found)


def test_quantized_files_are_read(tmp_path: Path) -> None:
    plain, long = tmp_path / "plain.onnx", tmp_path / "long.onnx"
    model = conv_net()
    onnx.save(quantize(model, feed_for(model)).model, plain)
    onnx.save(long_named(load(plain)), long)
    target = find_target("ort")
    assert check_file(long, target) == check_file(plain, target)
    assert [layer.bits for layer in read_quantized(load(long)).layers] == ["w8a8"] * 5
    assert evaluate([long], feed_for(model), plain)[0].sqnr_db == np.inf


def test_branches_and_functions(tmp_path: Path) -> None:
    body = """net (float[N,3] x, bool go) => (float[N,4] y) {
        h = Gemm (x, w)
        y = If (go) <
            then_branch = inner () => (float[N,4] t) { [dense] t = MatMul (h, v) },
            else_branch = other () => (float[N,4] e) { e = Identity (h) }
        >
    }"""
    model = build(body, w=normal(3, 4), v=normal(4, 4))
    assert inspect(long_named(model)) == inspect(model)
    assert "dense" in [layer.name for layer in inspect(model).layers]
    text = """
    <ir_version: 8, opset_import: ["" : 15, "own" : 1]>
    net (float[N,2] x) => (float[N,2] y) <float[2,2] w = {1.0, -2.0, 0.5, 3.0}> { y = own.dense (x, w) }
    <opset_import: ["" : 15], domain: "own"> dense (a, m) => (r) { p = MatMul (a, m) r = Relu (p) }"""
    model = parser.parse_model(text)
    onnx.save(long_named(model), tmp_path / "long.onnx")
    assert inspect(tmp_path / "long.onnx") == inspect(model)
    assert len(inspect(model).layers) == 1


def test_a_model_without_the_long_name_is_read_as_it_stands(tmp_path: Path) -> None:
    model = conv_net()
    model.opset_import[0].ClearField("domain")
    model.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    onnx.save(model, tmp_path / "model.onnx")
    assert read_model(model).SerializeToString() == model.SerializeToString()
    assert load(tmp_path / "model.onnx").SerializeToString() == model.SerializeToString()


@pytest.mark.parametrize(
    "opsets", [[("", 12), (LONG, 13)], [(LONG, 13), ("", 12)], [("", 13), (LONG, 12)], [(LONG, 12), ("", 13)]], ids=str
)
def test_of_two_versions_that_of_onnxruntime_counts(opsets: list[tuple[str, int]]) -> None:
    """Softmax changed its meaning between the two."""
    model = build("net (float[N,3,2] x) => (float[N,3,2] y) { s = Softmax (x) y = MatMul (s, w) }", w=normal(2, 2))
    with_opsets(model, opsets)
    read = read_model(model)
    assert opset_of(read) == opsets[-1][1]
    assert len(read.opset_import) == 1
    assert_same_outputs(model, read)
    prepared(model)


@pytest.mark.parametrize("opsets", [[("", 12)], [("own.ops", 20), ("", 12)]], ids=str)
def test_constants_are_folded_with_the_opset_of_the_standard_operators(opsets: list[tuple[str, int]]) -> None:
    """The first version that a model names may be that of other operators; from 13 on, Squeeze reads its axes."""
    text = "net (float[N,3] x) => (float[N,1] y) { v = Squeeze <axes=[0]> (w) y = MatMul (x, v) }"
    model = with_opsets(build(text, w=normal(1, 3, 1)), opsets)
    folded = read_model(model)
    fold_constants(folded)
    assert op_types(folded) == ["MatMul"]
    assert_same_outputs(model, folded)


def test_the_long_name_loads() -> None:
    """What all of this rests on: onnxruntime takes both names for one."""
    model = conv_net()
    feed = feed_for(model)
    np.testing.assert_array_equal(run(long_named(model), feed)["y"], run(model, feed)["y"])
