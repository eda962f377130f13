"""Errors name parameters as Python does, and options where a person typed options."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import numpy as np
import onnx
import pytest
from command_line import said_by

import onnxcalib
from models import conv_net, feed_for
from onnxcalib import Recipe, RecipeError, Settings
from onnxcalib.cli.commands import COMMANDS
from onnxcalib.cli.wording import OPTIONS, RENAMED, as_typed, flag

ROOT = Path(onnxcalib.__file__).parent
# These write command lines for people to type, and are no errors.
COMMAND_LINES = {
    "analysis/advice.py",
    "analysis/speed.py",
    "model/quantized.py",
    "runtime/installed.py",
    "recipe/template.py",
}


def test_parameters_become_options() -> None:
    assert as_typed("`steps=0` is none.") == "--steps 0 is none."
    assert as_typed("Give `bits` a list, or `pipeline='light'`.") == "Give --bits a list, or --pipeline light."
    assert as_typed("`overrides='*a b*=w8a8'` and `max_loss`") == "--override '*a b*=w8a8' and --max-loss"
    assert as_typed("`transform` and `x` stay") == "`transform` and `x` stay"


def test_every_parameter_that_becomes_an_option_is_one() -> None:
    known = {name for command in COMMANDS for option in command.params for name in option.opts}
    assert {flag(RENAMED.get(name, name)) for name in OPTIONS} <= known


def test_nothing_below_the_command_line_speaks_of_options() -> None:
    found = []
    for path in sorted(ROOT.rglob("*.py")):
        name = path.relative_to(ROOT).as_posix()
        if name.startswith(("cli/", "report")) or name in COMMAND_LINES:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                said = [word for word in re.findall(r"--[a-z][a-z-]+", node.value) if word != "--force-reinstall"]
                found += [f"{name}:{node.lineno}: {word}" for word in said]
    assert not found, f"name parameters in backticks, as `steps=0`: {found}"


WRONG = [
    ({"steps": 0, "pipeline": "advanced"}, "steps=0", "--steps 0"),
    ({"steps": 5}, "`steps`", "--steps"),
    ({"bits": "w4a4,w8a8"}, "bits='w4a4,w8a8'", "--bits w4a4,w8a8"),
    ({"compression": 0.5, "pipeline": "light"}, "`compression`", "--compression"),
    ({"max_loss": -1.0, "pipeline": "light", "bits": "w4a4,w8a8"}, "max_loss=-1", "--max-loss -1"),
    ({"seed": -1}, "seed=-1", "--seed -1"),
    ({"block_size": 32}, "`block_size`", "--block-size"),
]


@pytest.mark.parametrize(("fields", "in_python", "on_the_command_line"), WRONG)
def test_one_error_in_both_languages(
    fields: dict[str, object], in_python: str, on_the_command_line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(RecipeError) as caught:
        Recipe(**fields)
    assert in_python in str(caught.value)
    assert "--" not in str(caught.value)
    options = [f"{flag(name)}={value}" for name, value in fields.items()]
    code, _, said = said_by(capsys, "quantize", "model.onnx", "-c", "data.npz", "-o", "out.onnx", *options)
    assert code == RecipeError.exit_code
    assert on_the_command_line in said
    assert "`" not in said


def test_patterns_and_limits_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = conv_net()
    onnx.save(model, tmp_path / "model.onnx")
    np.savez(tmp_path / "data.npz", **feed_for(model, 4))
    with pytest.raises(RecipeError, match=r"`exclude='nothing\*'`"):
        onnxcalib.quantize(model, tmp_path / "data.npz", Recipe(exclude="nothing*"))
    where = ("quantize", tmp_path / "model.onnx", "-c", tmp_path / "data.npz", "-o", tmp_path / "out.onnx")
    _, _, said = said_by(capsys, *where, "--exclude", "nothing*")
    assert "--exclude 'nothing*'" in said
    mixed = ("--pipeline", "light", "--bits", "w4a4,w8a8", "--compression", "0.3", "--override", "none=w8a8")
    _, _, said = said_by(capsys, *where, *mixed)
    assert "--override 'none=w8a8'" in said
    with pytest.raises(RecipeError, match="`workers=0`"):
        Settings(Recipe(pipeline="advanced"), workers=0)
