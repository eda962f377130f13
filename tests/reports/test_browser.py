"""The report in a real browser: tables sort and search, the curve can be walked, names are only names."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from command_line import call, case_in
from said import one_error

from onnxcalib import Pipeline, RangeMethod, Recipe, quantize, write_report
from onnxcalib.analysis.network import blocks
from onnxcalib.model.layers import find_layers
from onnxcalib.model.read import read_prepared
from onnxcalib.recipe import parse_bits
from onnxcalib.reports.network import network
from onnxcalib.reports.script import embedded
from onnxcalib.targets import find_target

BROWSER = shutil.which("chromium")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update",
)  # fmt: skip
in_browser = pytest.mark.skipif(BROWSER is None, reason="there is no chromium")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs of one model, each with its report."""
    folder = case_in(tmp_path_factory.mktemp("reports"), 16, 16)
    recipes = {
        "mixed": Recipe(Pipeline.LIGHT, parse_bits("w3a4,w8a8"), ranges=RangeMethod.MINMAX, compression=0.55),
        "eight": Recipe(ranges=RangeMethod.MINMAX),
    }
    for name, recipe in recipes.items():
        output = folder / f"{name}.onnx"
        result = quantize(folder / "model.onnx", folder / "data.npz", recipe, output=output)
        write_report(result, folder / "model.onnx", folder / "data.npz", folder / f"{name}.html")
    return folder


def after(page: Path, steps: str, tmp_path: Path) -> Any:
    """What some steps of a visitor return, on a copy of the page."""
    visited = tmp_path / "visited.html"
    result = f"<script>document.title = 'found' + JSON.stringify((() => {{ {steps} }})());</script></body>"
    visited.write_text(page.read_text(encoding="utf-8").replace("</body>", result), encoding="utf-8")
    assert BROWSER is not None
    command = [
        BROWSER,
        *FLAGS,
        "--window-size=500,900",
        f"--user-data-dir={tmp_path / 'profile'}",
        "--dump-dom",
        visited.as_uri(),
    ]
    text = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    found = re.search(r"<title>found(.*?)</title>", text, re.DOTALL)
    assert found is not None, text[-2000:]
    return json.loads(html.unescape(found.group(1)))


LAYERS = "const rows = () => Array.from(document.querySelectorAll('#all-layers tbody tr'));"


@in_browser
def test_a_head_sorts_and_the_box_searches(folder: Path, tmp_path: Path) -> None:
    steps = f"""{LAYERS}
    const head = document.querySelectorAll('#all-layers th')[4];
    const bytes = () => rows().map(row => Number(row.cells[4].textContent.replaceAll(',', '')));
    const given = bytes(); head.click(); const rising = bytes(); head.click(); const falling = bytes();
    const box = document.querySelector('input[data-table=all-layers]');
    box.value = 'gemm FC'; box.dispatchEvent(new Event('input'));
    return [given, rising, falling, rows().filter(row => !row.hidden).map(row => row.cells[0].textContent)];"""
    given, rising, falling, left = after(folder / "mixed.html", steps, tmp_path)
    assert rising == sorted(given)
    assert falling == sorted(given, reverse=True)
    assert left == ["fc"]


@in_browser
def test_the_curve_is_walked_from_the_smallest_file_to_the_largest(folder: Path, tmp_path: Path) -> None:
    steps = """const slider = document.getElementById('chooser'), told = [];
    for (const place of [slider.min, slider.max]) {
      slider.value = place; slider.dispatchEvent(new Event('input'));
      told.push([document.getElementById('chooser-told').textContent,
                 Array.from(document.querySelectorAll('#chooser-strip i')).map(cell => cell.title)]);
    }
    return told;"""
    (smallest, few), (largest, many) = after(folder / "mixed.html", steps, tmp_path)
    points = [each for each in _numbers(folder / "mixed.json")["curve"] if each["method"] == "integer program"]
    for told, cells, point in ((smallest, few, points[0]), (largest, many, points[-1])):
        assert told.startswith(f"{point['size']:.4f} of float")
        assert cells == [f"{name}: {bits}" for name, bits in point["bits"].items()]
    assert "5 at w8a8" in largest


@in_browser
def test_the_strip_of_three_hundred_layers_fits_a_narrow_window(folder: Path, tmp_path: Path) -> None:
    text = (folder / "mixed.html").read_text(encoding="utf-8")
    found = re.search(r'<script type="application/json" id="chooser-data">(.*?)</script>', text)
    assert found is not None
    data = json.loads(found.group(1))
    data["layers"] *= 60
    for point in data["points"]:
        point["bits"] *= 60
    page = tmp_path / "deep.html"
    page.write_text(text.replace(found.group(0), embedded(data)), encoding="utf-8")
    steps = """const strip = document.getElementById('chooser-strip'), last = strip.lastChild;
    return [strip.children.length, last.getBoundingClientRect().right - strip.getBoundingClientRect().right,
            last.getBoundingClientRect().width];"""
    cells, beyond, width = after(page, steps, tmp_path)
    assert cells == 300
    assert beyond < 0.5
    assert width > 0.5


@in_browser
@pytest.mark.parametrize("name", ["mixed", "eight", "runs"])
def test_pages_run_without_an_error_in_a_narrow_window(name: str, folder: Path, tmp_path: Path) -> None:
    if name == "runs":
        call("runs", "compare", str(folder / "mixed.html"), str(folder / "eight.html"), "-o", str(folder / "runs.html"))
    page = tmp_path / "page.html"
    watch = "<head><script>window.faults = []; window.onerror = text => faults.push(text);</script>"
    page.write_text((folder / f"{name}.html").read_text(encoding="utf-8").replace("<head>", watch), encoding="utf-8")
    faults, beyond = after(page, "return [faults, document.documentElement.scrollWidth - innerWidth];", tmp_path)
    assert faults == []
    assert beyond <= 0


def test_runs_are_compared_by_their_numbers(folder: Path, tmp_path: Path) -> None:
    page = tmp_path / "runs.html"
    call("runs", "compare", str(folder / "mixed.html"), str(folder / "eight.json"), "-o", str(page))
    text = page.read_text(encoding="utf-8")
    for name in ("mixed", "eight"):
        after_it = _numbers(folder / f"{name}.json")["outcome"]["quantized"]
        assert f"{after_it['bytes']:,}" in text
    assert text.count("<code>stem</code>") == 1
    other = tmp_path / "other.json"
    numbers = _numbers(folder / "mixed.json")
    numbers["repeat"]["sha256"]["model"] = "0" * 64
    other.write_text(json.dumps(numbers), encoding="utf-8")
    done = call("runs", "compare", str(folder / "eight.json"), str(other), "-o", str(tmp_path / "no.html"))
    one_error(done.stderr, "other.json", "eight.json")
    assert not (tmp_path / "no.html").exists()
    kept = (folder / "eight.html").read_bytes()
    done = call("runs", "compare", str(folder / "eight.json"), "-o", str(folder / "eight.html"))
    one_error(done.stderr, "eight.html")
    assert (folder / "eight.html").read_bytes() == kept


def test_blocks_are_layers_and_the_places_where_they_meet(folder: Path) -> None:
    model = read_prepared(folder / "model.onnx", find_target("ort"))
    found = blocks(model, find_layers(model))
    assert [(node["name"], [found[source]["name"] for source in node["reads"]]) for node in found] == [
        ("stem", []), ("depth", ["stem"]), ("project", ["depth"]), ("sum", ["stem", "project"]), ("head", ["sum"]),
        ("fc", ["head"]),
    ]  # fmt: skip


def test_a_deep_network_wraps_into_lines() -> None:
    nodes = [{"name": f"n{at}", "op": "Conv", "layer": True, "reads": [at - 1] if at else []} for at in range(300)]
    row = {"op": "Conv", "bits": "w4a8", "weight_bits": 4, "sqnr_db": 20.0}
    drawn = network({"network": nodes, "layers": [{"layer": node["name"], **row} for node in nodes]})
    places = [tuple(map(float, found)) for found in re.findall(r'<rect x="([\d.-]+)" y="([\d.-]+)" width="18"', drawn)]
    width, height = map(float, re.findall(r'viewBox="0 0 (\d+) (\d+)"', drawn)[0])
    assert len(set(places)) == 300
    assert all(0 <= x <= width - 18 and 0 <= y <= height - 18 for x, y in places)


def test_names_cannot_end_the_element_that_holds_them() -> None:
    text = embedded({"layers": ["</script><script>alert(1)</script>", "<!--"]})
    assert text.count("<") == 2
    assert json.loads(text[text.index(">") + 1 : text.rindex("<")])["layers"][1] == "<!--"


def _numbers(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found
