"""Hardware targets, by name or as TOML files."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from onnxcalib.errors import RecipeError, near
from onnxcalib.targets.reading import read_target
from onnxcalib.targets.target import (
    Bias,
    Constants,
    Dynamic,
    Format,
    Narrow,
    Placement,
    Severity,
    Storage,
    Target,
    Verdict,
)

NAMES = ("ort", "ort-compat", "openvino", "rknn", "tensorrt", "qnn", "xnnpack", "vitis", "qonnx", "paper")

__all__ = [
    "NAMES",
    "TARGETS",
    "Bias",
    "Constants",
    "Dynamic",
    "Format",
    "Narrow",
    "Placement",
    "Severity",
    "Storage",
    "Target",
    "Verdict",
    "find_target",
]


def _shipped() -> dict[str, Target]:
    known: dict[str, Target] = {}
    for name in NAMES:
        known[name] = read_target(resources.files(__package__) / f"{name}.toml", f"{name}.toml", known)
    return known


TARGETS = _shipped()


def find_target(name: str) -> Target:
    """The target of that name, or the one that a TOML file describes."""
    if name.endswith(".toml"):
        return read_target(Path(name), name, TARGETS)
    if name not in TARGETS:
        hint = near(name, TARGETS)
        raise RecipeError(f"'{name}' is not a target.", f"{hint} A target of your own is a file: NAME.toml.")
    return TARGETS[name]
