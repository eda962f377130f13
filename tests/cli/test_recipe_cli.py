"""Recipes and shell completion as a person uses them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from command_line import COMMAND, ENVIRONMENT, said_by
from said import names, one_error

from models import conv_net, feed_for
from onnxcalib import Recipe, read_recipe, read_settings
from onnxcalib.recipe import PRESETS

Captured = pytest.CaptureFixture[str]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which the commands run, with a model and its data."""
    monkeypatch.chdir(tmp_path)
    model = conv_net()
    onnx.save(model, "model.onnx")
    np.savez("calibration.npz", **feed_for(model, 16))
    return tmp_path


def test_a_recipe_holds_all_that_quantize_takes(here: Path, capsys: Captured) -> None:
    (here / "recipe.toml").write_text(
        'bits = "w4a8"\nranges = "minmax"\ncalibration = "calibration.npz"\noutput = "a.onnx"'
    )
    code, _, said = said_by(capsys, "quantize", "model.onnx", "--recipe", "recipe.toml")
    assert code == 0, said
    names(said, "a.onnx", "5 at w4a8", "minmax")
    code, _, said = said_by(
        capsys, "quantize", "model.onnx", "--recipe", "recipe.toml", "-o", "b.onnx", "--bits", "w5a6"
    )
    assert code == 0, said
    names(said, "b.onnx", "5 at w5a6", "minmax")


def test_images_in_a_recipe_are_refused_for_arrays(here: Path, capsys: Captured) -> None:
    (here / "recipe.toml").write_text('calibration = "calibration.npz"\noutput = "a.onnx"\n[images]\nresize = 8')
    code, _, said = said_by(capsys, "quantize", "model.onnx", "--recipe", "recipe.toml")
    assert code == 4
    one_error(said, "calibration.npz")


@pytest.mark.parametrize(("given", "missing"), [("-o", "--calibration"), ("-c", "--output")])
def test_what_neither_the_recipe_nor_the_options_name(given: str, missing: str, here: Path, capsys: Captured) -> None:
    code, _, said = said_by(capsys, "quantize", here / "model.onnx", given, "calibration.npz")
    assert code == 2
    one_error(said, missing, missing[1:3], f"'{missing[2:]}'")


@pytest.mark.parametrize("preset", [None, *PRESETS])
def test_init_writes_what_quantize_reads(preset: str | None, here: Path, capsys: Captured) -> None:
    code, _, said = said_by(capsys, "recipe", "init", "mine.toml", *(("--preset", preset) if preset else ()))
    assert code == 0
    names(said, "onnxcalib quantize MODEL --recipe mine.toml")  # to be typed
    assert read_recipe(here / "mine.toml") == (PRESETS[preset] if preset else Recipe())


def test_init_overwrites_nothing(here: Path, capsys: Captured) -> None:
    assert said_by(capsys, "recipe", "init")[0] == 0
    (here / "recipe.toml").write_text("seed = 5")
    code, _, said = said_by(capsys, "recipe", "init")
    assert code == 6
    one_error(said, "recipe.toml")
    assert (here / "recipe.toml").read_text() == "seed = 5"


def test_show_prints_what_results(here: Path, capsys: Captured) -> None:
    options = "--recipe paper --bits w3a5 --no-strict --mean 0.5 --resize 30 --workers 2"
    code, printed, _ = said_by(capsys, "recipe", "show", *options.split())
    assert code == 0
    (here / "shown.toml").write_text(printed)
    found, paper = read_settings("shown.toml"), PRESETS["paper"]
    assert [str(bits) for bits in found.recipe.bits] == ["w3a5"]
    assert (found.recipe.steps, found.recipe.target, found.recipe.strict) == (paper.steps, paper.target, False)
    assert found.workers == 2
    assert found.preprocess is not None
    assert (found.preprocess.mean, found.preprocess.resize) == ((0.5,), 30)


def test_options_go_on_top_of_the_images_of_a_file(here: Path, capsys: Captured) -> None:
    (here / "a.toml").write_text("[images]\nresize = 40\nmean = 0.5")
    (here / "b.toml").write_text(said_by(capsys, "recipe", "show", "--recipe", "a.toml", "--resize", "50")[1])
    found = read_settings("b.toml").preprocess
    assert found is not None
    assert (found.resize, found.mean) == (50, (0.5,))


def test_a_file_may_be_called_like_a_preset(here: Path, capsys: Captured) -> None:
    (here / "best").write_text("seed = 7")
    assert "seed = 7" in said_by(capsys, "recipe", "show", "--recipe", "./best")[1]
    assert "seed = 0" in said_by(capsys, "recipe", "show", "--recipe", "best")[1]


def test_what_a_preset_and_an_option_cannot_do_together(capsys: Captured) -> None:
    code, _, said = said_by(capsys, "recipe", "show", "--recipe", "best", "--pipeline", "light")
    assert code == 2
    one_error(said, "best", "--steps", "light", "--pipeline advanced")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_prints_a_script_and_how_to_install_it(shell: str, capsys: Captured) -> None:
    code, printed, _ = said_by(capsys, "completion", shell)
    assert code == 0
    assert f"_ONNXCALIB_COMPLETE={shell}_complete" in printed
    assert f"onnxcalib completion {shell}" in printed.splitlines()[-1]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("onnxcalib quan", {"quantize"}),
        ("onnxcalib recipe i", {"init"}),
        ("onnxcalib quantize --max", {"--max-drop", "--max-loss"}),
        ("onnxcalib quantize --pipeline a", {"advanced"}),
        ("onnxcalib quantize --recipe fa", {"fast", "fa"}),
        ("onnxcalib completion ", {"bash", "zsh", "fish"}),
    ],
)
def test_the_shell_gets_its_completions(words: str, expected: set[str]) -> None:
    asked = {"_ONNXCALIB_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    done = subprocess.run(COMMAND, capture_output=True, text=True, env=ENVIRONMENT | asked, timeout=120, check=False)
    assert {line.split(",")[1] for line in done.stdout.splitlines()} == expected


def test_bash_completes(tmp_path: Path, capsys: Captured) -> None:
    program = tmp_path / "onnxcalib"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m onnxcalib.cli.main "$@"\n')
    program.chmod(0o755)
    script = said_by(capsys, "completion", "bash")[1]
    asking = "COMP_WORDS=(onnxcalib doc); COMP_CWORD=1; _onnxcalib_completion onnxcalib; echo ${COMPREPLY[@]}"
    path = {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-c", f"{script}\n{asking}"], capture_output=True, text=True, env=ENVIRONMENT | path, check=False
    )
    assert done.stdout.strip() == "doctor", done.stderr
