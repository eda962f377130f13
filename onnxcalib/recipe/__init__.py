"""What the user asked for: frozen dataclasses, read from and written to TOML."""

from __future__ import annotations

from onnxcalib.recipe.choices import (
    ENUMS,
    FLOAT_BITS,
    MAX_BITS,
    MIN_BITS,
    Activations,
    BatchNormReference,
    Engine,
    LayerOptimizer,
    OnBroken,
    Pipeline,
    Precision,
    RangeMethod,
    Rounding,
    Training,
    parse_bits,
    parse_choice,
    parse_pair,
)
from onnxcalib.recipe.groups import GROUPS, ActivationOptions, MixedPrecisionOptions, TrainingOptions, WeightOptions
from onnxcalib.recipe.keys import IMAGE_KEYS, IMAGES, KEYS
from onnxcalib.recipe.presets import PRESETS
from onnxcalib.recipe.recipe import DEFAULTS, RECIPE_FIELDS, RECIPE_KEYS, Recipe
from onnxcalib.recipe.settings import Settings, preprocess_of, settings_of
from onnxcalib.recipe.template import template
from onnxcalib.recipe.toml import read_options, read_recipe, read_settings, write_recipe, write_settings

__all__ = [
    "DEFAULTS", "ENUMS", "FLOAT_BITS", "GROUPS", "IMAGES", "IMAGE_KEYS", "KEYS", "MAX_BITS", "MIN_BITS", "PRESETS",
    "RECIPE_FIELDS", "RECIPE_KEYS", "ActivationOptions", "Activations", "BatchNormReference", "Engine",
    "LayerOptimizer",
    "MixedPrecisionOptions", "OnBroken", "Pipeline", "Precision", "RangeMethod", "Recipe", "Rounding",
    "Settings", "Training", "TrainingOptions", "WeightOptions", "parse_bits", "parse_choice", "parse_pair",
    "preprocess_of", "read_options", "read_recipe", "read_settings", "settings_of", "template", "write_recipe",
    "write_settings",
]  # fmt: skip
