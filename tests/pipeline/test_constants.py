"""Large constants beside layers: stored as integers, computed with in float, and what the file computes with them."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import pytest
from command_line import said_by
from onnx import TensorProto, helper, numpy_helper

from models import Arrays, build, initializer, normal, op_types, optimized_ops, run
from onnxcalib import Pipeline, Recipe, inspect, quantize
from onnxcalib.checks.check import check_model, matters
from onnxcalib.model.quantized import bytes_by_kind
from onnxcalib.model.short_names import with_short_names
from onnxcalib.model.walk import all_nodes
from onnxcalib.numerics.quant_params import dequantize
from onnxcalib.targets import NAMES, Constants, find_target


def recurrent(op: str = "GRU") -> onnx.ModelProto:
    """An embedding, a recurrent cell in two directions, and a head."""
    gates = {"LSTM": 4, "GRU": 3, "RNN": 1}[op]
    text = f"""net (int64[N,6] ids) => (float[6,N,8] y) {{
        [embed] e = Gather (table, ids)
        [turn] t = Transpose <perm=[1,0,2]> (e)
        [cell] h, last = {op} <hidden_size=32, direction="bidirectional"> (t, w, r)
        [join] j = Transpose <perm=[0,2,1,3]> (h)
        [flat] f = Reshape (j, shape)
        [head] y = MatMul (f, wo)
    }}"""
    return build(
        text, table=normal(200, 64), w=normal(2, gates * 32, 64, scale=0.1), r=normal(2, gates * 32, 32, scale=0.1),
        shape=np.array([6, -1, 64]), wo=normal(64, 8),
    )  # fmt: skip


def ids(samples: int = 8) -> Arrays:
    return {"ids": np.random.default_rng(1).integers(0, 200, (samples, 6))}


def size(model: onnx.ModelProto) -> int:
    return len(model.SerializeToString())


def decibels(expected: np.ndarray, found: np.ndarray) -> float:
    noise = float(((expected.astype(np.float64) - found) ** 2).sum())
    return math.inf if noise == 0 else 10 * math.log10(float((expected.astype(np.float64) ** 2).sum()) / noise)


@pytest.mark.parametrize("op", ["LSTM", "GRU", "RNN"])
def test_recurrent_weights_and_embeddings_are_stored_as_int8(op: str, tmp_path: Path) -> None:
    model = recurrent(op)
    result = quantize(model, ids(), Recipe())
    onnx.checker.check_model(result.model, full_check=True)
    assert set(result.plan.constants) == {"table", "w", "r"}
    assert size(result.model) < 0.4 * size(model)
    assert decibels(run(model, ids())["y"], run(result.model, ids())["y"]) > 25
    # Rows are looked up as they are stored, and all else is float once the model is loaded.
    left = Counter(optimized_ops(result.model, tmp_path))
    assert left["DequantizeLinear"] <= 1
    assert left["Gather"] == 2
    assert left["Cast"] == 1


def test_the_file_computes_with_the_values_of_the_plan() -> None:
    model = recurrent()
    result = quantize(model, ids(), Recipe())
    rounded = onnx.ModelProto()
    rounded.CopyFrom(model)
    for tensor in rounded.graph.initializer:
        if tensor.name in result.plan.constants:
            it = result.plan.constants[tensor.name]
            values = dequantize(it.quantized, it.qparams)
            assert decibels(numpy_helper.to_array(tensor), values) > 35
            tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))
    # What both know of the cell's result is the same to the last bit.
    for each in (rounded, result.model):
        each.graph.output.append(helper.make_tensor_value_info("last", TensorProto.FLOAT, None))
    assert np.array_equal(run(rounded, ids())["last"], run(result.model, ids())["last"])


def test_a_head_that_shares_the_table_is_stored_once() -> None:
    text = """net (int64[N,4] ids) => (float[N,4,300] y) {
        [embed] e = Gather (table, ids)
        [turn] t = Transpose <perm=[1,0]> (table)
        [act] a = Tanh (e)
        [head] y = MatMul (a, t)
    }"""
    model, feed = build(text, table=normal(300, 48)), {"ids": np.random.default_rng(0).integers(0, 300, (8, 4))}
    result = quantize(model, feed, Recipe())
    integers = [tensor for tensor in result.model.graph.initializer if tensor.data_type == TensorProto.INT8]
    assert [list(tensor.dims) for tensor in integers if len(tensor.dims) == 2] == [[300, 48]]
    assert size(result.model) < 0.35 * size(model)
    assert decibels(run(model, feed)["y"], run(result.model, feed)["y"]) > 28


def test_a_weight_that_a_loop_reads_too_is_stored_once() -> None:
    body = helper.make_graph(
        [
            helper.make_node("MatMul", ["state", "weight"], ["product"], "inner"),
            helper.make_node("Tanh", ["product"], ["next"], "bend"),
            helper.make_node("Identity", ["go"], ["going"], "on"),
            helper.make_node("Identity", ["weight"], ["same"], "keep"),
        ],
        "body",
        [
            helper.make_tensor_value_info("step", TensorProto.INT64, []),
            helper.make_tensor_value_info("go", TensorProto.BOOL, []),
            helper.make_tensor_value_info("state", TensorProto.FLOAT, None),
            helper.make_tensor_value_info("weight", TensorProto.FLOAT, [64, 64]),
        ],
        [
            helper.make_tensor_value_info("going", TensorProto.BOOL, []),
            helper.make_tensor_value_info("next", TensorProto.FLOAT, None),
            helper.make_tensor_value_info("same", TensorProto.FLOAT, [64, 64]),
        ],
    )
    text = "net (float[N,64] x) => (float[N,64] y) { [first] a = MatMul (x, w) [act] t = Tanh (a) }"
    model = build(text, w=normal(64, 64, scale=0.1), n=np.array(3), true=np.array(True))
    model.graph.node.append(helper.make_node("Loop", ["n", "true", "t", "w"], ["y", "z"], "loop", body=body))
    feed = {"x": normal(8, 64)}
    result = quantize(model, feed, Recipe())
    assert [list(t.dims) for t in result.model.graph.initializer if t.data_type == TensorProto.INT8 and t.dims] == [
        [64, 64],
        [64],
    ]
    assert "FLOAT" not in [
        TensorProto.DataType.Name(t.data_type) for t in result.model.graph.initializer if math.prod(t.dims) > 1000
    ]
    assert [t.dims[0] for t in result.model.graph.initializer if t.data_type == TensorProto.FLOAT and t.dims] == [64]
    assert size(result.model) < 0.6 * size(model)
    assert decibels(run(model, feed)["y"], run(result.model, feed)["y"]) > 25


def test_constants_within_bodies_are_stored_there() -> None:
    def branch(name: str) -> onnx.GraphProto:
        values = numpy_helper.from_array(normal(1, 128, 32, seed=len(name), scale=0.1), f"{name}_w")
        nodes = [
            helper.make_node("Constant", [], [f"{name}_w"], f"{name}_constant", value=values),
            helper.make_node("LSTM", ["h", f"{name}_w", "r"], ["", f"{name}_last"], f"{name}_cell", hidden_size=32),
        ]
        return helper.make_graph(nodes, name, [], [helper.make_tensor_value_info(f"{name}_last", 1, None)])

    text = "net (float[5,N,16] x, bool c) => (float[1,N,32] y) { [first] h = MatMul (x, w) }"
    model = build(text, w=normal(16, 32), r=normal(1, 128, 32, scale=0.1))
    bodies = {"then_branch": branch("yes"), "else_branch": branch("no")}
    model.graph.node.append(helper.make_node("If", ["c"], ["y"], "choice", **bodies))
    feeds = [{"x": normal(5, 2, 16, seed=seed), "c": np.array(seed % 2 == 0)} for seed in range(4)]
    result = quantize(model, feeds, Recipe())
    onnx.checker.check_model(result.model, full_check=True)
    assert set(result.plan.constants) == {"r", "yes_w", "no_w"}
    assert size(result.model) < 0.5 * size(model)
    for feed in feeds[:2]:
        assert decibels(run(model, feed)["y"], run(result.model, feed)["y"]) > 25


def test_what_half_precision_holds_stays_exact_and_coordinates_stay_float() -> None:
    text = """net (float[N,8192] x) => (float[N,8192] y, float[N,4] z) {
        [half] h = Add (x, halves)
        [place] y = Add (h, places)
        [layer] z = MatMul (x, w)
    }"""
    halves = normal(8192).astype(np.float16).astype(np.float32)
    places = (np.arange(8192) / 7 * np.where(np.arange(8192) == 0, 1e6, 1)).astype(np.float32)
    model = build(text, halves=halves, places=places, w=normal(8192, 4, scale=0.01))
    result = quantize(model, {"x": normal(8, 8192)}, Recipe())
    assert set(result.plan.constants) <= {"places", "halves"}
    types = {tensor.name: tensor.data_type for tensor in result.model.graph.initializer if tensor.dims[:1] == [8192]}
    assert decibels(run(model, {"x": normal(2, 8192)})["y"], run(result.model, {"x": normal(2, 8192)})["y"]) > 40
    assert TensorProto.FLOAT not in types.values()


def test_exclude_keeps_a_constant_float(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = recurrent()
    result = quantize(model, ids(), Recipe(exclude=("cell",)))
    assert set(result.plan.constants) == {"table"}
    assert np.array_equal(initializer(result.model, "r"), initializer(model, "r"))
    onnx.save(model, tmp_path / "model.onnx")
    np.savez(tmp_path / "data.npz", **ids())
    paths = (str(tmp_path / "model.onnx"), "-c", str(tmp_path / "data.npz"), "-o", str(tmp_path / "out.onnx"))
    code, _, said = said_by(capsys, "quantize", *paths, "--exclude", "embed", "--report", str(tmp_path / "report.html"))
    assert code == 0, said
    assert "GRU" in said
    assert "<code>table</code>" not in (tmp_path / "report.html").read_text(encoding="utf-8").split('id="float"')[0]


def test_what_can_be_stored_is_listed_and_found_again(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    listed = {it.name: (it.op, it.float_bytes) for it in inspect(recurrent()).constants}
    assert listed == {"table": ("Gather", 51200), "w": ("GRU", 49152), "r": ("GRU", 24576)}
    result = quantize(recurrent(), ids(), Recipe())
    onnx.save(recurrent(), tmp_path / "model.onnx")
    assert "GRU" in said_by(capsys, "inspect", str(tmp_path / "model.onnx"))[1]
    kinds = bytes_by_kind(result.model)
    codes = sum(it.quantized.size for it in result.plan.constants.values()) + result.plan.layers["head"].quantized.size
    assert kinds["quantized weights"] == codes
    assert kinds["float constants"] == 0


@pytest.mark.parametrize("target", NAMES)
def test_targets_without_a_form_for_it_leave_constants_float(target: str) -> None:
    result = quantize(recurrent(), ids(), Recipe(target=target))
    folded = find_target(target).constants is Constants.FOLDED
    assert bool(result.plan.constants) is folded
    if not folded:
        assert np.array_equal(initializer(result.model, "r"), initializer(recurrent(), "r"))
    assert not matters(check_model(result.model, find_target(target))) or not folded


@pytest.mark.parametrize("pipeline", [Pipeline.LIGHT, Pipeline.ADVANCED])
def test_tuning_goes_with_stored_constants(pipeline: Pipeline) -> None:
    steps = {"steps": 5} if pipeline is Pipeline.ADVANCED else {}
    result = quantize(recurrent(), ids(16), Recipe(pipeline, **steps), workers=1)
    assert set(result.plan.constants) == {"table", "w", "r"}
    assert decibels(run(recurrent(), ids())["y"], run(result.model, ids())["y"]) > 25


def test_long_names_of_what_was_added_become_short() -> None:
    long = "a/very/long/name/that/some/exporter/made/of/all/the/scopes/around/a/node/" * 3
    text = """net (float[N,8,8,8] x) => (float[N,8,8,8] y) {
        [one] a = Conv <pads=[1,1,1,1]> (x, w1) [r1] b = Relu (a) [two] c = Conv <pads=[1,1,1,1]> (b, w2)
        [r2] d = Relu (c) [three] y = Conv <pads=[1,1,1,1]> (d, w3)
    }"""
    model = build(text, w1=normal(8, 8, 3, 3), w2=normal(8, 8, 3, 3), w3=normal(8, 8, 3, 3))
    for node in model.graph.node:
        node.name = long + node.name
        node.output[:] = [name if name == "y" else long + name for name in node.output]
        node.input[:] = [long + name if name in ("a", "b", "c", "d") else name for name in node.input]
    feed = {"x": normal(8, 8, 8, 8)}
    result = quantize(model, feed, Recipe())
    short = with_short_names(result.model, model)
    onnx.checker.check_model(short, full_check=True)
    assert size(short) < 0.75 * size(result.model)
    assert {long + name for name in ("one", "two", "three")} <= {node.name for node in short.graph.node}
    assert np.array_equal(run(short, feed)["y"], run(result.model, feed)["y"])


def test_names_stay_apart() -> None:
    result = quantize(recurrent(), ids(), Recipe())
    outputs = Counter(name for node in all_nodes(result.model.graph) for name in node.output if name)
    assert max(outputs.values()) == 1
    assert max(Counter(node.name for node in all_nodes(result.model.graph)).values()) == 1
    assert op_types(result.model).count("GRU") == 1


def cells_alone(width: int) -> onnx.ModelProto:
    text = f"""net (float[T,N,24] x) => (float[T,D,N,{width}] y) {{
        [cell] y, last = GRU <hidden_size={width}> (x, w, r)
    }}"""
    return build(text, w=normal(1, 3 * width, 24, scale=0.2), r=normal(1, 3 * width, width, scale=0.2))


def test_a_model_of_recurrent_cells_alone_is_stored(tmp_path: Path) -> None:
    model, feed, output = cells_alone(32), {"x": normal(6, 4, 24)}, tmp_path / "q.onnx"
    again = [quantize(model, feed, output=output, run_dir=tmp_path / "run") for _ in range(2)][-1]
    assert set(again.plan.constants) == {"w", "r"}
    assert not again.plan.layers
    assert output.stat().st_size < 0.4 * size(model)
    assert decibels(run(model, feed)["y"], run(output, feed)["y"]) > 35


def test_what_has_no_effect_on_cells_alone_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    onnx.save(cells_alone(32), tmp_path / "m.onnx")
    np.savez(tmp_path / "d.npz", x=normal(6, 4, 24))
    files = [tmp_path / "m.onnx", "-c", tmp_path / "d.npz", "-o", tmp_path / "q.onnx"]
    mixed = ["--pipeline", "light", "--bits", "w4a4,w8a8", "--compression", "0.2"]
    for more in (mixed, mixed[:2], ["--bits", "w4a8"], ["--exclude", "cell"], ["--target", "xnnpack"]):
        code, _, refused = said_by(capsys, "quantize", *files, *more)
        assert (code, "no layer" in refused) == (3, True)
    code, told, errors = said_by(capsys, "quantize", *files, "--report", tmp_path / "r.html")
    assert (code, "constants alone" in told + errors) == (0, True)
    onnx.save(cells_alone(4), tmp_path / "m.onnx")  # too small to gain by it
    code, _, refused = said_by(capsys, "quantize", *files)
    assert (code, "GRU" in refused) == (3, True)
