#!/usr/bin/env python3
"""Asks for the smallest file within an accuracy budget, and judges it on labelled images that had no part in it.

    python tools/budget.py                    # the demo model
    python tools/budget.py ZOO                # MobileNet-V2
    python tools/budget.py ZOO --images 200   # fewer of them: quicker, and not worth a claim

The first half of the labelled images goes to `quantize`, which holds half of them out to prove the drop; the second
half judges. ZOO holds mobilenet_v2_bn.onnx and imagenet_val2000.npz (`jpeg` bytes, `offsets`, `y`). Needs pillow.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from zoo import decoded, normalized

import onnxcalib
from onnxcalib import MixedPrecisionOptions, Recipe

MODELS = Path(__file__).parent.parent / "models"


def main() -> None:
    """Prints a row for each model and budget."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("zoo", type=Path, nargs="?")
    parser.add_argument("--images", type=int, help="How many labelled images there are (else all).")
    parser.add_argument("--drop", type=float, action="append", help="What may be lost, in points (else 1).")
    parser.add_argument("--bits", default="w4a4,w4a8,w8a8")
    parser.add_argument("--pipeline", default="light")
    given = parser.parse_args()
    if given.zoo is None:
        name, model, arrays = "demo", MODELS / "fashion_mobilenet.onnx", dict(np.load(MODELS / "fashion_test.npz"))
    else:
        images, labels = decoded(given.zoo / "imagenet_val2000.npz")
        arrays = {"input": normalized(images), "labels": labels.astype(np.int64)}
        name, model = "mobilenet_v2", given.zoo / "mobilenet_v2_bn.onnx"
    several = {key: value[: given.images] for key, value in arrays.items()}
    for drop in given.drop or [1.0]:
        recipe = Recipe(given.pipeline, given.bits, mixed_precision=MixedPrecisionOptions(max_drop=drop))
        _row(name, model, several, recipe)


def _row(name: str, model: Path, arrays: dict[str, Any], recipe: Recipe) -> None:
    half, began, most = len(arrays["labels"]) // 2, sum(os.times()[:4]), recipe.mixed_precision.max_drop
    asked, unseen = ({key: value[part] for key, value in arrays.items()} for part in (slice(half), slice(half, None)))
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "small.onnx"
        try:
            result = onnxcalib.quantize(model, asked, recipe, output=output)
        except onnxcalib.RecipeError as error:
            print(f"{name:14} allowed {most}: {error}")
            return
        spent = sum(os.times()[:4]) - began  # with that of processes it started
        small, whole = onnxcalib.evaluate([output, model], unseen, model)
    budget = result.budget
    assert budget is not None
    assert most is not None
    print(
        f"{name:14} allowed {most:g}; held out n {budget.proof.samples} {budget.proof.before:.2f} to "
        f"{budget.proof.after:.2f}, drop {budget.proof.value:.2f} at look {budget.looks}, "
        f"chance of more {100 * budget.proof.chance_above(most):.0f} %; unseen n {small.samples} {whole.top1:.2f} to "
        f"{small.top1:.2f}, drop {whole.top1 - small.top1:.2f}; size {small.bytes / whole.bytes:.3f} of float; "
        f"{len(budget.sizes)} sizes tried, {spent:.0f} CPU s",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
