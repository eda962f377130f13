#!/usr/bin/env python3
"""What quantizing costs beside the least that it could: a float pass over the samples, and onnxruntime's quantizer.

    python tools/floor_cost.py MODEL.onnx DATA.npz      # any model; arrays by the names of its inputs, samples first
    python tools/floor_cost.py MODEL.onnx DATA.npz plain "light, report"   # some of the rows
    python tools/benchmark.py ZOO floor                 # every bound on time and memory, on the models of the benchmark

Every figure comes from a process of its own. CPU seconds are those of all threads: on a busy machine they say more.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from own_process import measured as in_own_process
from own_process import tell

import onnxcalib
from onnxcalib import Pipeline, Recipe
from onnxcalib.api import report
from onnxcalib.model.read import read_prepared
from onnxcalib.recipe import parse_bits
from onnxcalib.targets import find_target

Feed = dict[str, np.ndarray[Any, Any]]
BATCH = 8
MIXED = Recipe(Pipeline.LIGHT, bits=parse_bits("w4a8,w8a8"), compression=0.18)
TRAINED = Recipe(Pipeline.ADVANCED, bits=parse_bits("w4a4"), edge_bits=8, steps=1)  # more add time and no memory


def compare(model: Path, data: Path, kinds: Sequence[str] = ()) -> None:
    """One model: each way of quantizing it in float passes, and beside quantize_static; by CPU time."""
    floats, static = (measured(kind, model, data) for kind in ("float", "quantize_static"))
    print(f"{model.stem}: a float pass takes {floats['seconds']:.2f} s, {floats['cpu']:.2f} s of CPU", flush=True)
    _tell("quantize_static", static, floats, static)
    for kind in kinds or USUAL:
        _tell(kind, measured(kind, model, data), floats, static)


def _tell(kind: str, row: dict[str, Any], floats: dict[str, Any], static: dict[str, Any]) -> None:
    print(
        f"  {kind:16} {row['seconds']:7.2f} s {row['seconds'] / static['seconds']:5.2f} x quantize_static   "
        f"CPU {row['cpu']:7.2f} s {row['cpu'] / static['cpu']:5.2f} x {row['cpu'] / floats['cpu']:6.1f} float passes   "
        f"peak {row['MB']:5} MB",
        flush=True,
    )


def measured(kind: str, model: Path, data: Path) -> dict[str, Any]:
    """What one way of quantizing takes: seconds, CPU seconds and peak memory."""
    return in_own_process(__file__, "--one", kind, model, data)


def _one(kind: str, model: Path, data: Path) -> None:
    """Prints what one way of quantizing took in this process."""
    ort.set_default_logger_severity(4)
    tell(lambda: KINDS[kind](model, data))


def _feeds(data: Path, size: int) -> Iterator[Feed]:
    with np.load(data) as held:
        arrays = {name: held[name] for name in held.files if name != "labels"}
    samples = len(next(iter(arrays.values())))
    return ({name: array[at : at + size] for name, array in arrays.items()} for at in range(0, samples, size))


def _float(model: Path, data: Path) -> None:
    session = ort.InferenceSession(str(model), providers=["CPUExecutionProvider"])
    fixed = session.get_inputs()[0].shape[:1]
    for feed in _feeds(data, fixed[0] if fixed and isinstance(fixed[0], int) else BATCH):
        session.run(None, feed)


def _static(model: Path, data: Path) -> None:
    """Min-max and a scale a channel, on the model with batch norm folded, as its pre-processing would."""
    from onnxruntime import quantization

    class Reader(quantization.CalibrationDataReader):  # type: ignore[misc]
        def __init__(self, feeds: Iterable[Feed]) -> None:
            self._feeds = iter(feeds)

        def get_next(self) -> Feed | None:
            return next(self._feeds, None)

    with tempfile.TemporaryDirectory() as folder:
        folded = Path(folder) / "folded.onnx"
        onnxcalib.write_model(read_prepared(model, find_target("ort")).proto, folded)
        written = str(Path(folder) / "static.onnx")
        quantization.quantize_static(str(folded), written, Reader(_feeds(data, 1)), per_channel=True)


def _ours(recipe: Recipe, model: Path, data: Path, *, with_report: bool = False) -> None:
    with tempfile.TemporaryDirectory() as folder:
        result = onnxcalib.quantize(model, data, recipe, output=Path(folder) / "written.onnx")
        if with_report:
            report(result, model, data, Path(folder) / "report.html")


KINDS: dict[str, Callable[[Path, Path], None]] = {
    "float": _float,
    "quantize_static": _static,
    "plain": lambda model, data: _ours(Recipe(Pipeline.PLAIN), model, data),
    "light": lambda model, data: _ours(Recipe(Pipeline.LIGHT), model, data),
    "light, report": lambda model, data: _ours(Recipe(Pipeline.LIGHT), model, data, with_report=True),
    "light w4a8,w8a8": lambda model, data: _ours(MIXED, model, data),
    "advanced w4a4, 1 step": lambda model, data: _ours(TRAINED, model, data),
}
USUAL = ("plain", "light", "light, report", "light w4a8,w8a8")  # the rows if none is named


def main() -> None:
    """One model, or one measurement of it."""
    if sys.argv[1:2] == ["--one"]:
        _one(sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4]))
    elif len(sys.argv) > 2:
        unknown = [kind for kind in sys.argv[3:] if kind not in KINDS]
        if unknown:
            sys.exit(f"'{unknown[0]}' is not a row: name some of {', '.join(repr(kind) for kind in KINDS)}.")
        compare(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
    else:
        sys.exit(__doc__)


if __name__ == "__main__":
    main()
