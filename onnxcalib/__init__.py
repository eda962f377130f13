"""Post-training quantization from ONNX to ONNX."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from onnxcalib.api import *  # noqa: F403 - api.py lists the names

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """The API is imported when it is first asked for: the command line starts sooner, and can be interrupted."""
    return getattr(importlib.import_module("onnxcalib.api"), name)
