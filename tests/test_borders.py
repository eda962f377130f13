"""The rooms of the house: who may import what, and that imports go downwards only."""

from __future__ import annotations

import ast
from pathlib import Path, PurePosixPath

import pytest

import onnxcalib

ROOT = Path(onnxcalib.__file__).parent
FILES = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*.py"))

# From the ground up: each room may import those before it.
FLOORS = (
    "names", "errors", "files", "progress", "numerics", "data", "targets", "recipe", "plan", "model", "checks",
    "runtime", "executors", "autodiff", "algorithms", "mixed_precision", "analysis", "cache", "pipeline", "reports",
    "api", "compat", "cli", "__main__",
)  # fmt: skip

# The package, and the files that alone may import it.
ROOMS = {
    "onnx_graphsurgeon": ("model/*",),
    "onnxruntime": ("runtime/*", "autodiff/training/*"),
    "highspy": ("mixed_precision/solver.py",),
    "click": ("cli/*",),
    "rich": ("cli/*",),
    "matplotlib": ("reports/*",),
    "distributed": ("executors/dask.py",),
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


def room_of(name: str) -> str:
    return name.split("/", maxsplit=1)[0].removesuffix(".py")


def rooms_read(name: str) -> set[str]:
    inner = [module.split(".") for module in imported(name) if module.startswith("onnxcalib.")]
    return {parts[1] for parts in inner} - {"__version__", "__file__"}


def test_the_source_is_there() -> None:
    expected = {"pipeline/stages.py", "model/qdq.py", "runtime/session.py", "mixed_precision/solver.py", "cli/main.py"}
    assert expected <= set(FILES)


def test_every_room_has_its_floor() -> None:
    assert {room_of(name) for name in FILES} - {"__init__"} == set(FLOORS)


@pytest.mark.parametrize("room", FLOORS)
def test_imports_go_downwards_only(room: str) -> None:
    below = set(FLOORS[: FLOORS.index(room) + 1])
    for name in FILES:
        if room_of(name) == room:
            assert rooms_read(name) <= below, name


@pytest.mark.parametrize(("package", "rooms"), ROOMS.items())
def test_a_package_stays_in_its_rooms(package: str, rooms: tuple[str, ...]) -> None:
    users = [name for name in FILES if package in packages(name)]
    assert users, f"nobody imports {package}: the border guards nothing"
    assert [name for name in users if not any(PurePosixPath(name).match(room) for room in rooms)] == []


def test_numerics_know_numpy_only() -> None:
    known = {"__future__", "collections", "dataclasses", "enum", "functools", "math", "numpy", "typing", "onnxcalib"}
    for name in FILES:
        if name.startswith("numerics/"):
            assert packages(name) <= known, name


def test_the_runtime_is_imported_only_when_it_is_needed() -> None:
    for name in FILES:
        tree = ast.parse((ROOT / name).read_text(encoding="utf-8"))
        top = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
        assert not [node for node in top if "onnxruntime" in ast.unparse(node)], name
