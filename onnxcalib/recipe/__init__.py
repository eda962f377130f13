"""What the user asked for: frozen dataclasses, read from and written to TOML."""

from __future__ import annotations

from onnxcalib.recipe.choices import (
    MAX_BITS,
    MIN_BITS,
    BatchNormReference,
    Engine,
    LayerOptimizer,
    Pipeline,
    Precision,
    RangeMethod,
    Training,
    parse_bits,
    parse_choice,
    parse_pair,
)
from onnxcalib.recipe.recipe import ADVANCED, MIXED, Recipe
from onnxcalib.recipe.toml import read_options, read_recipe, write_recipe

__all__ = [
    "ADVANCED", "MAX_BITS", "MIN_BITS", "MIXED", "BatchNormReference", "Engine", "LayerOptimizer", "Pipeline",
    "Precision", "RangeMethod", "Recipe", "Training", "parse_bits", "parse_choice", "parse_pair", "read_options",
    "read_recipe", "write_recipe",
]  # fmt: skip
