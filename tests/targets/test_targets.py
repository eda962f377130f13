"""Targets as files: every constraint has a source, one's own is read with care, and forbidden bits are refused."""

from __future__ import annotations

import tomllib
from importlib import resources
from pathlib import Path

import numpy as np
import pytest
from command_line import said_by
from onnx import numpy_helper
from said import one_error, refused

from models import conv_net, feed_for
from onnxcalib import Precision, RangeMethod, Recipe, quantize
from onnxcalib.cli.target_tables import constraints
from onnxcalib.errors import RecipeError
from onnxcalib.recipe import Pipeline, parse_bits
from onnxcalib.targets import NAMES, TARGETS, Bias, Format, Severity, find_target
from onnxcalib.targets.reading import KEYS, REQUIRED, rules

ROOT = Path(__file__).parents[2]
OWN = """
like = "ort"
name = "mine"
summary = "my chip: as onnxruntime, with shifts for scales"

[weights]
bits = [4, 8]
storage = "int8"

[scales]
power_of_two = true

[sources]
scales = "its data sheet"

[check]
power-of-two = { severity = "refused", reason = "it can only shift", source = "its data sheet" }
float-bias = "slow"
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "my.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_every_file_is_a_target_and_is_shipped() -> None:
    files = {file.name for file in resources.files("onnxcalib.targets").iterdir() if file.name.endswith(".toml")}
    assert files == {"rules.toml", *(f"{name}.toml" for name in NAMES)}
    assert list(TARGETS) == list(NAMES)
    setup = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert "targets/*.toml" in setup["tool"]["setuptools"]["package-data"]["onnxcalib"]


@pytest.mark.parametrize("name", NAMES)
def test_every_constraint_and_every_verdict_has_a_source(name: str) -> None:
    target = TARGETS[name]
    said = {key for key in target.sources if target.sources[key]}
    for section in ("activations", "weights", "bias", "graph.placement", "graph.newest_opset"):
        assert section in said or name == "paper", section
    for key in target.sources:
        assert key in KEYS or key in {known.split(".")[0] for known in KEYS}, key
    for rule, verdict in target.check.items():
        assert verdict.source or verdict.severity is Severity.FINE, rule
        # A rule of this target alone says why.
        assert verdict.reason or "severity" in rules()[rule] or verdict.severity is Severity.FINE, rule


def test_what_sets_the_targets_apart() -> None:
    vitis, qonnx, qnn = (TARGETS[name] for name in ("vitis", "qonnx", "qnn"))
    assert (vitis.power_of_two, vitis.per_channel, vitis.bias) == (True, False, Bias.INT8)
    assert (qonnx.format, qonnx.weight_bits) == (Format.QUANT, tuple(range(2, 9)))
    assert qnn.weight_bits == (4, 8)
    assert TARGETS["tensorrt"].activation_bits == (8,)
    assert (TARGETS["ort-compat"].opset_limit, TARGETS["rknn"].opset_limit) == (18, 19)


def test_a_target_of_ones_own_decides_the_file(tmp_path: Path) -> None:
    path, model = written(tmp_path, OWN), conv_net()
    recipe = Recipe(target=str(path), ranges=RangeMethod.MINMAX)
    result = quantize(model, feed_for(model), recipe)
    assert result.plan.target == "mine"
    stored = {tensor.name: numpy_helper.to_array(tensor) for tensor in result.model.graph.initializer}
    scales = [stored[node.input[1]] for node in result.model.graph.node if "Linear" in node.op_type]
    assert len(scales) > 20
    assert all((np.frexp(scale)[0] == 0.5).all() for scale in scales)


def test_a_target_of_ones_own_in_the_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path, OWN)
    code, out, _ = said_by(capsys, "targets", path)
    assert code == 0
    assert "its data sheet" in out
    assert "it can only shift" in out
    assert find_target(str(path)).check["float-bias"].severity is Severity.SLOW


WRONG = {
    'like = "ort"\nnam = "x"': ("'nam'", "name"),
    'like = "ort"\n[weights]\nstorag = "int8"': ("'weights.storag'", "weights.storage"),
    'like = "ort"\n[weights]\nbits = [1, 8]': ("'weights.bits'", "[1, 8]"),
    'like = "ort"\n[weights]\nbits = []': ("'weights.bits'", "[]"),
    'like = "ort"\n[weights]\nper_channel = ["Relu"]': ("'weights.per_channel'", "Relu"),
    'like = "ort"\n[weights]\nshifted_bits = [7]': ("'weights.shifted_bits'", "2 to 6"),
    'like = "ort"\n[weights]\nshifted_bits = [4]\nstorage = "int8"': ("'weights.shifted_bits'", "planes"),
    'like = "ort"\n[weights]\nsymmetric = 1': ("'weights.symmetric'", "1"),
    'like = "ort"\n[activations]\ntype = "u7"': ("'activations.type'", "u7"),
    'like = "ort"\n[graph]\nplacement = "here"': ("'graph.placement'", "fused"),
    'like = "ort"\n[graph]\nnewest_opset = "x"': ("'graph.newest_opset'", "x"),
    'like = "ort"\n[graph]\nnewest_opset = 13\nopset_limit = 13\noldest_opset = 17': ("'graph.newest_opset'", "17"),
    'like = "ort"\n[graph]\ndomains = [1]': ("'graph.domains'", "[1]"),
    'like = "ort"\n[sources]\nbias = 3': ("'sources.bias'", "3"),
    'like = "ort"\nsources = 3': ("'sources'", "3"),
    'like = "ort"\n[check]\npower-of-tw = "slow"': ("'check.power-of-tw'", "power-of-two"),
    'like = "ort"\n[check]\npower-of-two = "bad"': ("'check.power-of-two'", "refused"),
    'like = "ort"\n[check.power-of-two]\nseverity = "slow"\nwhy = "x"': ("'check.power-of-two.why'", "severity"),
    'like = "tensort"': ("'tensort'", "tensorrt"),
    'name = "x"\nsummary = "y"': ("'activations.type'", 'like = "ort"'),
    "like = ": ("TOML", "Invalid value"),
}


@pytest.mark.parametrize("text", WRONG)
def test_a_wrong_target_file_is_told_by_file_and_key(text: str, tmp_path: Path) -> None:
    path = written(tmp_path, text)
    with refused(RecipeError, path, *WRONG[text]):
        find_target(str(path))


def test_a_complete_file_needs_no_other_target(tmp_path: Path) -> None:
    text = resources.files("onnxcalib.targets").joinpath("paper.toml").read_text(encoding="utf-8")
    assert find_target(str(written(tmp_path, text))) == TARGETS["paper"]
    for key in REQUIRED:
        name = key.split(".")[-1]
        section = f"[{key.split('.')[0]}]" if "." in key else ""
        start = text.index(section)
        line = next(line for line in text[start:].splitlines() if line.startswith(f"{name} ="))
        shorter = text[:start] + text[start:].replace(line, "", 1)
        with refused(RecipeError, f"'{key}'"):
            find_target(str(written(tmp_path, shorter)))


def test_unknown_targets_and_missing_files() -> None:
    with refused(RecipeError, "'openvin'", "openvino"):
        find_target("openvin")
    with refused(RecipeError, "none.toml", "No such file"):
        find_target("none.toml")


@pytest.mark.parametrize(
    ("target", "options", "facts"),
    [
        ("tensorrt", {"bits": (Precision(4, 4),)}, ("4 weight bits", "--bits w4a4", "8 bits for weights")),
        ("vitis", {"bits": (Precision(8, 4),)}, ("4 activation bits", "--bits w8a4", "8 bits for weights")),
        ("qnn", {"edge_bits": 6}, ("6 weight bits", "--edge-bits w6a6", "4, 8 bits for weights")),
        (
            "qnn",
            {"pipeline": Pipeline.LIGHT, "bits": parse_bits("w4a8,w6a8,w8a8"), "compression": 0.3},
            ("6 weight bits", "--bits w6a8", "4, 8 bits for weights"),
        ),
    ],
)
def test_forbidden_bits_name_the_target_and_what_it_allows(target: str, options: dict, facts: tuple[str, ...]) -> None:
    model = conv_net()
    with refused(RecipeError, f"target {target}", *facts):
        quantize(model, feed_for(model), Recipe(target=target, **options))


def test_the_command_refuses_forbidden_bits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    demo = ROOT / "models"
    words = ("quantize", demo / "fashion_mobilenet.onnx", "-c", demo / "fashion_calibration.npz", "-o", tmp_path / "x")
    code, _, said = said_by(capsys, *words, "--target", "xnnpack", "--bits", "w2a8")
    assert code == 2
    one_error(said, "target xnnpack", "2 weight bits")
    assert not (tmp_path / "x").exists()


def test_the_list_of_targets(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = said_by(capsys, "targets")
    assert code == 0
    for name in NAMES:
        assert sum(line.split()[0] == name for line in out.splitlines() if line.strip()) == 1
    code, out, _ = said_by(capsys, "targets", "vitis")
    assert code == 0
    for key, value in constraints(TARGETS["vitis"]):
        assert key in out
        assert value.split(",")[0] in out
    assert "UG1414" in out
    assert said_by(capsys, "targets", "vits")[0] == 2
