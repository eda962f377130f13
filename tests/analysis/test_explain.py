"""Answers of explain on small made-up cases, and the comparison of two files."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from said import names, refused

from models import build, conv_net, feed_for, normal, run, transformer_block
from onnxcalib import ModelError, Precision, RangeMethod, Recipe, quantize
from onnxcalib.analysis.advice import FLOAT, advice, override
from onnxcalib.analysis.compare import compare, csv_rows
from onnxcalib.analysis.diagnose import diagnose_file
from onnxcalib.analysis.explain import Facts, Question, answer
from onnxcalib.analysis.layer_rows import layer_rows
from onnxcalib.model.layers import find_layers
from onnxcalib.model.qdq import write_qdq
from onnxcalib.model.quantized import read_quantized
from onnxcalib.model.read import read_prepared
from onnxcalib.model.subgraph import with_outputs
from onnxcalib.targets import find_target

MINMAX = Recipe(ranges=RangeMethod.MINMAX)


def facts_of(model: onnx.ModelProto, folder: Path, recipe: Recipe = MINMAX) -> Facts:
    quantize(model, feed_for(model, 16), recipe, output=folder / "out.onnx")
    return Facts.read(folder / "out.onnx")


def told(question: Question, facts: Facts) -> str:
    return "\n".join(answer(question, facts))


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of eight bits whose layer "project" has two, and the same file with eight everywhere."""
    folder = tmp_path_factory.mktemp("planted")
    model = conv_net()
    data = feed_for(model, 24)
    onnx.save(model, folder / "model.onnx")
    np.savez(folder / "data.npz", **data)
    ready = read_prepared(model, find_target("ort"))
    fine = quantize(model, data, MINMAX, output=folder / "fine.onnx")
    coarse = quantize(model, data, Recipe(bits=(Precision(2, 8),), ranges=RangeMethod.MINMAX))
    layers = {**fine.plan.layers, "project": coarse.plan.layers["project"]}
    plan = dataclasses.replace(fine.plan, layers=layers)
    onnx.save(write_qdq(ready, find_layers(ready).layers, plan, find_target("ort")), folder / "bad.onnx")
    return folder


def measured(folder: Path, name: str) -> Facts:
    facts = Facts.read(folder / name)
    listed, found = diagnose_file(facts.file, folder / "model.onnx", folder / "data.npz")
    return dataclasses.replace(facts, rows=layer_rows(facts.file, listed, found))


def test_the_planted_bad_layer_is_named_first(planted: Path) -> None:
    lines = answer(Question.ACCURACY, measured(planted, "bad.onnx"))
    names(lines[0], "project (w2a8)", "--override project=w8a8")


def test_one_more_bit_helps_the_planted_layer(planted: Path) -> None:
    lines = answer(Question.BITS, measured(planted, "bad.onnx"))
    names(lines[1], "project", "loss", "8 bytes more")  # 64 weights
    names(answer(Question.BITS, measured(planted, "fine.onnx"))[0], "8 bits")


def test_what_the_file_does_not_tell_says_what_to_add(planted: Path) -> None:
    facts = Facts.read(planted / "bad.onnx")
    for question in (Question.ACCURACY, Question.BITS):
        names(told(question, facts), "`model`", "`data`", "`report`")


def test_float_ops_are_named_with_their_reasons(tmp_path: Path) -> None:
    facts = facts_of(transformer_block(), tmp_path, dataclasses.replace(MINMAX, exclude=("scores",)))
    lines = told(Question.FLOAT, facts).splitlines()
    (scores,), (soft,) = ([line for line in lines if line.startswith(node)] for node in ("scores", "soft"))
    assert not any(line.startswith("mix") for line in lines)  # a product whose operands are quantized
    names(scores, "MatMul", "both operands are computed")
    names(soft, "Softmax", "no integer kernel")


def test_a_layer_that_was_left_out_says_so(tmp_path: Path) -> None:
    facts = facts_of(conv_net(), tmp_path, dataclasses.replace(MINMAX, exclude=("head",)))
    names(told(Question.FLOAT, facts), "head (Conv)", "left out")
    (weight,) = [line for line in told(Question.SIZE, facts).splitlines() if "float" in line and "w4" in line]
    names(weight, "512 bytes", "head")
    names(told(Question.SPEED, facts), "head")


def test_nothing_is_float_where_everything_fuses(planted: Path) -> None:
    facts = Facts.read(planted / "fine.onnx")
    assert not any(layer.name in told(Question.FLOAT, facts) for layer in facts.file.layers)
    names(told(Question.SPEED, facts), "5 layers in integer kernels", "0 in float", "1 of 5 layers", "depthwise")


def test_bytes_are_told_by_kind_and_layer(planted: Path) -> None:
    path = planted / "bad.onnx"
    text = told(Question.SIZE, Facts.read(path))
    names(text, f"{path.stat().st_size:,} bytes")
    quantized = sum(layer.stored for layer in Facts.read(path).file.layers)
    assert quantized == 216 + 72 + 16 + 128 + 80  # project: 64 weights of 2 bits
    (stem,) = [line for line in text.splitlines() if "stem" in line]
    names(stem, "w8a8", "216 bytes", 108, "4 bits")


def test_unsigned_weights_and_layers_in_float_explain_a_slow_file(tmp_path: Path) -> None:
    facts = facts_of(conv_net(), tmp_path, Recipe(target="paper", ranges=RangeMethod.MINMAX))
    text = told(Question.SPEED, facts)
    names(text, "unsigned", "stem", "onnxcalib evaluate")


def qdq(bits: str, bias: bool) -> onnx.ModelProto:
    """A Conv as another tool might write it."""
    kind = np.uint16 if bits == "16" else np.uint8
    text = f"""
    net (float[N,2,4,4] x) => (float[N,3,4,4] y) {{
        [q] codes = QuantizeLinear (x, s, z)
        [d] back = DequantizeLinear (codes, s, z)
        [w] weight = DequantizeLinear <axis=0> (wc, ws, wz)
        [conv] y = Conv ({"back, weight, b" if bias else "back, weight"})
    }}"""
    return build(
        text, opset=21, ir=10,
        s=np.float32(0.05), z=kind(7), wc=np.arange(-3, 3).reshape(3, 2, 1, 1).astype(np.int8), b=normal(3),
        ws=np.full(3, 0.1, np.float32), wz=np.zeros(3, np.int8),
    )  # fmt: skip


def test_a_file_of_another_tool_is_read_too() -> None:
    (layer,) = read_quantized(qdq("16", bias=True)).layers
    assert (layer.name, layer.bits, layer.bias, layer.depthwise) == ("conv", "w3a16", "float", False)
    assert layer.input is not None
    np.testing.assert_allclose(layer.input.range, (-0.35, 0.05 * (65535 - 7)), rtol=1e-5)
    assert read_quantized(qdq("8", bias=False)).layers[0].bits == "w3a8"


@pytest.mark.parametrize(
    ("bits", "recipe", "typed"),
    [
        ((4, 4), Recipe(bits=(Precision(4, 4),)), "--override a/b=w8a8"),
        ((4, 32), Recipe(bits=(Precision(4, 32),)), "--override a/b=w8"),
        ((8, 8), Recipe(), "--override a/b=float"),
    ],
)
def test_what_to_type_fits_the_recipe(bits: tuple[int, int], recipe: Recipe, typed: str) -> None:
    row: dict[str, Any] = {"layer": "a/b", "weight_bits": bits[0], "activation_bits": bits[1], "byte_share": 0.5}
    assert advice(row, recipe) == typed


def test_names_are_safe_from_the_shell_and_from_patterns() -> None:
    assert override("conv[0] x", Precision(8, 8)) == "--override 'conv[[]0] x=w8a8'"
    assert override("it's*", FLOAT) == """--override 'it'"'"'s[*]=float'"""


def noise(reference: np.ndarray, guess: np.ndarray) -> float:
    wanted = reference.astype(np.float64)
    return float(10 * np.log10((wanted**2).sum() / ((wanted - guess) ** 2).sum()))


def made_by(model: onnx.ModelProto, name: str, folder: Path) -> np.ndarray:
    tensor = next(node.output[0] for node in model.graph.node if node.name == name)
    return run(with_outputs(model, [tensor]), dict(np.load(folder / "data.npz")))[tensor]


@pytest.mark.parametrize("through_float", [True, False])
def test_two_files_differ_where_the_layer_was_planted(planted: Path, through_float: bool) -> None:
    model = planted / "model.onnx" if through_float else None
    found = compare((planted / "fine.onnx", planted / "bad.onnx"), planted / "data.npz", model)
    rows = {row.layer: row for row in found.layers}
    assert set(rows) == {"stem", "depth", "project", "head", "fc"}
    assert found.layers[0].layer == "project"
    assert rows["project"].bits == ("w8a8", "w2a8")
    assert rows["head"].bits == ("w8a8", "w8a8")
    ready = read_prepared(planted / "model.onnx", find_target("ort")).proto
    fine, bad = (onnx.load(planted / name) for name in ("fine.onnx", "bad.onnx"))
    for row in found.layers[:3]:
        float_made, fine_made, bad_made = (made_by(each, row.layer, planted) for each in (ready, fine, bad))
        if through_float:
            assert row.sqnr_db == pytest.approx((noise(float_made, fine_made), noise(float_made, bad_made)), abs=0.05)
            assert row.difference_db == pytest.approx(row.sqnr_db[1] - row.sqnr_db[0])
        else:
            assert row.sqnr_db is None
            assert row.difference_db == pytest.approx(noise(fine_made, bad_made), abs=0.05)
    assert [Path(each.model).name for each in found.whole] == ["fine.onnx", "bad.onnx"]
    losses = [each.distillation_loss for each in found.whole]
    assert losses[0] is not None
    assert losses[1] is not None
    assert losses[0] < losses[1]
    header, *lines = csv_rows(found.layers)
    assert header == ["layer", "bits_a", "bits_b", "sqnr_a_db", "sqnr_b_db", "difference_db"]
    assert lines[0][:3] == ["project", "w8a8", "w2a8"]
    assert (lines[0][3] == "") is not through_float


def test_strangers_cannot_be_compared(planted: Path, tmp_path: Path) -> None:
    other = qdq("8", bias=True)
    onnx.save(other, tmp_path / "other.onnx")
    with refused(ModelError, tmp_path / "other.onnx", planted / "fine.onnx"):
        compare((tmp_path / "other.onnx", planted / "fine.onnx"), feed_for(other, 4))
    with refused(ModelError, planted / "model.onnx"):
        diagnose_file(Facts.read(tmp_path / "other.onnx").file, planted / "model.onnx", planted / "data.npz")


def test_a_file_keeps_its_constants_when_it_is_read(planted: Path) -> None:
    proto = onnx.load(planted / "bad.onnx")
    before = proto.SerializeToString(deterministic=True)
    file = read_quantized(proto)
    assert proto.SerializeToString(deterministic=True) == before
    data = dict(np.load(planted / "data.npz"))
    np.testing.assert_array_equal(run(file.proto, data)["y"], run(proto, data)["y"])
    names = {tensor.name: numpy_helper.to_array(tensor) for tensor in file.proto.graph.initializer}
    assert any(value.dtype == np.int8 and value.shape == (8, 8, 1, 1) for value in names.values())
