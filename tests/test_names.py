"""Names are data: brackets, escapes, dollars and formulas in them are shown, kept, and never obeyed."""

from __future__ import annotations

import csv
import io
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import onnx
import pytest
from command_line import said_by
from hypothesis import given
from hypothesis import strategies as st

from models import conv_net, feed_for
from onnxcalib import OnnxcalibError, read_recipe, write_recipe
from onnxcalib.mixed_precision.table_files import load
from onnxcalib.names import as_cell, from_cell, printable
from onnxcalib.recipe import Recipe

ODD = ("features[relu]/conv", "[/x]", "=1+1", "\x1b[31mred\x9b2J\u202e\n", "$a_{$<script>&", ":smile:'\"")
QUIET = ("--ranges", "minmax")
MIX = ("--bits", "w4a4,w8a8")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose layers have odd names, and its data."""
    where = tmp_path_factory.mktemp("odd")
    model = conv_net()
    layers = [node for node in model.graph.node if node.op_type in ("Conv", "Gemm")]
    for node, name in zip(layers, ODD, strict=False):
        node.name = name
    assert len(layers) == len(ODD) - 1
    onnx.save(model, where / "model.onnx")
    np.savez(where / "data.npz", **feed_for(model, 16))
    return where


def shown(text: str) -> None:
    """The names of all layers stand there, and nothing that a terminal would obey."""
    assert "features[relu]/conv" in text
    assert "[/x]" in text
    assert "=1+1" in text
    assert "\\x1b[31mred" in text
    assert not [each for each in text if not each.isprintable() and each != "\n"]


def test_the_terminal_shows_names_as_they_are(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, data, small = folder / "model.onnx", folder / "data.npz", folder / "small.onnx"
    quantized = said_by(capsys, "quantize", model, "-c", data, "-o", small, "-v", *QUIET)
    assert quantized[0] == 0, quantized[2]
    shown(quantized[2])
    commands = (
        ("inspect", model),
        ("compare", small, small, "-d", data, "--csv", folder / "layers.csv"),
        ("explain", small, "--model", model, "-d", data),
        ("sensitivity", model, "-c", data, *MIX, "-o", folder / "table.csv", *QUIET),
        ("allocate", folder / "table.csv", "--compression", "0.9"),
    )  # fmt: skip
    for command in commands:
        code, out, err = said_by(capsys, *command)
        assert code == 0, err
        shown(out)
    assert said_by(capsys, "check", small, "--target", "tensorrt")[0] in (0, 1)


def test_tables_neutralise_formulas_and_give_names_back(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = folder / "again.csv"
    command = ("sensitivity", folder / "model.onnx", "-c", folder / "data.npz", *MIX, "-o", table, *QUIET)
    assert said_by(capsys, *command)[0] == 0
    body = "".join(line for line in table.read_text(encoding="utf-8").splitlines(keepends=True) if line[0] != "#")
    rows = list(csv.reader(io.StringIO(body, newline="")))
    assert not [cell for row in rows for cell in row if cell[:1] in tuple("=+@\t\r\n") and not _is_number(cell)]
    assert [row.layer for row in load(table).layers] == [*ODD[:-1]]


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


@given(st.text(alphabet="'=+-@\t\r\nab ", max_size=6))
def test_a_cell_holds_any_name(name: str) -> None:
    cell = as_cell(name)
    assert from_cell(cell) == name
    assert not cell or cell[0] not in "=+-@\t\r\n"
    assert from_cell(name) == name or name.startswith("'")  # typed by hand


def test_the_report_shows_names_as_they_are(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = folder / "run.html"
    command = ("quantize", folder / "model.onnx", "-c", folder / "data.npz", "-o", folder / "reported.onnx", *QUIET)
    code, _, err = said_by(capsys, *command, "--report", page)
    assert code == 0, err
    text = page.read_text(encoding="utf-8")
    assert "$a_{$<script" not in text
    assert "$a_{$&lt;script&gt;&amp;" in text
    assert not [each for each in text if not each.isprintable() and each != "\n"]
    figures = sorted((folder / "run_figures").glob("*.svg"))
    assert figures
    for figure in figures:
        ET.parse(figure)  # a control character is no XML
    bits = (folder / "run_figures" / "bits.svg").read_text(encoding="utf-8")
    assert "$a_{$" in bits.replace("\\$", "$")


@given(st.text(max_size=20))
def test_messages_are_one_line_that_a_terminal_can_show(name: str) -> None:
    said = str(OnnxcalibError(f"layer {name} is odd.", f"Rename {name}."))
    assert said.isprintable()
    assert printable(printable(name)) == printable(name)


@given(st.text(alphabet=st.characters(codec="utf-8"), min_size=1, max_size=8))
def test_a_recipe_keeps_names_and_shows_them_harmlessly(tmp_path_factory: pytest.TempPathFactory, name: str) -> None:
    recipe = Recipe(exclude=(name,))
    text = write_recipe(recipe)
    assert all(line.isprintable() for line in text.split("\n"))
    path = tmp_path_factory.getbasetemp() / "recipe.toml"
    path.write_text(text, encoding="utf-8", newline="")
    assert read_recipe(path) == recipe
