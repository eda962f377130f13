"""What every probe does: read a file and its feeds, run a tool on them, write the outputs, and say the rest as JSON.

    python probe_TOOL.py MODEL.onnx FEEDS.npz OUTPUTS.npz

FEEDS holds one array for each model input, samples first; the tool sees one sample at a time. A probe runs in the
environment of its tool and knows nothing of onnxcalib.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

Feed = dict[str, np.ndarray[Any, Any]]
# What a probe finds: outputs of each sample, and layers, int8, note where the tool tells them.
Found = tuple[list[list[np.ndarray[Any, Any]]], dict[str, Any]]


def samples(path: Path) -> Iterator[Feed]:
    """One sample after the other."""
    arrays = dict(np.load(path))
    for place in range(len(next(iter(arrays.values())))):
        yield {name: values[place : place + 1] for name, values in arrays.items()}


def main(version: Callable[[], str], probe: Callable[[Path, list[Feed]], Found]) -> None:
    """Runs the probe; what the tool refuses is part of the answer, in its own words."""
    model, feeds, outputs = (Path(argument) for argument in sys.argv[1:4])
    answer: dict[str, Any] = {"version": version(), "loads": True}
    try:
        found, told = probe(model, list(samples(feeds)))
        answer |= told
        np.savez(
            outputs,
            *(np.concatenate([np.asarray(part, np.float32) for part in parts]) for parts in zip(*found, strict=True)),
        )
    except Exception as error:  # every tool has exceptions of its own
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        answer |= {"loads": False, "error": f"{type(error).__name__}: {lines[0] if lines else ''}"[:300]}
    print(json.dumps(answer))
