"""The last words of a run: what was lost, and what to do next."""

from __future__ import annotations

import math
import shlex
from pathlib import Path

from onnxcalib.pipeline.result import Result
from onnxcalib.recipe import Pipeline

ENOUGH_DB = 20.0  # an error of a hundredth: below, it is worth a look


def lost(result: Result) -> list[str]:
    """One line on what the file lost, as far as the run itself can tell."""
    noise = {} if result.noise is None else result.noise.sqnr_db
    if not noise:
        return []
    name = min(noise, key=noise.__getitem__)
    if math.isinf(noise[name]):
        return ["lost: nothing that the calibration samples show"]
    part = 100 * 10 ** (-noise[name] / 10)
    worst = f"output '{name}' has {noise[name]:.1f} dB of signal to noise" + (", the least" if len(noise) > 1 else "")
    return [f"lost: {worst}, an error of {part:.2g} % of its power on calibration samples"]


def next_step(result: Result, model: Path, output: Path) -> str:
    """What a person would type next."""
    worst = min(result.noise.sqnr_db.values(), default=math.inf) if result.noise is not None else math.inf
    files = shlex.join([str(output), "-d", "TEST", "--reference", str(model)])
    if worst >= ENOUGH_DB:
        return f"onnxcalib evaluate {files}, with data that it has not seen"
    if result.recipe.pipeline is Pipeline.PLAIN:
        return "give the same command with --pipeline light, which tunes what rounding lost"
    return f"onnxcalib explain {shlex.quote(str(output))} --model {shlex.quote(str(model))} -d DATA names the layers"
