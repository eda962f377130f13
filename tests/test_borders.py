"""The rooms of the house: who may import what."""

from __future__ import annotations

import ast
from pathlib import Path, PurePosixPath

import pytest

import onnxcalib

ROOT = Path(onnxcalib.__file__).parent
FILES = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*.py"))

# The package, and the files that alone may import it.
ROOMS = {
    "onnx_graphsurgeon": "model/*",
    "onnxruntime": "engine/*",
    "highspy": "stages/program.py",
    "click": "cli/*",
}


def imported(name: str) -> set[str]:
    """Every module that a file imports, at its top or inside a function, by statement or by name."""
    modules = set()
    for node in ast.walk(ast.parse((ROOT / name).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name} has a relative import"
            modules |= {node.module or ""} | {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("importlib.import_module", "__import__"):
            modules |= {argument.value for argument in node.args if isinstance(argument, ast.Constant)}
    return modules


def packages(name: str) -> set[str]:
    return {module.split(".")[0] for module in imported(name)}


def test_the_source_is_there() -> None:
    assert {"pipeline.py", "model/qdq.py", "engine/inference.py", "stages/allocate.py", "cli/main.py"} <= set(FILES)


@pytest.mark.parametrize(("package", "room"), ROOMS.items())
def test_a_package_stays_in_its_room(package: str, room: str) -> None:
    users = [name for name in FILES if package in packages(name)]
    assert users, f"nobody imports {package}: the border guards nothing"
    assert [name for name in users if not PurePosixPath(name).match(room)] == []


def test_numerics_know_numpy_only() -> None:
    for name in FILES:
        if name.startswith("numerics/"):
            foreign = packages(name) & {"onnx", "onnxruntime", "onnx_graphsurgeon", "google", "click", "rich"}
            assert foreign == set(), name
            inner = {module for module in imported(name) if module.startswith("onnxcalib.")}
            assert all(module.startswith("onnxcalib.numerics") for module in inner), name


def test_only_the_command_line_imports_the_command_line() -> None:
    users = [name for name in FILES if any(module.startswith("onnxcalib.cli") for module in imported(name))]
    assert [name for name in users if not name.startswith("cli/")] == []


def test_the_runtime_is_imported_only_when_it_is_needed() -> None:
    for name in FILES:
        tree = ast.parse((ROOT / name).read_text(encoding="utf-8"))
        top = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
        assert not [node for node in top if "onnxruntime" in ast.unparse(node)], name
