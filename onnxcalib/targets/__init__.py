"""Hardware targets by name."""

from __future__ import annotations

from onnxcalib.errors import RecipeError, near
from onnxcalib.targets.ort import ORT
from onnxcalib.targets.paper import PAPER
from onnxcalib.targets.target import Placement, Storage, Target

TARGETS = {target.name: target for target in (ORT, PAPER)}

__all__ = ["TARGETS", "Placement", "Storage", "Target", "find_target"]


def find_target(name: str) -> Target:
    """The target of that name."""
    if name not in TARGETS:
        raise RecipeError(f"'{name}' is not a target.", near(name, TARGETS))
    return TARGETS[name]
