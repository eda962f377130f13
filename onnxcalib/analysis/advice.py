"""What to type about a layer that hurts."""

from __future__ import annotations

import glob
import shlex
from collections.abc import Mapping
from typing import Any

from onnxcalib.recipe import FLOAT_BITS, MAX_BITS, Precision, Recipe
from onnxcalib.recipe.overrides import FLOAT

BASE = Precision(MAX_BITS, MAX_BITS)


def advice(row: Mapping[str, Any], recipe: Recipe) -> str:
    """The option that gives a layer more bits, or leaves it float where there are no more."""
    name, bits = row["layer"], Precision(row["weight_bits"], row["activation_bits"])
    if len(recipe.bits) > 1 and bits < recipe.base:
        return override(name, recipe.base)
    if bits.weight >= BASE.weight and bits.activation >= BASE.activation:
        return override(name, FLOAT)
    return override(name, Precision(BASE.weight, FLOAT_BITS) if bits.weight_only else BASE)


def without_recipe(row: Mapping[str, Any]) -> str:
    """The same where nobody knows how the file was made."""
    narrow = min(row["weight_bits"], row["activation_bits"]) < MAX_BITS
    return override(row["layer"], BASE if narrow else FLOAT)


def override(layer: str, value: Precision | str) -> str:
    """The option that fixes what one layer gets."""
    return f"--override {shlex.quote(f'{glob.escape(layer)}={value}')}"
