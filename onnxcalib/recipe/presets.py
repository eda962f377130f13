"""Recipes by name."""

from __future__ import annotations

from typing import Any

from onnxcalib.recipe.choices import BatchNormReference, Pipeline, Precision, RangeMethod, Training
from onnxcalib.recipe.groups import TrainingOptions
from onnxcalib.recipe.recipe import Recipe

PRESETS = {
    # The paper's quantizer, ranges, rates and iterations, at the precision of its main table.
    "paper": Recipe(
        Pipeline.ADVANCED,
        bits=(Precision(4, 4),),
        edge_bits=8,
        target="paper",
        ranges=RangeMethod.AVERAGED,
        bn_reference=BatchNormReference.BATCHNORM,
        training=TrainingOptions(Training.PAPER, steps=100),
    ),
    # One range estimator instead of three that are measured, and no gradients.
    "fast": Recipe(Pipeline.LIGHT, ranges=RangeMethod.MSE),
    # Three times the steps of the default; not yet shown to be worth its time.
    "best": Recipe(Pipeline.ADVANCED, training=TrainingOptions(steps=300)),
}


def preset_options(name: str) -> dict[str, Any]:
    """What the preset sets, so that others can go on top."""
    plain = Recipe().options()
    return {key: value for key, value in PRESETS[name].options().items() if value != plain[key]}
