"""rknn-toolkit2: builds for rk3588, counts Conv by the precision of its own report, runs its simulator."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

from common import Feed, Found, main
from rknn.api import RKNN

# A line of the report on the built model: number, operator, data type, target, ...
LINE = re.compile(
    r"^\s*(?:D RKNN: \S+ )?\s*\d+\s+(\w+)\s+(INT8|UINT8|INT16|FLOAT16|FLOAT|INT32|INT64|BOOL)\s+(NPU|CPU)\b"
)
LAYERS = ("Conv", "Gemm", "MatMul", "exMatMul", "FullyConnect")


@contextlib.contextmanager
def captured(path: Path) -> Iterator[None]:
    """What the compiler's native code prints goes to a file."""
    sys.stdout.flush()
    kept = [os.dup(1), os.dup(2)]
    with path.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        try:
            yield
        finally:
            sys.stdout.flush()
            os.dup2(kept[0], 1)
            os.dup2(kept[1], 2)


def probe(model: Path, feeds: list[Feed]) -> Found:
    """The model brings its own scales: nothing is quantized anew."""
    with tempfile.TemporaryDirectory() as folder:
        said = Path(folder) / "said"
        with captured(said):
            rknn = RKNN(verbose=True)
            # Its own advice for files that bring their scales: level 3 takes an Add into the Conv before it, unrounded.
            rknn.config(target_platform="rk3588", optimization_level=2)
            quantized = [rknn.load_onnx(str(model)), rknn.build(do_quantization=False), rknn.init_runtime()]
            outputs = [] if any(quantized) else [_run(rknn, feed) for feed in feeds]
        report = said.read_text(errors="replace")
    if any(quantized):
        errors = [line for line in report.splitlines() if line.startswith("E ")]
        raise RuntimeError(errors[0] if errors else f"load, build and init answered {quantized}")
    found = [match.groups() for line in report.splitlines() if (match := LINE.match(line))]
    layers = [(op, kind, place) for op, kind, place in found if op.startswith(LAYERS)]
    floats = [f"{op} {kind} {place}" for op, kind, place in layers if kind != "INT8" or place != "NPU"]
    return outputs, {"int8": len(layers) - len(floats), "layers": len(layers), "note": "; ".join(floats)[:300]}


def _run(rknn: RKNN, feed: Feed) -> list[Any]:
    """Images are given as the model has them; of tokens it knows no format."""
    images = all(value.ndim == 4 for value in feed.values())
    answer: list[Any] | None = rknn.inference(list(feed.values()), **({"data_format": ["nchw"]} if images else {}))
    if answer is None:
        raise RuntimeError("the simulator gives no answer")
    return answer


if __name__ == "__main__":
    main(lambda: version("rknn-toolkit2"), probe)
