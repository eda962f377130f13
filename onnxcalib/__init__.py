"""Post-training quantization from ONNX to ONNX."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from onnxcalib import compat as compat
    from onnxcalib.api import *  # noqa: F403 - api/ lists the names

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """The API is imported when it is first asked for: the command line starts sooner, and can be interrupted."""
    if name == "compat":
        return importlib.import_module("onnxcalib.compat")
    if name.startswith("__"):
        raise AttributeError(f"module 'onnxcalib' has no attribute '{name}'")
    return getattr(importlib.import_module("onnxcalib.api"), name)


def __dir__() -> list[str]:
    return sorted([*importlib.import_module("onnxcalib.api").__all__, "__version__", "compat"])
