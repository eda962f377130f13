"""What to type about a layer that hurts."""

from __future__ import annotations

import glob
import math
import shlex
from collections.abc import Mapping
from typing import Any

from onnxcalib.recipe import MAX_BITS, Pipeline, Precision, Recipe

BASE = Precision(MAX_BITS, MAX_BITS)


def advice(row: Mapping[str, Any], recipe: Recipe, size: float) -> str:
    """The options that give a layer more bits; size is that of all constants, relative to float."""
    name, bits = row["layer"], Precision(row["weight_bits"], row["activation_bits"])
    if len(recipe.bits) > 1 and bits < recipe.base:
        return pin(name, recipe.base)
    if len(recipe.bits) > 1 or bits == BASE:
        return exclude(name)
    pipeline = Pipeline.LIGHT if recipe.pipeline is Pipeline.PLAIN else recipe.pipeline
    # A little room beside the layer's own bytes: the integer program reckons with biases that tuning may add.
    room = math.ceil(100 * 1.05 * size * (1 + row["byte_share"])) / 100
    return f"--pipeline {pipeline} --bits {recipe.bits[0]},{BASE} --compression {room} {pin(name, BASE)}"


def without_recipe(row: Mapping[str, Any]) -> str:
    """The same where nobody knows how the file was made."""
    narrow = min(row["weight_bits"], row["activation_bits"]) < MAX_BITS
    return f"{pin(row['layer'], BASE)} with {BASE} among --bits" if narrow else exclude(row["layer"])


def pin(layer: str, precision: Precision) -> str:
    """The option that fixes one layer's bits."""
    return f"--pin {shlex.quote(f'{glob.escape(layer)}={precision}')}"


def exclude(layer: str) -> str:
    """The option that leaves one layer float."""
    return f"--exclude {shlex.quote(glob.escape(layer))}"
