"""onnxcalib by its own pipelines, target ort."""

from __future__ import annotations

from common import Asked, main

import onnxcalib
from onnxcalib import Recipe


def quantize(asked: Asked) -> str | None:
    """METHOD is the pipeline."""
    options = {"edge_bits": 8} if asked.weight_bits < 8 else {}
    if asked.method == "advanced" and asked.steps:
        options["steps"] = asked.steps
    recipe = Recipe(asked.method, bits=f"w{asked.weight_bits}a8", **options)
    onnxcalib.quantize(asked.model, asked.calibration, recipe, output=asked.output)
    return None


if __name__ == "__main__":
    main("onnxcalib", quantize)
