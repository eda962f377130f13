"""What is released: a wheel that works without the checkout, one version everywhere, a site that builds strictly."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from shown import ROOT

import onnxcalib
from onnxcalib import api, compat

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
NEEDED = {"py.typed", "targets/ort.toml", "models/fashion_mobilenet.onnx", "models/fashion_test.npz"}


def needs(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")


def command(*words: str | Path, cwd: Path, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment = kept if path is None else {**kept, "PYTHONPATH": str(path)}
    done = subprocess.run(
        [sys.executable, *map(str, words)], cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def test_a_wheel_runs_without_the_checkout(tmp_path: Path) -> None:
    needs("build")
    out, installed, empty = tmp_path / "dist", tmp_path / "installed", tmp_path / "empty"
    empty.mkdir()
    # By way of the sdist, as an index would build it.
    command("-m", "build", "--outdir", out, ROOT, cwd=empty)
    (sdist,), (wheel,) = out.glob("*.tar.gz"), out.glob("*.whl")
    assert onnxcalib.__version__ in sdist.name
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        archive.extractall(installed)
    assert {f"onnxcalib/{name}" for name in NEEDED} <= names
    own = {path.relative_to(ROOT).as_posix() for path in (ROOT / "onnxcalib").rglob("*.py")}
    assert own <= names
    assert not [name for name in names if name.startswith(("tests", "tools", "docs"))]
    where = command("-c", "import onnxcalib; print(onnxcalib.__file__)", cwd=empty, path=installed).stdout
    assert Path(where.strip()).is_relative_to(installed)
    program = ("-m", "onnxcalib.cli.main")
    assert onnxcalib.__version__ in command(*program, "--version", cwd=empty, path=installed).stdout
    found = "from onnxcalib.cli.demo import find_models; print(find_models())"
    models = Path(command("-c", found, cwd=empty, path=installed).stdout.strip())
    assert models.is_relative_to(installed)
    words = (
        "quantize",
        models / "fashion_mobilenet.onnx",
        "-c",
        models / "fashion_calibration.npz",
        "-o",
        "small.onnx",
    )
    command(*program, *words, "--ranges", "minmax", cwd=empty, path=installed)
    assert (empty / "small.onnx").stat().st_size > 0


def test_the_version_stands_in_one_place() -> None:
    version = onnxcalib.__version__
    assert "version" not in PROJECT
    assert PROJECT["dynamic"] == ["version"]
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    first = re.search(r"^## (\S+)", changes, re.MULTILINE)
    assert first is not None
    assert first[1].rstrip(",") == version
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\nversion: {version}\n" in citation
    assert f"\nlicense: {PROJECT['license']}\n" in citation


def test_the_site_builds_strictly(tmp_path: Path) -> None:
    needs("mkdocs")
    needs("mkdocstrings")
    command("-m", "mkdocs", "build", "--strict", "-q", "-f", ROOT / "mkdocs.yml", "-d", tmp_path / "site", cwd=tmp_path)
    reference = (tmp_path / "site" / "reference" / "index.html").read_text(encoding="utf-8")
    for page in (ROOT / "docs").glob("*.md"):
        own = "index.html" if page.stem == "index" else f"{page.stem}/index.html"
        assert (tmp_path / "site" / own).exists(), page.name
    missing = [name for name in (*api.__all__, *compat.__all__) if name not in reference]
    assert not missing


def test_every_page_is_in_the_menu() -> None:
    menu = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert [page.name for page in (ROOT / "docs").glob("*.md") if f": {page.name}\n" not in menu] == []


def test_every_public_name_is_in_the_reference() -> None:
    reference = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"^::: (\S+)", reference, re.MULTILINE))
    for name in api.__all__:
        home = getattr(api, name)
        module = home.__module__
        assert module in listed or f"{module}.{home.__qualname__}" in listed, name
