"""Python has all that the command line has: functions that take paths or models and return values."""

from __future__ import annotations

import inspect
import logging
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from command_line import case_in, said_by

import onnxcalib
from onnxcalib import DataError, Event, OnnxcalibError, Pipeline, Recipe, RecipeError, Settings, api, compat
from onnxcalib.recipe import GROUPS

FUNCTIONS = [getattr(api, name) for name in api.__all__ if inspect.isfunction(getattr(api, name))]
FUNCTIONS += [getattr(compat, name) for name in compat.__all__ if inspect.isfunction(getattr(compat, name))]
BITS = "w4a4,w8a8"


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = case_in(tmp_path_factory.mktemp("api"), 16, 12)
    onnxcalib.quantize(folder / "model.onnx", folder / "data.npz", Recipe(bits="w4a8"), output=folder / "a.onnx")
    onnxcalib.quantize(folder / "model.onnx", folder / "data.npz", output=folder / "b.onnx")
    return folder


def test_the_package_shows_its_names() -> None:
    shown = dir(onnxcalib)
    for name in ("quantize", "sensitivity", "allocate", "curve", "compare", "check", "explain", "report", "evaluate"):
        assert name in shown
        assert callable(getattr(onnxcalib, name))
    assert set(api.__all__) <= set(shown)
    assert onnxcalib.compat is compat
    with pytest.raises(AttributeError):
        _ = onnxcalib.quantise
    code = "import onnxcalib, onnxcalib.cli.commands; assert callable(onnxcalib.report)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0  # whatever was imported before


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda each: each.__name__)
def test_every_parameter_has_its_sentence(function: Any) -> None:
    text = inspect.getdoc(function) or ""
    told = text.partition("Args:")[2]
    for name in inspect.signature(function).parameters:
        assert f"\n    {name}: " in told, f"{function.__name__}: {name}"


@pytest.mark.parametrize("kind", [Recipe, *GROUPS.values(), Settings, onnxcalib.Preprocess])
def test_every_field_has_its_sentence(kind: Any) -> None:
    told = (inspect.getdoc(kind) or "").partition("Attributes:")[2]
    for field in fields(kind):
        assert f"\n    {field.name}: " in told, f"{kind.__name__}: {field.name}"


def test_sensitivity_and_allocation_are_those_of_the_command_line(
    here: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said_by(
        capsys, "sensitivity", here / "model.onnx", "-c", here / "data.npz", "--bits", BITS, "-o", tmp_path / "t.csv"
    )
    data = dict(np.load(here / "data.npz"))
    table = onnxcalib.sensitivity(onnx.load(here / "model.onnx"), data, BITS)
    assert onnxcalib.read_table(tmp_path / "t.csv") == table
    onnxcalib.write_table(table, tmp_path / "u.csv")
    assert (tmp_path / "u.csv").read_text() == (tmp_path / "t.csv").read_text()
    found = onnxcalib.allocate(table, compression=0.55, overrides={"fc": "w8a8"})
    assert found == onnxcalib.allocate(tmp_path / "t.csv", compression=0.55, overrides=["fc=w8a8"])
    assert str(found.choices["fc"]) == "w8a8"
    assert found.costs["size"] <= 0.55 * table.float_costs["size"]
    for wrong in ({"compression": 0.55, "method": "luck"}, {"limits": {"luck": 1}}, {}):
        with pytest.raises(RecipeError):
            onnxcalib.allocate(table, **wrong)


def test_a_curve_of_a_recipe(here: Path) -> None:
    recipe = Recipe(Pipeline.LIGHT, bits=BITS, compression=0.5, overrides={"fc": "w8a8"}, ranges="minmax")
    points = onnxcalib.curve(here / "model.onnx", here / "data.npz", recipe, points=3)
    exact = [point for point in points if point.method == "integer program"]
    assert len(exact) == 3
    assert [point.size for point in exact] == sorted(point.size for point in exact)
    assert all(str(point.allocation.choices["fc"]) == "w8a8" for point in points)
    for wrong in ("w8a8", Recipe()):
        with pytest.raises(RecipeError, match="nothing to compare"):
            onnxcalib.curve(here / "model.onnx", here / "data.npz", wrong)
    with pytest.raises(RecipeError, match="points=1"):
        onnxcalib.curve(here / "model.onnx", here / "data.npz", BITS, points=1)


def test_models_in_memory_measure_like_their_files(here: Path) -> None:
    files = [here / "a.onnx", here / "b.onnx"]
    test = here / "test.npz"
    by_path = onnxcalib.evaluate(files, test, here / "model.onnx")
    loaded = [onnx.load(path) for path in files]
    in_memory = onnxcalib.evaluate(loaded, dict(np.load(test)), onnx.load(here / "model.onnx"))
    for one, two in zip(by_path, in_memory, strict=True):
        assert (one.top1, one.agreement, one.sqnr_db, one.bytes) == (two.top1, two.agreement, two.sqnr_db, two.bytes)
    result = onnxcalib.quantize(here / "model.onnx", here / "data.npz")
    (row,) = onnxcalib.evaluate(result, test)
    assert row.top1 == by_path[1].top1
    one, two = (onnxcalib.compare(*pair, test, here / "model.onnx") for pair in (files, loaded))
    assert one.layers == two.layers
    assert {layer.bits for layer in one.layers} == {("w4a8", "w8a8")}


def test_findings_of_a_target(here: Path) -> None:
    assert onnxcalib.check(here / "b.onnx") == onnxcalib.check(onnx.load(here / "b.onnx"), "ort") == []
    assert onnxcalib.check(here / "a.onnx", target="tensorrt")


def test_answers_about_a_file(here: Path) -> None:
    found = onnxcalib.explain(onnx.load(here / "a.onnx"), model=here / "model.onnx", data=here / "data.npz")
    assert set(found) == {"accuracy", "float", "size", "speed", "bits"}
    assert all(found.values())
    (only,) = onnxcalib.explain(here / "a.onnx", questions=["size"]).values()
    assert f"{(here / 'a.onnx').stat().st_size:,}" in only[0]
    for wrong in ({"model": here / "model.onnx"}, {"questions": ["why"]}):
        with pytest.raises(RecipeError):
            onnxcalib.explain(here / "a.onnx", **wrong)


def test_a_report_of_a_result(here: Path, tmp_path: Path) -> None:
    model, data = onnx.load(here / "model.onnx"), dict(np.load(here / "data.npz"))
    result = onnxcalib.quantize(model, data)
    found = onnxcalib.report(result, model, [{"x": data["x"]}], tmp_path / "r.html", transform=lambda feed: feed["x"])
    assert (tmp_path / "r.html").stat().st_size > 0
    assert len(found["layers"]) == len(result.layers.layers)


def test_progress_hears_of_stages_and_the_log_too(here: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Watch:
        def __init__(self) -> None:
            self.stages: set[str] = set()
            self.events: list[str] = []

        def __call__(self, stage: str, done: int, total: int) -> None:
            assert 0 <= done <= total
            self.stages.add(stage)

        def event(self, event: Event) -> None:
            self.events.append(event.name)

    watch = Watch()
    with caplog.at_level(logging.DEBUG, logger="onnxcalib"):
        onnxcalib.quantize(
            here / "model.onnx", {"x": np.load(here / "data.npz")["x"][:4]}, Recipe("light"), progress=watch
        )
    assert "calibrate" in watch.stages
    assert {"start", "stage_start", "stage_end", "warning"} <= set(watch.events)
    logged = [(record.levelname, record.getMessage()) for record in caplog.records if record.name == "onnxcalib"]
    assert any(level == "WARNING" and "4 samples" in text for level, text in logged)
    assert any(level == "INFO" and text.startswith("statistics") for level, text in logged)


def test_the_command_line_says_a_warning_once(here: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.savez(tmp_path / "few.npz", x=np.load(here / "data.npz")["x"][:4])
    words = (
        "quantize",
        here / "model.onnx",
        "-c",
        tmp_path / "few.npz",
        "-o",
        tmp_path / "o.onnx",
        "--pipeline",
        "light",
    )
    _, _, said = said_by(capsys, *words)
    assert said.count("only 4 samples") == 1


def test_a_transform_of_files_is_refused_by_all(here: Path) -> None:
    for call in (onnxcalib.quantize, onnxcalib.sensitivity, onnxcalib.curve):
        with pytest.raises(DataError, match="transform"):
            call(here / "model.onnx", here / "data.npz", Recipe(), transform=lambda item: item)
    with pytest.raises(OnnxcalibError, match="transform"):
        onnxcalib.evaluate(here / "a.onnx", here / "data.npz", transform=lambda item: item)
