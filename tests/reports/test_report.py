"""The report: a page that stands alone, numbers that agree with plain onnxruntime, figures that are files."""

from __future__ import annotations

import hashlib
import html.parser
import json
import re
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import numpy as np
import onnx
import pytest
from command_line import call, case_in
from prepared import scaled_as
from said import names, refused

from models import conv_net, feed_for, run
from onnxcalib import OutputError, Pipeline, RangeMethod, Recipe, quantize, write_report
from onnxcalib.analysis.advice import advice
from onnxcalib.analysis.layer_rows import layer_rows
from onnxcalib.data import first, open_data, shuffled
from onnxcalib.model.quantized import read_quantized
from onnxcalib.model.shapes import input_specs
from onnxcalib.model.subgraph import with_outputs
from onnxcalib.recipe import parse_bits, read_recipe
from onnxcalib.reports import plots
from onnxcalib.reports.figures import bits
from onnxcalib.reports.names import LONGEST, MOST, label_layers, short
from onnxcalib.reports.svg import finish
from onnxcalib.reports.write import DIAGNOSED, check_report, publish

SECTIONS = (
    "outcome", "bits", "network", "sensitivity", "curve", "layers", "histograms", "tuning", "size", "float", "repeat",
)  # fmt: skip
PNG = b"\x89PNG\r\n\x1a\n"
VOID = {"meta", "br", "path", "use", "rect", "circle", "input"}


class Page(html.parser.HTMLParser):
    """What a browser would see, and whether every element is closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.resources: list[str] = []
        self.words: list[str] = []
        self.foreign = 0
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.ids += [value for name, value in attrs if name == "id" and value]
        self.resources += [values[name] or "" for name in ("src", "href", "xlink:href", "data") if name in values]
        self.foreign += tag in ("link", "iframe", "object") or (tag == "script" and "src" in values)
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(self.words)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of a mixed-precision run, measured on labelled data."""
    folder = case_in(tmp_path_factory.mktemp("mixed"), 32, 40)
    recipe = Recipe(Pipeline.LIGHT, parse_bits("w3a4,w8a8"), ranges=RangeMethod.MINMAX, compression=0.55)
    result = quantize(folder / "model.onnx", folder / "data.npz", recipe, output=folder / "small.onnx")
    path = folder / "report.html"
    write_report(result, folder / "model.onnx", folder / "data.npz", path, test=folder / "test.npz")
    return path


def numbers_of(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
    return found


def test_the_page_stands_alone_and_has_every_section(mixed: Path) -> None:
    text = mixed.read_text(encoding="utf-8")
    page = Page(text)
    assert page.open == []
    assert [key for key in page.ids if key in SECTIONS] == list(SECTIONS)
    assert len(set(page.ids)) == len(page.ids)
    assert page.foreign == 0
    assert not re.search(r"https?:|['\"(]//", text)
    assert "default-src 'none'" in text
    assert "@import" not in text
    assert all(name.startswith("#") and name[1:] in page.ids for name in page.resources)
    assert set(re.findall(r"url\(#([^)]*)\)", text)) <= set(page.ids)
    assert "prefers-color-scheme: dark" in text


def test_an_accuracy_budget_is_told_with_its_proof(tmp_path: Path) -> None:
    folder, path = case_in(tmp_path, 16, 24), tmp_path / "report.html"
    recipe = Recipe(Pipeline.LIGHT, "w3a4,w8a8", ranges=RangeMethod.MINMAX, max_drop=90.0)
    result = quantize(folder / "model.onnx", folder / "test.npz", recipe)
    write_report(result, folder / "model.onnx", folder / "test.npz", path)
    assert result.budget is not None
    told = numbers_of(path)["outcome"]["budget"]
    assert (told["drop"], told["samples"], told["most"]) == (result.budget.proof.value, 12, 90.0)
    names(Page(path.read_text(encoding="utf-8")).text, "Accuracy budget", "top1", "12 samples", "90 allowed")


def test_numbers_that_are_none_are_written_as_such(mixed: Path, tmp_path: Path) -> None:
    found = numbers_of(mixed)
    found["loss"]["whole"] = float("nan")
    found["curve"][0]["loss"] = float("inf")
    publish(found, tmp_path / "again.html")
    again = numbers_of(tmp_path / "again.html")
    assert (again["loss"]["whole"], again["curve"][0]["loss"]) == (None, None)
    assert Page((tmp_path / "again.html").read_text(encoding="utf-8")).open == []


def test_figures_follow_the_theme_and_are_never_empty(mixed: Path) -> None:
    text = mixed.read_text(encoding="utf-8")
    drawings = re.findall(r"<svg viewBox.*?</svg>", text, re.DOTALL)
    assert len(drawings) == 8
    for drawing in drawings:
        assert drawing.count("<path") > 5
        assert "var(--ink)" in drawing
        assert "#1f2328" not in drawing
        assert "#ffffff" not in drawing
    for name in ("stem: w", "depth: w", "project at w3a4:"):
        assert f"<title>{name}" in text


def test_figures_are_files_too(mixed: Path) -> None:
    folder = mixed.with_name("report_figures")
    figures = {path.stem for path in folder.iterdir()}
    assert figures == {"bits", "sensitivity", "curve", "sqnr", "hurting", "histograms", "tuning", "size"}
    for name in figures:
        assert (folder / f"{name}.png").read_bytes().startswith(PNG)
        assert ET.parse(folder / f"{name}.svg").getroot().tag.endswith("svg")


def test_noise_in_the_numbers_is_that_of_plain_onnxruntime(mixed: Path) -> None:
    written = onnx.load(mixed.with_name("small.onnx"))
    ready = scaled_as(mixed.with_name("model.onnx"), written)
    looked_at = first(shuffled(open_data(mixed.with_name("data.npz"), input_specs(ready)), 0), DIAGNOSED)
    data = next(iter(looked_at.batches(DIAGNOSED)))
    rows = numbers_of(mixed)["layers"]
    assert [row["layer"] for row in rows] == ["stem", "depth", "project", "head", "fc"]
    for row in rows:
        values = []
        for model in (ready, written):
            tensor = next(node.output[0] for node in model.graph.node if node.name == row["layer"])
            values.append(run(with_outputs(model, [tensor]), data)[tensor].astype(np.float64))
        reference, guess = values
        expected = 10 * np.log10((reference**2).sum() / ((reference - guess) ** 2).sum())
        assert row["sqnr_db"] == pytest.approx(expected, abs=0.05)
    assert sum(row["loss_share"] for row in rows) == pytest.approx(1)


def test_outcome_agrees_with_plain_onnxruntime(mixed: Path) -> None:
    test = dict(np.load(mixed.with_name("test.npz")))
    labels = test.pop("labels")
    reference, guess = (run(mixed.with_name(name), test)["y"] for name in ("model.onnx", "small.onnx"))
    out = numbers_of(mixed)["outcome"]
    same = (reference.argmax(axis=1) == guess.argmax(axis=1)).mean()
    assert out["quantized"]["agreement"] == pytest.approx(100 * same)
    assert out["quantized"]["top1"] == pytest.approx(100 * (guess.argmax(axis=1) == labels).mean())
    assert out["float"]["top1"] == 100
    assert out["quantized"]["bytes"] == mixed.with_name("small.onnx").stat().st_size
    assert f"{100 * same:.2f} %" in Page(mixed.read_text(encoding="utf-8")).text


def test_bytes_add_up_to_the_file(mixed: Path) -> None:
    parts = numbers_of(mixed)["bytes"]
    assert sum(parts.values()) == mixed.with_name("small.onnx").stat().st_size
    assert min(parts.values()) >= 0
    rows = numbers_of(mixed)["layers"]
    assert sum(row["bytes"] for row in rows) <= parts["quantized weights"]


def test_the_run_can_be_repeated_from_its_report(mixed: Path, tmp_path: Path) -> None:
    repeat = numbers_of(mixed)["repeat"]
    (tmp_path / "recipe.toml").write_text(repeat["recipe"], encoding="utf-8")
    again = tmp_path / "again.onnx"
    recipe = read_recipe(tmp_path / "recipe.toml")
    quantize(mixed.with_name("model.onnx"), mixed.with_name("data.npz"), recipe, output=again)
    assert hashlib.sha256(again.read_bytes()).hexdigest() == repeat["sha256"]["output"]
    model = mixed.with_name("model.onnx").read_bytes()
    assert repeat["sha256"]["model"] == hashlib.sha256(model).hexdigest()


def test_the_curve_and_the_chosen_point(mixed: Path) -> None:
    numbers = numbers_of(mixed)
    assert {point["method"] for point in numbers["curve"]} == set(plots.LOOKS)
    assert numbers["chosen"]["size"] <= 0.55
    losses = [point["loss"] for point in numbers["curve"] if point["method"] == "integer program"]
    assert losses == sorted(losses, reverse=True)


def test_what_to_type_about_a_bad_layer_works(mixed: Path) -> None:
    rows = [row for row in numbers_of(mixed)["layers"] if "advice" in row]
    assert rows
    worst = next(row for row in rows if row["bits"] != "w8a8")
    assert worst["advice"] == f"--override {worst['layer']}=w8a8"
    recipe = Recipe(
        Pipeline.LIGHT, parse_bits("w3a4,w8a8"), ranges=RangeMethod.MINMAX, compression=0.9,
        overrides=(f"{worst['layer']}=w8a8",),
    )  # fmt: skip
    result = quantize(mixed.with_name("model.onnx"), mixed.with_name("data.npz"), recipe)
    assert str(result.plan.precisions[worst["layer"]]) == "w8a8"


def test_a_plain_run_says_what_it_has_no_figure_for(tmp_path: Path) -> None:
    model = conv_net()
    data = feed_for(model, 16)
    result = quantize(model, data, Recipe(ranges=RangeMethod.MINMAX, exclude=("head",)))
    numbers = write_report(result, model, data, tmp_path / "plain.html")
    page = Page((tmp_path / "plain.html").read_text(encoding="utf-8"))
    assert [key for key in page.ids if key in SECTIONS] == list(SECTIONS)
    figures = {path.stem for path in (tmp_path / "plain_figures").iterdir()}
    assert figures == {"bits", "sqnr", "hurting", "histograms", "size"}
    (left,) = numbers["float"]
    assert (left["node"], left["op"]) == ("head", "Conv")
    names(left["reason"], "--exclude")
    names(page.text, "--exclude", "calibrated")  # the figures are those of the samples that it has seen
    assert numbers["outcome"]["quantized"]["top1"] is None


def test_what_to_type_after_a_run_at_one_precision_works(tmp_path: Path) -> None:
    model = conv_net()
    data = feed_for(model, 16)
    onnx.save(model, tmp_path / "model.onnx")
    np.savez(tmp_path / "data.npz", **data)
    result = quantize(model, data, Recipe(bits=parse_bits("w4a4"), ranges=RangeMethod.MINMAX))
    rows = layer_rows(read_quantized(result.model), result.layers, None)
    typed = advice(rows[2], result.recipe)
    done = call(
        "quantize", tmp_path / "model.onnx", "-c", tmp_path / "data.npz", "-o", tmp_path / "out.onnx",
        "--bits", "w4a4", *shlex.split(typed), "--ranges", "minmax",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = {layer.name: layer.bits for layer in read_quantized(onnx.load(tmp_path / "out.onnx")).layers}
    assert found["project"] == "w8a8"


def test_three_hundred_layers_thin_their_labels_out(mixed: Path) -> None:
    row = numbers_of(mixed)["layers"][0]
    rows = [{**row, "layer": f"/stages/stages.{place}/block<{place}>/conv/Conv"} for place in range(300)]
    drawn = bits({"layers": rows})
    assert drawn is not None
    picture = finish(drawn)
    assert picture.inline.count("<title>") == 600
    assert "block&lt;299&gt;" in picture.inline
    assert 20 <= len(re.findall(r"<text[^>]*>[^<]*conv</text>", picture.inline)) <= MOST


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("/blocks/blocks.0/layers/layers.3/Conv", "blocks.0/layers.3"),
        ("stem", "stem"),
        ("Conv", "Conv"),
        ("/model/encoder/layer.11/attention/output/dense/MatMul", "…/attention/output/dense"),
        ("x" * 40, "…" + "x" * (LONGEST - 1)),
    ],
)
def test_short_names_keep_the_telling_part(name: str, shown: str) -> None:
    assert short(name) == shown


def test_labels_never_exceed_what_fits() -> None:
    class Axes:
        shown: Mapping[int, str] = {}

        def set_xticks(self, places: list[int], names: list[str], **_: Any) -> None:
            self.shown = dict(zip(places, names, strict=True))

        def set_xlim(self, *_: float) -> None:
            pass

    for count in (1, MOST, MOST + 1, 300):
        axes = Axes()
        label_layers(axes, [f"layer{place}" for place in range(count)])
        assert 0 < len(axes.shown) <= MOST
        assert axes.shown[0] == "layer0"


def test_a_report_that_cannot_be_written_is_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with refused(OutputError, tmp_path / "report.pdf", ".html"):
        check_report(tmp_path / "report.pdf")
    with refused(OutputError, tmp_path / "none"):
        check_report(tmp_path / "none" / "report.html")
    (tmp_path / "report_figures").write_text("")
    with refused(OutputError, tmp_path / "report_figures"):
        check_report(tmp_path / "report.html")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with refused(OutputError, "matplotlib", "pip install 'onnxcalib[report]'"):
        check_report(tmp_path / "other.html")
