"""Every planted violation is found and named, and our own files pass."""

from __future__ import annotations

import json
from pathlib import Path

import onnx
import pytest
from checks.broken import ROWS, Broken, File, good
from command_line import said_by
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static

from models import BUILDERS, build, conv_net, feed_for, normal, op_types, session_of
from onnxcalib import Precision, RangeMethod, Recipe, quantize
from onnxcalib.checks.check import Finding, check_file, check_model, matters
from onnxcalib.checks.rule import FINDERS
from onnxcalib.targets import NAMES, Severity, find_target
from onnxcalib.targets.reading import rules


def rules_of(findings: list[Finding]) -> set[str]:
    return {it.rule for it in findings}


def test_every_rule_has_a_finder_and_is_broken_by_some_row() -> None:
    assert set(rules()) == set(FINDERS) == {row.rule for row in ROWS}
    assert len(ROWS) >= 20


@pytest.mark.parametrize("row", ROWS, ids=[f"{row.rule}-{row.target}-{place}" for place, row in enumerate(ROWS)])
def test_a_planted_violation_is_found_and_named(row: Broken) -> None:
    model, node = row.build()
    before = model.SerializeToString()
    found = check_model(model, find_target(row.target))
    assert model.SerializeToString() == before
    (first, *_) = [it for it in found if it.rule == row.rule and it.node == node] or [None]
    assert first is not None, [(it.rule, it.node) for it in found]
    assert first.what
    assert first.source
    assert rules_of(found) <= {row.rule, *row.others}
    # What another target does not mind is no finding there.
    assert first.severity is find_target(row.target).check[row.rule].severity


@pytest.mark.parametrize("target", NAMES)
@pytest.mark.parametrize("row", ROWS, ids=[f"{row.rule}-{place}" for place, row in enumerate(ROWS)])
def test_what_one_target_minds_breaks_the_check_of_no_other(row: Broken, target: str) -> None:
    chosen = find_target(target)
    for found in check_model(row.build()[0], chosen):
        assert found.severity is chosen.check[found.rule].severity


@pytest.mark.parametrize("target", NAMES)
@pytest.mark.parametrize("builder", BUILDERS)
def test_our_own_output_passes(builder: str, target: str) -> None:
    model, chosen = BUILDERS[builder](), find_target(target)
    for weight, activation in {
        (8, 8),
        (min(chosen.weight_bits), min(chosen.activation_bits)),
        (chosen.weight_bits[-2:][0], 8),
    }:
        recipe = Recipe(bits=(Precision(weight, activation),), target=target, ranges=RangeMethod.MINMAX)
        found = check_model(quantize(model, feed_for(model), recipe).model, chosen)
        assert not matters(found), found
        assert rules_of(found) <= {"computed-product"}


def test_our_own_four_bit_output_passes_where_it_is_stored_as_int4() -> None:
    for target in ("openvino", "qnn"):
        assert check_model(good(target, "w4a8"), find_target(target)) == []


def test_a_layer_inside_an_if_is_looked_at() -> None:
    branch = """net (bool c, float[1,3,4,4] x) => (float[1,2,4,4] y) {
        y = If <then_branch = yes () => (float[1,2,4,4] a) { [inner] a = Conv (x, w) },
                else_branch = no () => (float[1,2,4,4] b) { [other] b = Conv (x, w) }> (c)
    }"""
    found = check_model(build(branch, w=normal(2, 3, 1, 1)), find_target("ort"))
    assert {(it.node, it.rule) for it in found} == {("inner", "float-layer"), ("other", "float-layer")}


class Reader(CalibrationDataReader):
    """A few samples for the other tool."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self.feeds = iter([feed_for(model, 4)])

    def get_next(self) -> dict | None:
        return next(self.feeds, None)


@pytest.fixture(scope="module")
def by_onnxruntime(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of onnxruntime's own quantizer: u8 activations, s8 per-channel weights."""
    folder = tmp_path_factory.mktemp("other")
    onnx.save(conv_net(), folder / "float.onnx")
    kinds = {"activation_type": QuantType.QUInt8, "weight_type": QuantType.QInt8, "quant_format": QuantFormat.QDQ}
    quantize_static(folder / "float.onnx", folder / "qdq.onnx", Reader(conv_net()), per_channel=True, **kinds)
    return folder / "qdq.onnx"


def test_another_tools_file(by_onnxruntime: Path) -> None:
    assert check_file(by_onnxruntime, find_target("ort")) == []
    assert rules_of(check_file(by_onnxruntime, find_target("tensorrt"))) == {
        "u8-activation", "activation-zero-point", "integer-bias",
    }  # fmt: skip
    assert "free-shape" in rules_of(check_file(by_onnxruntime, find_target("qnn")))
    assert {"power-of-two", "per-channel-weight"} <= rules_of(check_file(by_onnxruntime, find_target("vitis")))


@pytest.mark.parametrize("name", ["float-output", "mixed-inputs", "clipped-values", "clip-not-absorbed", "float-layer"])
def test_onnxruntime_keeps_in_float_what_the_check_says(name: str, tmp_path: Path) -> None:
    row = next(row for row in ROWS if row.rule == name and row.target == "ort")
    model, _ = row.build()
    path = tmp_path / "optimized.onnx"
    session_of(model, optimized_model_filepath=str(path))
    assert {"Conv", "FusedConv", "Add"} & set(op_types(onnx.load(path)))


def test_the_command_and_its_exit_codes(
    by_onnxruntime: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    clean = said_by(capsys, "check", by_onnxruntime, "--target", "ort")
    assert clean == (0, f"{by_onnxruntime} on ort: nothing found\n", "")
    code, out, _ = said_by(capsys, "check", by_onnxruntime, "--target", "tensorrt", "--json")
    told = json.loads(out)
    assert (code, told["target"]) == (1, "tensorrt")
    assert {it["severity"] for it in told["findings"]} == {"refused"}
    assert set(told["findings"][0]) == {"node", "op", "rule", "severity", "what", "reason", "source"}
    code, out, _ = said_by(capsys, "check", by_onnxruntime, "--target", "tensorrt")
    assert code == 1
    assert "integer-bias" in out
    assert "refused" in out.splitlines()[-1]
    (tmp_path / "torn.onnx").write_bytes(b"torn")
    for path in (tmp_path / "torn.onnx", tmp_path / "none.onnx"):
        code, out, said = said_by(capsys, "check", path)
        assert (code, out) == (2, "")
        assert path.name in said
    assert said_by(capsys, "check", by_onnxruntime, "--target", "tensort")[0] == 2


def test_slow_alone_is_no_failure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = File(good("ort"))
    file.activation_of("b3", onnx.TensorProto.INT8)
    onnx.save(file.model, tmp_path / "slow.onnx")
    code, out, _ = said_by(capsys, "check", tmp_path / "slow.onnx")
    assert code == 0
    assert out.splitlines()[-1].endswith(f"1 {Severity.SLOW}")
